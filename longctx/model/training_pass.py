"""``TrainingPass`` and ``Execution``: the inputs of a forward pass besides its batch and its weights.

Axes: B rows, t tokens of this rank, L expert layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from longctx.kernels.processor import Products, fastest_products
from longctx.mixing import mix64
from longctx.model.experts.capacity import Capacity
from longctx.model.experts.replay import RoutingReplay
from longctx.model.kept import Keep, Store
from longctx.model.layers.dropout import Dropout, Jitter

_SOURCE = 0x50E4CE
"""What tells the draws of an encoder from those of the decoder beside it."""


@dataclass(frozen=True)
class Execution:
    """Options for computing layers: the tensors kept for backward, the work done at a time, the way a CPU multiplies,
    and fusion by ``torch.compile``.

    They change results only by rounding.
    """

    keep: Keep = "all"
    """What survives of each block until backward: all; its input, the attention core's result and its tokens' experts;
    or its input and the experts' ids alone. Backward computes the rest again (activation checkpointing)."""
    store: Store = "device"
    """Where that lives until backward: on the device, or in the host's memory, the last block's excepted. With chunks
    also what passes between a layer's parts, and every block's; and it may be on a disk."""
    store_path: str = ""
    """Folder for a file on that disk."""
    chunk_tokens: int = 0
    """Tokens that go through a layer at a time (``longctx/model/chunks``); 0 for all at once."""
    head_groups: int = 1
    """With chunks, heads go through attention in so many groups, one after another."""
    recompute_experts: str = "activation"
    """What experts compute again in backward where a block keeps all (``ExpertRun.recompute``)."""
    expert_tile_tokens: int = 0
    """Tokens that go through a layer's experts at a time; 0 for all at once."""
    products: Products = field(default_factory=fastest_products)
    """How a CPU multiplies bfloat16: by default in the way that is faster on this machine's processor."""
    compiler: str | None = None
    """The backend of ``torch.compile`` that compiles what lies around attention cores in training (``Regions``), as
    inductor; None compiles nothing."""


@dataclass(frozen=True, eq=False)
class TrainingPass:
    """Inputs of one forward pass of training. Evaluation has none of them: all defaults."""

    seed: int | None = None
    """Decides all that is random. None switches off what happens in training alone: dropout, router jitter and the
    experts' capacity."""
    first_tokens: tuple[int, ...] = (0,)
    """For each row of the pass the index of its first token among all tokens that share the seed; one entry is that of
    the whole pass, whose rows then follow each other."""
    expert_load_LE: Tensor | None = None
    """The loads of the step before (``load_share``), for a balance loss over the global batch; None before the first
    step."""
    replay: RoutingReplay | None = None
    """Records the experts that routers choose, or gives them."""
    first_source_tokens: tuple[int, ...] = (0,)
    """``first_tokens`` of the source."""

    def of_source(self) -> TrainingPass:
        """Return the same pass for the tokens of a source, through the encoder."""
        seed = self.seed
        if seed is not None:
            # Tokens of both sides have the same indices, and layers the same numbers.
            seed = mix64(seed ^ _SOURCE)
        return TrainingPass(seed=seed, first_tokens=self.first_source_tokens)


EVALUATION = TrainingPass()


def is_random(config: ModelConfig, training_pass: TrainingPass) -> bool:
    """Return whether anything in the pass depends on the seed and on its tokens' indices."""
    if training_pass.seed is None:
        return False
    if config.residual_dropout:
        return True
    # A capacity draws nothing, but the assignments that it drops depend on the order of the tokens.
    return config.num_experts > 0 and (config.router_jitter > 0 or config.capacity_factor > 0)


class Random(NamedTuple):
    """Parts of a pass that are random or depend on its tokens' order; None for parts the model does not have."""

    dropout: Dropout | None = None
    jitter: Jitter | None = None
    capacity: Capacity | None = None


def build_random(
    config: ModelConfig,
    training_pass: TrainingPass,
    documents: PackedDocuments,
    positions_Bt: Tensor,
    document_ids_Bt: Tensor | None,
    *,
    row_tokens: int,
) -> Random:
    """Build dropout, router jitter and capacity of a pass over rows of ``row_tokens`` tokens (0: as they are here)."""
    seed = training_pass.seed
    if seed is None or document_ids_Bt is None or not is_random(config, training_pass):
        return Random()
    dropout, jitter, capacity = None, None, None
    token_Bt = token_indices(documents, positions_Bt, document_ids_Bt)
    # Indices among all tokens of the seed: a token's mask is the same however the batch is split over ranks.
    of_seed_Bt = _of_seed(training_pass, token_Bt, row_tokens)
    if config.residual_dropout:
        dropout = Dropout(config.residual_dropout, seed, of_seed_Bt)
    if config.num_experts and config.router_jitter:
        jitter = Jitter(config.router_jitter, seed, of_seed_Bt)
    if config.num_experts and config.capacity_factor:
        rows = row_tokens or documents.num_tokens // len(token_Bt)
        capacity = Capacity.build(config, token_Bt.flatten(), rows, documents.num_tokens)
    return Random(dropout, jitter, capacity)


def _of_seed(training_pass: TrainingPass, token_Bt: Tensor, row_tokens: int) -> Tensor:
    """Return the indices of tokens among all that share the seed."""
    first = training_pass.first_tokens
    if len(first) == 1:
        return token_Bt + first[0]
    if row_tokens == 0:
        row_tokens = token_Bt.shape[1]
    # Where each row begins, less where it begins in the micro-batch.
    moves = [start - row * row_tokens for row, start in enumerate(first)]
    # On the CPU, and sent along: a device would be waited for.
    moves_N = torch.tensor(moves).to(token_Bt.device, non_blocking=True)
    return token_Bt + moves_N[(token_Bt // row_tokens).clamp(min=0)]


def document_ids_of(documents: PackedDocuments, tokens_Bt: Tensor) -> Tensor:
    """Return the document of every token; raise ValueError unless these are all tokens of the documents."""
    if documents.num_tokens != tokens_Bt.numel():
        raise ValueError(
            f"{tokens_Bt.numel()} tokens are not the {documents.num_tokens} of cu_seqlens; a shard of them needs "
            "`document_ids`"
        )
    # Rows are laid end to end, so the documents' lengths are enough to assign each token.
    # On the CPU, where boundaries are: a device would be waited for, twice.
    lengths = torch.tensor(documents.lengths)
    ids_Bt = torch.arange(len(lengths)).repeat_interleave(lengths).view(tokens_Bt.shape)
    return ids_Bt.to(tokens_Bt.device, non_blocking=True)


def token_indices(documents: PackedDocuments, positions_Bt: Tensor, document_ids_Bt: Tensor) -> Tensor:
    """Return the index of each token in the micro-batch, −1 for padding."""
    # The index does not depend on the rank or the layout that the token came by.
    starts = documents.cu_seqlens.to(positions_Bt.device, non_blocking=True)
    return (starts[document_ids_Bt.clamp(min=0)] + positions_Bt).where(document_ids_Bt >= 0, -1)
