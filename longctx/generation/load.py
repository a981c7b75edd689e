"""Load the decoder of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from longctx.checkpoint_format import CheckpointReader, find_checkpoint, model_config
from longctx.errors import CheckpointError
from longctx.model.decoder import Decoder


def load_model(checkpoint: str | Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder of a checkpoint, or of a run's newest one, on the CPU, ready to generate from.

    Strict: CheckpointError unless the checkpoint holds exactly the decoder's tensors.
    """
    reader = CheckpointReader(find_checkpoint(checkpoint))
    model = Decoder(model_config(reader), seed=None).to(dtype)
    try:
        model.load_state_dict(dict(reader.state_dict(dtype)))
    except RuntimeError as error:
        raise CheckpointError(f"{reader.folder} does not hold the decoder of its own config: {error}") from error
    return model.eval()
