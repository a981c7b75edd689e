"""One new token of each of several sequences in one forward pass: attention of each alone, everything else together.

Sequences have caches of their own, of any lengths, on one process or on many: no key is padded, and no core knows that
it serves several. Products, experts and norms see a row of as many tokens as there are sequences.

Axes: B = 1 row, t tokens, one a sequence, H query heads, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.kernels.attention.contract import Scores
from longctx.model.attention.core import AttentionCore, AttentionShapes, KVCache, LayerCache, Plan, TokenChunk
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


@dataclass(frozen=True, eq=False)
class SequencesPlan:
    """The plan of each sequence's token, by the core that serves them all."""

    plans: tuple[Plan, ...]
    in_graph: bool = False


class SequencesCore:
    """Calls a core once for each sequence of a chunk, with its own cache."""

    def __init__(self, core: AttentionCore, chunks: tuple[TokenChunk, ...]) -> None:
        self._core = core
        self._chunks = chunks

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        return self._core.new_cache()

    def plan(self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None) -> SequencesPlan:
        """A plan for each sequence; what is where is said by each one's chunk."""
        mask = replace(mask, documents=ONE_TOKEN)
        plans: list[Plan] = []
        known: dict[int, Plan] = {}
        for chunk in self._chunks:
            plan = known.get(chunk.start)
            # On one process sequences of one length have one plan.
            if plan is None or chunk.placement is not None:
                of_one = replace(shapes, tokens=1, cached_tokens=chunk.start, unread_tokens=0)
                plan = known[chunk.start] = self._core.plan(mask, of_one, chunk.placement)
            plans.append(plan)
        return SequencesPlan(tuple(plans))

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: SequencesPlan,
        cache: Any = None,
        scores: Scores | None = None,
        sinks_H: Tensor | None = None,
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Output [B, t, H, V]; ``cache`` holds a ``LayerCache`` for each sequence."""
        outputs = []
        for row, (of_one, layer_cache) in enumerate(zip(plan.plans, cache, strict=True)):
            token = slice(row, row + 1)
            out = self._core(
                q_BtHD[:, token],
                k_BtKD[:, token],
                v_BtKV[:, token],
                plan=of_one,
                cache=layer_cache,
                scores=scores,
                sinks_H=sinks_H,
                recompute_cache=recompute_cache,
            )
            outputs.append(out)
        return torch.cat(outputs, dim=1)
