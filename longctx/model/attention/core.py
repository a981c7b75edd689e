"""AttentionCore: plan once a forward pass and kind of layer, then attend in every layer; the caches of decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.attention.contract import Scores
from longctx.kernels.dtypes import int64_tensor
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache

_FEW_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class AttentionShapes:
    """What a plan depends on besides its mask: this process's tensors, and how queries and keys become scores."""

    batch: int
    tokens: int
    """Query tokens of each row."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Head size of queries and keys."""
    value_dim: int
    dtype: torch.dtype
    device_type: str
    scale: float
    softcap: float | None = None
    rules: tuple[str, ...] = ()
    """``Scores.rules``."""
    cached_tokens: int | None = None
    """Earlier tokens whose keys a cache holds; None where there is no cache."""
    later_tokens: int = 0
    """``TokenChunk.later_tokens``: a cache makes space for all of them at once."""
    values_in_keys: bool = False
    """Whether values are the first ``value_dim`` channels of the keys, which a cache then stores once."""

    @classmethod
    def of(
        cls, q_BtHD: Tensor, k_BtKD: Tensor, v_BtKV: Tensor, scores: Scores, cached_tokens: int | None = None
    ) -> AttentionShapes:
        """The shapes of these tensors."""
        batch, tokens, num_heads, head_dim = q_BtHD.shape
        return cls(
            batch=batch,
            tokens=tokens,
            num_heads=num_heads,
            num_kv_heads=k_BtKD.shape[2],
            head_dim=head_dim,
            value_dim=v_BtKV.shape[3],
            dtype=q_BtHD.dtype,
            device_type=q_BtHD.device.type,
            scale=scores.scale,
            softcap=scores.softcap,
            rules=scores.rules,
            cached_tokens=cached_tokens,
        )

    def check_whole(self, documents: PackedDocuments) -> None:
        """ValueError unless this process holds all tokens of the documents."""
        if documents.num_tokens != self.batch * self.tokens:
            raise ValueError(
                f"{self.batch} rows of {self.tokens} tokens are not the {documents.num_tokens} tokens of cu_seqlens; "
                "a shard of them needs `document_ids` and a core that spans its ranks"
            )

    def check_call(self, q_BtHD: Tensor, sinks_H: Tensor | None) -> None:
        """ValueError for other queries than were planned for, ConfigError unless each of their heads has its sink."""
        # A plan of another batch would not fail in the kernel: its slices would just be of other rows.
        planned = (self.batch, self.tokens, self.num_heads, self.head_dim)
        if q_BtHD.shape != planned or q_BtHD.dtype != self.dtype:
            raise ValueError(
                f"queries {tuple(q_BtHD.shape)} of {q_BtHD.dtype} came with a plan for {planned} of {self.dtype}; "
                "plan again for each forward pass"
            )
        if sinks_H is not None and sinks_H.shape != (self.num_heads,):
            raise ConfigError(
                f"sinks_H has shape {tuple(sinks_H.shape)}; it needs one logit for each of {self.num_heads} query "
                "heads."
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenChunk:
    """New tokens that one forward pass adds to a cached sequence: a part of a prompt, or the token generated last."""

    start: int
    """Index of the chunk's first token in the sequence: as many tokens are cached before it."""
    num_tokens: int
    """Tokens of the chunk, on however many processes."""
    sequence_tokens: int
    """Tokens of the sequence once all that is known of it is read: it may go on behind the chunk."""
    given: tuple[range, ...]
    """Indices in the sequence of the tokens that this process is given, in their order."""
    is_replicated: bool = True
    """Whether every process is given all tokens of the chunk."""
    expected_tokens: int = 0
    """Tokens that are expected behind those that are known."""
    placement: Any = None
    """Where the chunk's tokens and all cached keys are, for the core that made the cache."""
    sequences: tuple[TokenChunk, ...] = ()
    """The chunks that these tokens are, of sequences with caches of their own; none for one sequence.

    ``start`` then says nothing, and ``sequence_tokens`` is that of the longest.
    """

    @property
    def num_given(self) -> int:
        """Tokens that this process is given."""
        return sum(map(len, self.given))

    @property
    def indices(self) -> Tensor:
        """Indices in the sequence of the tokens that this process is given, int64 on the CPU."""
        # As numbers where they are few, as in decoding: an operator for each range would take longer.
        if self.num_given <= _FEW_TOKENS:
            return int64_tensor(list(chain.from_iterable(self.given)))
        return torch.cat([torch.arange(part.start, part.stop, part.step) for part in self.given])

    @property
    def later_tokens(self) -> int:
        """Tokens that are known or expected to follow the chunk, on however many processes."""
        return self.sequence_tokens - self.start - self.num_tokens + self.expected_tokens


class LayerCache(Protocol):
    """What one layer stores of the tokens already seen, for one sequence that grows."""

    def append(
        self, k_BtKD: Tensor, v_BtKV: Tensor | None, *, earlier_rows: int | None = None, later_rows: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Store new keys and values; return all that are stored, [B, s, K, D] and [B, s, K, V].

        Of those stored before, only the newest ``earlier_rows`` are still seen, and the others are freed; None for all.
        ``later_rows`` are to follow. Values are None where they are channels of the keys.
        """
        ...

    def add_state(self, state_sBKDW: Tensor, num_tokens: int) -> None:
        """Add the state of new tokens to what a linear layer knows."""
        ...

    @property
    def state(self) -> Tensor | None:
        """The sum of what was added, None before anything was."""
        ...


class PassCache(Protocol):
    """What a forward pass reads of the tokens already seen, and adds its own to: of one sequence or of several."""

    def layer(self, number: int) -> Any:
        """The cache of one layer: a ``LayerCache``, or one for each sequence."""
        ...

    def chunk(self, num_tokens: int) -> TokenChunk:
        """The next tokens as a chunk that every process is given whole."""
        ...

    def extend(self, chunk: TokenChunk) -> None:
        """Note that every layer has seen the chunk."""
        ...


class KVCache(PassCache, Protocol):
    """Keys, values and states of the tokens already seen of a sequence, on one process or shared by several.

    Processes that share a cache call each of its methods alike.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens that every layer has seen."""
        ...

    def layer(self, number: int) -> LayerCache:
        """The cache of one layer."""
        ...

    def expect(self, num_tokens: int) -> None:
        """Make space for so many tokens behind what is read next, so that storing them copies nothing."""
        ...

    def copy(self) -> KVCache:
        """A cache of the same tokens, with memory of its own: both may go on, in different ways."""
        ...

    def free(self) -> None:
        """Forget all tokens and give their memory back: what is read next begins a sequence."""
        ...

    def chunks(self, num_tokens: int, chunk_tokens: int) -> Iterator[TokenChunk]:
        """The next tokens as chunks of about ``chunk_tokens``, each to be read before the next is asked for.

        Every process is given the last token.
        """
        ...

    def collect(self, values_Bt: Tensor, chunk: TokenChunk) -> Tensor:
        """Values of all tokens of the chunk, [B, T] in order, from those of the tokens that each process was given."""
        ...

    def once(self, choose: Callable[[], list[int]], count: int) -> list[int]:
        """The ``count`` integers that one of the processes chooses, told to all."""
        ...


class Plan(Protocol):
    """What a core does in every layer of one kind, for one forward pass; what is in it is the core's own."""

    @property
    def in_graph(self) -> bool:
        """Whether ``torch.compile`` may hold the core's work in a graph: nothing but the kernels' operators."""
        ...


class PassCore(Protocol):
    """What a forward pass asks of a core: to plan once a kind of layer, and to attend in each layer."""

    def plan(self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None) -> Plan:
        """What every layer of one kind will do; made before the first layer, and read again by recomputation.

        ``placement`` tells where the batch's tokens live, for a core that spreads them over processes
        (``Batch.placement``, ``TokenChunk.placement``); None leaves it to the core. Such a core's plan is collective.
        """
        ...

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: Any,
        cache: Any = None,
        scores: Scores | None = None,
        sinks_H: Tensor | None = None,
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Output [B, t, H, V] in q's dtype.

        ``plan`` is this core's, for these shapes; ``cache`` the layer's (``PassCache.layer``). ``scores`` default to
        the dot product scaled by D^-½. ``sinks_H`` are learnable logits, one a query head, of a key without value that
        every query sees (GPT-OSS). A ``recompute_cache`` keeps the result of a layer that backward will recompute, so
        that the core's work and communication are not done again."""
        ...


class AttentionCore(PassCore, Protocol):
    """Exact attention of this process's queries over every key of the sequence that the mask lets them see."""

    def new_cache(self) -> KVCache:
        """An empty cache for a sequence that this core's processes continue."""
        ...

    def new_caches(self, most: int) -> Callable[[], KVCache]:
        """What makes an empty cache, of which at most so many are in use together: their rows may lie side by side."""
        ...

    def plan_each(self, mask: AttentionMask, shapes: AttentionShapes, chunks: Sequence[TokenChunk]) -> Plan:
        """``plan`` for chunks of several sequences. ``mask`` and ``shapes`` are those of all tokens as one row."""
        ...

    def attend_each(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: Any,
        caches: Sequence[Any],
        scores: Scores | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Output [1, t, H, V] of the tokens of several sequences, by the plan for all and with the cache of each.

        Each sequence's is that of a call for it alone, but for rounding. There is no backward.
        """
        ...
