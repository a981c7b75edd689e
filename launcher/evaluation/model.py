"""Load a checkpoint's decoder for inference, on one process or over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from launcher.evaluation.opened import OpenedModel, Reader
from longctx.checkpoint_format import CheckpointReader
from longctx.config import ModelConfig
from longctx.errors import CheckpointError, ConfigError
from longctx.model.decoder import Decoder
from longctx.model.experts.experts import is_expert_weight
from parallel.mesh import Mesh, check_degrees, nearest
from parallel.parallelize import build_empty_decoder, check_experts

LAYOUT = "zigzag"
"""How a chunk is split. Its queries visit the keys of every rank, so work is even in all layouts."""


class Degrees(Protocol):
    """How many ranks share what."""

    @property
    def context(self) -> int:
        """Ranks that share a prompt; 0 for all."""
        ...

    @property
    def expert(self) -> int:
        """Ranks that share the experts."""
        ...


def check_mesh(options: Degrees, model: ModelConfig, world_size: int) -> None:
    """ConfigError unless the degrees fit the ranks, the experts and one another."""
    context = options.context or world_size
    check_degrees(world_size, context=context, expert=options.expert)
    check_experts(model, options.expert, world_size)
    # Ranks that share experts must decode one sequence together.
    if context % options.expert:
        fits = [degree for degree in range(1, context + 1) if context % degree == 0]
        raise ConfigError(
            f"parallel.expert={options.expert} does not divide parallel.context={context}: ranks that share experts "
            f"continue one prompt together.\nTry parallel.expert={nearest(options.expert, fits)} (any of {fits})."
        )


def build_decoder(opened: OpenedModel, mesh: Mesh, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The checkpoint's decoder on this rank, ready to generate; of the experts those that the rank holds.

    CheckpointError unless the checkpoint holds exactly the decoder's tensors.
    """
    # A process that shares neither prompts nor experts needs none of what ranks agree on.
    if mesh.context == 1:
        decoder = Decoder(opened.model, seed=None)
    else:
        decoder = build_empty_decoder(opened.model, mesh, layout=LAYOUT)
    decoder = decoder.to(dtype).to(device)
    _fill(decoder, opened)
    return decoder.eval()


@torch.no_grad()
def _fill(decoder: Decoder, opened: OpenedModel) -> None:
    """Copy the checkpoint's weights into the decoder, one at a time: a second model never fits beside a large one."""
    wanted = decoder.state_dict()
    _check_names(opened, set(wanted))
    for name, values in _weights(opened.reader):
        # Whole, so that every rank refuses it: a score of a broken model would look like a weak model's.
        if not values.isfinite().all():
            raise CheckpointError(
                f"{opened.folder}: {name} holds numbers that are not finite, so the model can say nothing.\n"
                "Take an earlier checkpoint: `checkpoint list` names them."
            )
        if is_expert_weight(name):
            values = values[decoder.dispatcher.local_experts]
        if values.shape != wanted[name].shape:
            raise CheckpointError(
                f"{opened.folder}: {name} has shape {tuple(values.shape)}, and the decoder of its own config wants "
                f"{tuple(wanted[name].shape)}."
            )
        wanted[name].copy_(values)


def _check_names(opened: OpenedModel, wanted: set[str]) -> None:
    stored = set(opened.reader.names())
    if stored != wanted:
        raise CheckpointError(
            f"{opened.folder} does not hold the decoder of its own config: {sorted(stored ^ wanted)[:6]} are on one "
            "side only."
        )


def _weights(reader: Reader) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight; of our checkpoints the fp32 master, which is rounded once when it is copied."""
    if isinstance(reader, CheckpointReader):
        yield from reader.state_dict(torch.float32)
    else:
        yield from reader
