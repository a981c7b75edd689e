"""Decoder loading from a checkpoint or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from longctx.checkpoint_format import MANIFEST, CheckpointReader, find_checkpoint, is_buffer, model_config
from longctx.checkpoint_manifest import where_to_get
from longctx.conversion import load_hf
from longctx.errors import CheckpointError, ConfigError
from longctx.model.adapters import as_stored
from longctx.model.attention.core import AttentionCore
from longctx.model.decoder import Decoder


def find_model(folder: str | Path) -> Path:
    """Return a checkpoint or Hugging Face folder itself, or a run folder's newest checkpoint.

    Raise ConfigError if the path does not exist, CheckpointError if the folder holds neither.
    """
    if not Path(folder).exists():
        raise ConfigError(
            f"checkpoint {folder} does not exist. Give a checkpoint, a run folder or a Hugging Face folder that "
            f"this machine can read.{where_to_get(Path(folder))}"
        )
    if contains_hf_model(folder):
        return Path(folder)
    return find_checkpoint(folder)


def contains_hf_model(folder: str | Path) -> bool:
    """Return True if a folder holds a Hugging Face model, not one of our checkpoints."""
    return (Path(folder) / "config.json").is_file() and not (Path(folder) / MANIFEST).is_file()


def load_model(
    folder: str | Path, dtype: torch.dtype = torch.float32, *, cores: Mapping[str, AttentionCore] | None = None
) -> Decoder:
    """Load the decoder from a checkpoint, a run's newest one, or a Hugging Face folder: on the CPU, for generation.

    ``cores`` replaces attention cores by mixer name (``Decoder``). Raise CheckpointError unless the folder holds
    exactly the decoder's tensors.
    """
    folder = find_model(folder)
    reader, weights = None, {}
    if contains_hf_model(folder):
        config, weights = load_hf(folder)
    else:
        reader = CheckpointReader(folder)
        config = model_config(reader)
    # No seed: every weight is loaded, so random initialization would only take time.
    model = Decoder(config, cores, seed=None).to(dtype)
    if reader is not None:
        weights = {name: _stored_value(reader, name, model, dtype) for name in reader.names()}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{folder} does not contain its config's decoder: {error}") from error
    return model.eval()


def _stored_value(reader: CheckpointReader, name: str, model: Decoder, dtype: torch.dtype) -> torch.Tensor:
    """Read a weight in ``dtype``, or quantized from float32; buffers stay in float32."""
    values = as_stored(model.layouts, name, reader.read(name))
    if values.is_floating_point() and not is_buffer(name):
        values = values.to(dtype)
    return values
