"""One new token of each of several sequences in one forward pass: attention of each alone, everything else together.

Sequences have caches of their own, of any lengths, on one process or on many, and no key is padded. Products, experts
and norms see a row of as many tokens as there are sequences.

Axes: B = 1 row, t tokens, one a sequence, H query heads, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.kernels.attention.contract import Scores
from longctx.model.attention.core import AttentionCore, AttentionShapes, KVCache, LayerCache, PassCore, Plan, TokenChunk
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache

ONE_TOKEN = PackedDocuments.of([0, 1])


class SequencesCache:
    """The caches of several sequences, each of which is given one token."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self._caches = list(caches)

    def layer(self, number: int) -> list[LayerCache]:
        """The cache of one layer of each sequence."""
        return [cache.layer(number) for cache in self._caches]

    def chunk(self, num_tokens: int) -> TokenChunk:
        """The next token of each sequence."""
        assert num_tokens == len(self._caches), f"{num_tokens} tokens of {len(self._caches)} sequences"
        chunks = tuple(cache.chunk(1) for cache in self._caches)
        return TokenChunk(
            start=0,
            num_tokens=num_tokens,
            sequence_tokens=max(chunk.sequence_tokens for chunk in chunks),
            indices=torch.tensor([chunk.start for chunk in chunks]),
            sequences=chunks,
        )

    def extend(self, chunk: TokenChunk) -> None:
        """Note that every layer has seen the token of each sequence."""
        for cache, part in zip(self._caches, chunk.sequences, strict=True):
            cache.extend(part)


class SequencesCore:
    """Lets a core attend for each sequence of a chunk, with its own cache."""

    def __init__(self, core: AttentionCore, chunks: tuple[TokenChunk, ...]) -> None:
        self._core = core
        self._chunks = chunks

    def plan(self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None) -> Plan:
        """The plan of all sequences; each one's chunk says where its keys are."""
        return self._core.plan_each(replace(mask, documents=ONE_TOKEN), replace(shapes, tokens=1), self._chunks)

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: Plan,
        cache: Any = None,
        scores: Scores | None = None,
        sinks_H: Tensor | None = None,
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Output [B, t, H, V]; ``cache`` holds a ``LayerCache`` for each sequence."""
        return self._core.attend_each(q_BtHD, k_BtKD, v_BtKV, plan=plan, caches=cache, scores=scores, sinks_H=sinks_H)


@dataclass(frozen=True, eq=False)
class EachAlone:
    """A plan for each of some tokens by itself."""

    tokens: tuple[int, ...]
    """Which of the pass's tokens they are."""
    plans: tuple[Any, ...]
    in_graph: bool = False


def plan_alone(
    core: PassCore, mask: AttentionMask, shapes: AttentionShapes, places: Mapping[int, tuple[int, Any]]
) -> EachAlone:
    """The core's own plan for each of these tokens, given how many are before it, and the placement.

    Tokens of which both are equal share one.
    """
    plans = []
    known: dict[Any, Plan] = {}
    for start, placement in places.values():
        if (start, placement) not in known:
            of_one = replace(shapes, cached_tokens=start, unread_tokens=0)
            known[start, placement] = core.plan(mask, of_one, placement)
        plans.append(known[start, placement])
    return EachAlone(tuple(places), tuple(plans))


def places_of(chunks: Sequence[TokenChunk]) -> dict[int, tuple[int, Any]]:
    """What ``plan_alone`` wants of every token."""
    return {number: (chunk.start, chunk.placement) for number, chunk in enumerate(chunks)}


def attend_alone(
    core: PassCore,
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    plan: EachAlone,
    caches: Sequence[LayerCache],
    scores: Scores | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Output [1, n, H, V] of a core that is called for one of the plan's tokens after another."""
    outs = []
    for number, of_one in zip(plan.tokens, plan.plans, strict=True):
        token = slice(number, number + 1)
        out = core(
            q_BtHD[:, token],
            k_BtKD[:, token],
            v_BtKV[:, token],
            plan=of_one,
            cache=caches[number],
            scores=scores,
            sinks_H=sinks_H,
        )
        outs.append(out)
    return torch.cat(outs, dim=1)
