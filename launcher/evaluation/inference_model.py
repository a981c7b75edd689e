"""Checkpoint loading for inference, in one process or on a mesh, and the number of prompts that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from launcher.evaluation.model_source import ModelSource, Reader
from longctx.checkpoint_format import CheckpointReader
from longctx.config import ModelConfig
from longctx.errors import CheckpointError
from longctx.generation.cache_size import cache_bytes
from longctx.model.adapters import as_stored
from longctx.model.decoder import Decoder
from longctx.model.experts.experts import is_expert_weight
from parallel.comm.world import gather_objects
from parallel.mesh import Mesh
from parallel.parallelize import build_empty_decoder
from parallel.runtime.device import free_device_bytes

LAYOUT = "zigzag"
"""Split of a chunk over ranks. Queries visit the keys on every rank, so all layouts balance the work."""


def build_decoder(model_source: ModelSource, mesh: Mesh, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build the checkpoint's decoder on this rank, ready to generate, with only this rank's experts.

    Raise CheckpointError unless the checkpoint has exactly the decoder's tensors.
    """
    # A process that shares neither prompts nor experts needs no agreement between ranks.
    if mesh.context == 1:
        decoder = Decoder(model_source.model, seed=None)
    else:
        decoder = build_empty_decoder(model_source.model, mesh, layout=LAYOUT)
    # Convert the empty decoder: each weight is then rounded once, while it is copied.
    decoder = decoder.to(dtype).to(device)
    _fill(decoder, model_source)
    return decoder.eval()


def check_finite(nll: torch.Tensor, folder: Path, name: str, dtype: str) -> None:
    """Raise CheckpointError unless all losses in a text are finite."""
    # A single non-finite loss would spoil every mean that contains it.
    if not nll.isfinite().all():
        raise CheckpointError(
            f"{folder}: the loss of {name!r} is not finite from token {int((~nll.isfinite()).nonzero()[0]) + 1} on: "
            f"the weights are corrupted, or too large for --dtype {dtype}. Try an earlier checkpoint, or --dtype "
            "float32."
        )


@torch.no_grad()
def _fill(decoder: Decoder, model_source: ModelSource) -> None:
    """Copy the checkpoint's weights into the decoder one at a time: a second copy of a large model does not fit."""
    wanted = decoder.state_dict()
    _check_names(model_source, set(wanted))
    for name, values in _weights(model_source.reader):
        # Check the full tensor, so that every rank refuses it: a broken model's score would look like a weak model's.
        if not values.isfinite().all():
            raise CheckpointError(
                f"{model_source.folder}: {name} contains non-finite values, so the model is unusable.\nUse an earlier "
                "checkpoint: `checkpoint list` lists them."
            )
        # Checkpoints store all experts; this rank keeps its own.
        if is_expert_weight(name):
            values = values[decoder.dispatcher.local_experts]
        expected = tuple(wanted[name].shape)
        if name in decoder.layouts:
            expected = decoder.layouts[name].shape
        if tuple(values.shape) != expected:
            raise CheckpointError(
                f"{model_source.folder}: {name} has shape {tuple(values.shape)}, and the decoder in its config "
                f"expects {expected}."
            )
        wanted[name].copy_(as_stored(decoder.layouts, name, values))


def _check_names(model_source: ModelSource, wanted: set[str]) -> None:
    stored = set(model_source.reader.names())
    if stored != wanted:
        raise CheckpointError(
            f"{model_source.folder} does not contain the decoder that its config describes: missing or extra tensors: "
            f"{sorted(stored ^ wanted)[:6]}."
        )


def _weights(reader: Reader) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight; for our checkpoints the fp32 master, which is rounded once when it is copied."""
    if isinstance(reader, CheckpointReader):
        yield from reader.state_dict(torch.float32)
    else:
        yield from reader


def fitting_together(
    model: ModelConfig,
    mesh: Mesh,
    device: torch.device,
    num_tokens: int,
    *,
    dtype: torch.dtype,
    chunk_tokens: int,
    most: int,
) -> int:
    """Return how many sequences with ``num_tokens`` fit on every rank, from one to ``most``. Collective."""
    of_one = cache_bytes(model, num_tokens, dtype, chunk_tokens=chunk_tokens, degree=mesh.context)
    # Half of the free memory: growing buffers are copied, and a pass over a chunk needs memory too.
    fitting = free_device_bytes(device) // 2 // of_one
    # Ranks that share sequences must process the same number: the rank with the least memory decides.
    return max(1, min(most, min(gather_objects(fitting))))
