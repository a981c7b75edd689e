"""New tokens from several sequences in one forward pass: attention runs per sequence, all other layers run once.

Sequences have separate caches, of any lengths, on one process or on many, and no key is padded. Matmuls, experts and
norms see one row: the first sequence's tokens, then the next one's.

Axes: B = 1 row, t tokens from all sequences on this process, H query heads, K key/value heads, D query/key head size, V
value head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.model.attention.core import AttentionCore, AttentionShapes, Plan
from longctx.model.attention.kv_cache import KVCache, LayerCache, TokenChunk
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache
from longctx.model.source import EncodedSource


class SequencesCache:
    """Caches for several sequences that receive new tokens together."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self._caches = list(caches)

    @property
    def sources(self) -> list[EncodedSource | None]:
        """Source that each sequence reads in addition to its own tokens."""
        return [cache.source for cache in self._caches]

    def layer(self, number: int) -> list[LayerCache]:
        """Return each sequence's cache for one layer."""
        return [cache.layer(number) for cache in self._caches]

    def chunk(self, num_tokens: int) -> TokenChunk:
        """Return the next token for each sequence, as one chunk."""
        assert num_tokens == len(self._caches), f"{num_tokens} tokens of {len(self._caches)} sequences"
        return join([cache.chunk(1) for cache in self._caches])

    def tokens_per_source(self, chunk: TokenChunk) -> list[int]:
        """Count this process's tokens in the chunk per source; a sequence's beams share one."""
        each = zip(self.sources, chunk.sequences, strict=True)
        return [sum(part.num_given for _, part in same) for _, same in groupby(each, key=lambda pair: id(pair[0]))]

    def extend(self, chunk: TokenChunk) -> None:
        """Record that every layer has seen each sequence's tokens."""
        for cache, part in zip(self._caches, chunk.sequences, strict=True):
            cache.extend(part)


def join(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """Join chunks from several sequences; each process holds its tokens from all of them, one after another."""
    assert len({chunk.is_replicated for chunk in chunks}) == 1, "chunks that are split, and others that are not"
    # A sequence's own properties, such as its start and its keys' placement, are read from its own chunk.
    return TokenChunk(
        start=0,
        num_tokens=sum(chunk.num_tokens for chunk in chunks),
        sequence_tokens=max(chunk.sequence_tokens for chunk in chunks),
        given=tuple(part for chunk in chunks for part in chunk.given),
        is_replicated=chunks[0].is_replicated,
        sequences=tuple(chunks),
    )


class SequencesCore:
    """Core that attends for each sequence in a chunk, with its own cache."""

    def __init__(self, core: AttentionCore, chunks: tuple[TokenChunk, ...]) -> None:
        self._core = core
        self._chunks = chunks

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> Plan:
        """Plan all sequences; each chunk carries its keys' placement."""
        return self._core.plan_sequences(mask, shapes, self._chunks)

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: Plan,
        cache: Any = None,
        scores: ScoreRules | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Compute the output [B, t, H, V]; ``cache`` holds one ``LayerCache`` per sequence."""
        return self._core.forward_sequences(
            q_BtHD, k_BtKD, v_BtKV, plan=plan, caches=cache, scores=scores, weights=weights
        )


PassCache = KVCache | SequencesCache
"""Past tokens that a forward pass reads and extends, for one sequence or several."""
