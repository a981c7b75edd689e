"""Where heads look: how much of their attention the queries of a block give to the keys of a block.

A block's share is an output of attention itself. The values are replaced by vectors that name the key's block, so the
model's own kernel sums the weights, under the layer's own mask and scores, and no matrix of all queries and keys is
ever formed.

Axes: B rows (one), T tokens, H query heads, K key/value heads, D query/key head size, N blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.attention.contract import Scores
from longctx.model.attention.core import AttentionCore, AttentionShapes
from longctx.model.attention.local import LocalAttention
from longctx.model.attention.mask import AttentionMask
from longctx.model.attention.plans import layer_mask
from longctx.model.decoder import Decoder


@dataclass(frozen=True, eq=False, kw_only=True)
class Blocks:
    """A sequence in blocks of neighbouring tokens; the last one may be shorter."""

    num_tokens: int
    size: int
    """Tokens of a block."""

    @classmethod
    def of(cls, num_tokens: int, at_most: int) -> Blocks:
        """At most so many blocks, as even as whole tokens allow."""
        if at_most < 1:
            raise ConfigError(f"blocks={at_most} must be at least 1.")
        return cls(num_tokens=num_tokens, size=-(-num_tokens // at_most))

    @property
    def count(self) -> int:
        """Number of blocks."""
        return -(-self.num_tokens // self.size)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First token of each block, and the one after its last."""
        return [(at, min(at + self.size, self.num_tokens)) for at in range(0, self.num_tokens, self.size)]

    def names(self) -> Tensor:
        """A vector [T, N] for each token, 1 at its block."""
        block_T = torch.arange(self.num_tokens) // self.size
        return torch.nn.functional.one_hot(block_T, self.count).float()

    def mean(self, values_TN: Tensor) -> Tensor:
        """The mean over the tokens of each block, [N, …]."""
        block_T = torch.arange(self.num_tokens) // self.size
        total = values_TN.new_zeros(self.count, *values_TN.shape[1:]).index_add_(0, block_T, values_TN)
        sizes = torch.tensor([stop - start for start, stop in self.bounds], dtype=values_TN.dtype)
        return total / sizes.view(-1, *(1 for _ in values_TN.shape[1:]))


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadPattern:
    """One head's attention over one sequence; both matrices have a row a block of queries."""

    layer: int
    head: int
    blocks: Blocks
    documents: PackedDocuments
    weights_NN: Tensor
    """Share of a query's attention that the block of keys gets, the mean over the block's queries. A row sums to 1,
    less what a learned sink takes."""
    seen_NN: Tensor
    """Share of the block's queries whose mask lets them see any key of the block."""


@torch.no_grad()
def attention_patterns(
    model: Decoder,
    tokens_T: Tensor,
    positions_T: Tensor,
    documents: PackedDocuments,
    *,
    layer: int,
    heads: Sequence[int] = (),
    blocks: int = 64,
) -> list[HeadPattern]:
    """The patterns of some heads of a layer, by default all, over one row of packed documents.

    ConfigError for a layer or head that the model does not have, and for a layer without softmax.
    """
    chosen = check_heads(model, layer, heads)
    cut = Blocks.of(len(tokens_T), blocks)
    found = _record(model, tokens_T, positions_T, documents, layer)
    mask = layer_mask(model.config.layer_kind(layer), documents, model.config)
    seen_NN = cut.mean((_look(_Heads.blind(found), mask, cut) > 0).float())
    patterns = []
    for head in chosen:
        weights_NN = cut.mean(_look(found.of_head(head), mask, cut))
        patterns.append(
            HeadPattern(
                layer=layer, head=head, blocks=cut, documents=documents, weights_NN=weights_NN, seen_NN=seen_NN
            )
        )
    return patterns


def check_heads(model: Decoder, layer: int, heads: Sequence[int]) -> list[int]:
    """The chosen heads, all where none is named; ConfigError for what the model does not have."""
    config = model.config
    if not 0 <= layer < config.num_layers:
        raise ConfigError(f"layer={layer}: the model has layers 0 to {config.num_layers - 1}.")
    if config.layer_kind(layer) == "linear":
        softmax = [n for n in range(config.num_layers) if config.layer_kind(n) != "linear"]
        raise ConfigError(
            f"layer={layer} has linear attention, which gives keys no weights. Layers with softmax: {softmax}."
        )
    for head in heads:
        if not 0 <= head < config.num_heads:
            raise ConfigError(f"head={head}: a layer has heads 0 to {config.num_heads - 1}.")
    return list(dict.fromkeys(heads)) or list(range(config.num_heads))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Heads:
    """What one layer hands to its core, without the values."""

    q_BTHD: Tensor
    k_BTKD: Tensor
    scores: Scores
    sinks_H: Tensor | None

    def of_head(self, head: int) -> _Heads:
        """One query head and the keys that it shares with others."""
        H, K = self.q_BTHD.shape[2], self.k_BTKD.shape[2]
        shared = head * K // H
        sinks_H = None
        if self.sinks_H is not None:
            sinks_H = self.sinks_H[head : head + 1]
        return _Heads(
            q_BTHD=self.q_BTHD[:, :, head : head + 1],
            k_BTKD=self.k_BTKD[:, :, shared : shared + 1],
            scores=self.scores.of_heads(head, head + 1),
            sinks_H=sinks_H,
        )

    @classmethod
    def blind(cls, like: _Heads) -> _Heads:
        """A head that gives every key it sees the same weight."""
        one = like.of_head(0)
        return cls(q_BTHD=torch.zeros_like(one.q_BTHD), k_BTKD=one.k_BTKD, scores=Scores(scale=1.0), sinks_H=None)


class _Recorder:
    """A core that notes what it is handed, and lets another one attend."""

    def __init__(self, core: AttentionCore) -> None:
        self._core = core
        self.found: _Heads | None = None

    def __call__(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKV: Tensor,
        *,
        scores: Scores,
        sinks_H: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        self.found = _Heads(q_BTHD=q_BTHD.float(), k_BTKD=k_BTKD.float(), scores=scores, sinks_H=sinks_H)
        return self._core(q_BTHD, k_BTKD, v_BTKV, scores=scores, sinks_H=sinks_H, **options)


def _record(
    model: Decoder, tokens_T: Tensor, positions_T: Tensor, documents: PackedDocuments, layer: int
) -> _Heads:
    """Queries and keys of a layer, as its core gets them."""
    recorders: list[_Recorder] = []

    def listen(block: Any, arguments: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        call = options["call"]
        recorders.append(_Recorder(call.core))
        return arguments, {**options, "call": dataclasses.replace(call, core=recorders[-1])}

    hook = model.model.layers[layer].register_forward_pre_hook(listen, with_kwargs=True)
    try:
        model(tokens_T[None], positions_T[None], documents)
    finally:
        hook.remove()
    found = recorders[-1].found
    assert found is not None, "the layer called no core"
    return found


def _look(heads: _Heads, mask: AttentionMask, blocks: Blocks) -> Tensor:
    """What each query of one head gives to each block of keys, [T, N]."""
    q, k = heads.q_BTHD, heads.k_BTKD
    v_BTKN = blocks.names().to(q.device)[None, :, None]
    core = LocalAttention()
    plan = core.plan(mask, AttentionShapes.of(q, k, v_BTKN, heads.scores))
    out_BTHN = core(q, k, v_BTKN, plan=plan, scores=heads.scores, sinks_H=heads.sinks_H)
    return out_BTHN[0, :, 0].cpu()
