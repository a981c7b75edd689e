"""TrainingPass and Execution: a forward pass's inputs in addition to its batch and weights.

Axes: B rows, t tokens of this rank, L expert layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from longctx.integer_hash import mix64
from longctx.kernels.processor import MatmulMode, fastest_matmul_mode
from longctx.model.activation_offload import Keep, Store
from longctx.model.experts.capacity import Capacity
from longctx.model.experts.replay import RoutingReplay
from longctx.model.layers.dropout import Dropout, Jitter

_SOURCE = 0x50E4CE
"""Salt that separates an encoder's random draws from the decoder's."""


@dataclass(frozen=True)
class Execution:
    """Options for computing layers: tensors kept for backward, work per call, CPU matmul and ``torch.compile``.

    They change results only by rounding.
    """

    keep: Keep = "all"
    """What each block keeps until backward: everything; its input, the core's result and expert ids; or only its input
    and expert ids. Backward recomputes the rest (activation checkpointing)."""
    store: Store = "device"
    """Where that stays until backward: on the device, or on the host except for the last block's. By chunks the store
    also holds values between a layer's parts and the last block's, and may be a disk."""
    store_path: str = ""
    """Directory for the disk store's file."""
    chunk_tokens: int = 0
    """Tokens that go through a layer at a time (``longctx/model/chunks``); 0 for all at once."""
    head_groups: int = 1
    """Number of head groups that go through attention one after another, with chunks."""
    recompute_experts: str = "activation"
    """What experts recompute in backward if a block keeps all (``ExpertRun.recompute``)."""
    expert_tile_tokens: int = 0
    """Tokens that go through a layer's experts at a time; 0 for all at once."""
    matmul_mode: MatmulMode = field(default_factory=fastest_matmul_mode)
    """bfloat16 matmul on a CPU; by default the faster way on this machine's processor."""
    compiler: str | None = None
    """``torch.compile`` backend for the code around attention cores in training (``Regions``), such as inductor; None
    disables compilation."""


class Random(NamedTuple):
    """Random or order-dependent parts of a pass; None for parts that the model lacks."""

    dropout: Dropout | None = None
    jitter: Jitter | None = None
    capacity: Capacity | None = None


@dataclass(frozen=True, eq=False)
class TrainingPass:
    """Training inputs to one forward pass; evaluation leaves all of them at their defaults."""

    seed: int | None = None
    """Seed for all randomness. None disables dropout, router jitter and expert capacity, which are for training only.
    """
    first_tokens: tuple[int, ...] = (0,)
    """Index of each row's first token among all tokens that share the seed; a single entry is for the entire pass, with
    consecutive rows."""
    expert_load_LE: Tensor | None = None
    """Expert loads from the step before (``load_share``), for a global-batch balance loss; None before the first step.
    """
    replay: RoutingReplay | None = None
    """Records the experts that routers choose, or supplies them."""
    first_source_tokens: tuple[int, ...] = (0,)
    """``first_tokens`` for the source."""

    def of_source(self) -> TrainingPass:
        """Return the same pass for a source's tokens in the encoder."""
        seed = self.seed
        if seed is not None:
            # Both sides have equal token indices and layer numbers, so their seeds must differ.
            seed = mix64(seed ^ _SOURCE)
        return TrainingPass(seed=seed, first_tokens=self.first_source_tokens)

    def is_random(self, config: ModelConfig) -> bool:
        """Return whether the pass depends on the seed or on its tokens' indices."""
        if self.seed is None:
            return False
        if config.residual_dropout:
            return True
        # Capacity is not random, but the assignments that it drops depend on token order.
        return config.num_experts > 0 and (config.router_jitter > 0 or config.capacity_factor > 0)

    def build_random(
        self,
        config: ModelConfig,
        documents: PackedDocuments,
        positions_Bt: Tensor,
        document_ids_Bt: Tensor | None,
        *,
        row_tokens: int,
    ) -> Random:
        """Build dropout, router jitter and capacity for rows of ``row_tokens`` tokens (0: the rows given)."""
        seed = self.seed
        if seed is None or document_ids_Bt is None or not self.is_random(config):
            return Random()
        dropout, jitter, capacity = None, None, None
        token_Bt = token_indices(documents, positions_Bt, document_ids_Bt)
        # Indices among all tokens of the seed: a token's mask is the same however ranks split the batch.
        of_seed_Bt = self._of_seed(token_Bt, row_tokens)
        if config.residual_dropout:
            dropout = Dropout(config.residual_dropout, seed, of_seed_Bt)
        if config.num_experts and config.router_jitter:
            jitter = Jitter(config.router_jitter, seed, of_seed_Bt)
        if config.num_experts and config.capacity_factor:
            rows = row_tokens or documents.num_tokens // len(token_Bt)
            capacity = Capacity.build(config, token_Bt.flatten(), rows, documents.num_tokens)
        return Random(dropout, jitter, capacity)

    def _of_seed(self, token_Bt: Tensor, row_tokens: int) -> Tensor:
        """Return token indices among all tokens that share the seed."""
        first = self.first_tokens
        if len(first) == 1:
            return token_Bt + first[0]
        if row_tokens == 0:
            row_tokens = token_Bt.shape[1]
        # Each row's start among the seed's tokens, minus its start in the micro-batch.
        moves = [start - row * row_tokens for row, start in enumerate(first)]
        # Built on the CPU and copied asynchronously: building it on the device would wait for the device.
        moves_N = torch.tensor(moves).to(token_Bt.device, non_blocking=True)
        return token_Bt + moves_N[(token_Bt // row_tokens).clamp(min=0)]


EVALUATION = TrainingPass()


def document_ids_of(documents: PackedDocuments, tokens_Bt: Tensor) -> Tensor:
    """Return each token's document; raise ValueError unless these are all tokens in the documents."""
    if documents.num_tokens != tokens_Bt.numel():
        raise ValueError(
            f"{tokens_Bt.numel()} tokens are not the {documents.num_tokens} of cu_seqlens; a shard of them needs "
            "`document_ids`"
        )
    # Rows are laid end to end, so document lengths are enough. They stay on the CPU, like the boundaries: on a device
    # this would wait twice.
    lengths = torch.tensor(documents.lengths)
    ids_Bt = torch.arange(len(lengths)).repeat_interleave(lengths).view(tokens_Bt.shape)
    return ids_Bt.to(tokens_Bt.device, non_blocking=True)


def token_indices(documents: PackedDocuments, positions_Bt: Tensor, document_ids_Bt: Tensor) -> Tensor:
    """Return each token's index in the micro-batch, −1 for padding."""
    # The index depends neither on the rank nor on the layout.
    starts = documents.cu_seqlens.to(positions_Bt.device, non_blocking=True)
    return (starts[document_ids_Bt.clamp(min=0)] + positions_Bt).where(document_ids_Bt >= 0, -1)
