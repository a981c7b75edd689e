"""KVCache: keys, values and layer states that one process stores to continue a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from longctx.batch import Stream
from longctx.kernels.dtypes import int64_tensor
from longctx.model.attention.slots import SLOT_TOKENS, SlotLayer, SlotPool

if TYPE_CHECKING:
    from longctx.model.source import EncodedSource

_FEW_TOKENS = 32


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenChunk:
    """New tokens that one forward pass adds to a cached sequence: part of a prompt, or the last generated token."""

    start: int
    """Index of the chunk's first token, equal to the number of cached tokens before it."""
    num_tokens: int
    """Tokens in the chunk, over all processes."""
    sequence_tokens: int
    """Sequence length once every known token is read; the sequence may continue after the chunk."""
    given: tuple[range, ...]
    """Sequence indices of this process's tokens, in their order."""
    is_replicated: bool = True
    """True if every process receives all tokens of the chunk."""
    expected_tokens: int = 0
    """Tokens expected after the known ones."""
    placement: Any = None
    """Location of the chunk's tokens and all cached keys; only the core that made the cache reads it."""
    sequences: tuple[TokenChunk, ...] = ()
    """Per-sequence chunks if these tokens come from several sequences with separate caches; empty for one sequence.

    ``start`` then has no meaning, and ``sequence_tokens`` is the longest sequence's.
    """

    @property
    def num_given(self) -> int:
        """Number of tokens that this process receives."""
        return sum(map(len, self.given))

    @property
    def indices(self) -> Tensor:
        """Sequence indices of this process's tokens, int64 on the CPU."""
        # Decoding passes few tokens: building one list is cheaper than an operator per range.
        if self.num_given <= _FEW_TOKENS:
            return int64_tensor(list(chain.from_iterable(self.given)))
        return torch.cat([torch.arange(part.start, part.stop, part.step) for part in self.given])

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens known or expected to follow the chunk, over all processes."""
        return self.sequence_tokens - self.start - self.num_tokens + self.expected_tokens


class LayerCache:
    """One layer's key and value rows in buffers that grow on demand, or its recurrent state.

    The first buffers may belong to a slot; rows move out once they no longer fit.
    """

    def __init__(self, slots: SlotLayer | None = None, slot: int = 0) -> None:
        """Create an empty cache; ``slot`` is its index in the layer's ``slots``."""
        self.slots = slots
        """Slots that hold the rows; None if the rows have their own buffers."""
        self._slot = slot
        self.num_tokens = 0
        """Tokens added so far, including those that are no longer stored."""
        self.state: Any = None
        """State after those tokens, for layers with a state; its type is private to the core."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._first, self._stop = 0, 0
        """Range of stored rows in the buffers."""

    @property
    def num_rows(self) -> int:
        """Number of stored rows."""
        return self._stop - self._first

    def append(
        self, k_BtKD: Tensor, v_BtKV: Tensor | None, *, visible_rows: int | None = None, reserved_rows: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Keep the newest ``visible_rows`` stored rows (default: all), append the new ones, and return all rows.

        The second result is None if the layer stores no values. A reallocated buffer also has room for
        ``reserved_rows``.
        """
        if visible_rows is not None:
            assert visible_rows <= self.num_rows, f"{visible_rows} of {self.num_rows} rows"
            # Moving the start drops rows that a window no longer reaches, without a copy.
            self._first = self._stop - visible_rows
        stop = self._stop + k_BtKD.shape[1]
        if self.slots is not None and stop <= SLOT_TOKENS and len(k_BtKD) == 1:
            self.slots.make_ready(stop, k_BtKD, v_BtKV)
            self._keys, self._values = self.slots.of_slot(self._slot)
        elif self._keys is None or self._keys.shape[1] < stop:
            self._reallocate(k_BtKD, v_BtKV, reserved_rows)
            stop = self._stop + k_BtKD.shape[1]
        assert self._keys is not None
        self._keys[:, self._stop : stop] = k_BtKD
        values = None
        if self._values is not None and v_BtKV is not None:
            self._values[:, self._stop : stop] = v_BtKV
            values = self._values[:, self._first : stop]
        self._stop = stop
        self.num_tokens += k_BtKD.shape[1]
        return self._keys[:, self._first : stop], values

    def count_row(self) -> None:
        """Count one row that was written directly into the slot."""
        self._stop += 1
        self.num_tokens += 1

    def add_state(self, state_sBKDW: Tensor, num_tokens: int) -> None:
        """Add the state contribution from ``num_tokens`` tokens."""
        # Not in place: the forward pass holds the old state, and backward may still read it.
        if self.state is not None:
            state_sBKDW = self.state + state_sBKDW
        self.set_state(state_sBKDW, num_tokens)

    def set_state(self, state: Any, num_tokens: int) -> None:
        """Replace the state by the one after ``num_tokens`` more tokens."""
        self.state = state
        self.num_tokens += num_tokens

    def copy_to(self, other: LayerCache) -> None:
        """Copy the rows or the state into an empty cache."""
        if self._keys is not None:
            values = None
            if self._values is not None:
                values = self._values[:, self._first : self._stop]
            # Keep the same free space: the copy grows by as many rows.
            reserved_rows = self._keys.shape[1] - self._stop
            other.append(self._keys[:, self._first : self._stop], values, reserved_rows=reserved_rows)
        # States are never written in place, so both caches can share one.
        other.state, other.num_tokens = self.state, self.num_tokens

    def _reallocate(self, k_BtKD: Tensor, v_BtKV: Tensor | None, reserved_rows: int) -> None:
        """Move the stored rows to new buffers with room for these rows and ``reserved_rows`` more."""
        self.slots = None
        # Growing by an eighth costs eight row copies per appended token: little next to attention, which reads all
        # rows.
        num_rows = max(self.num_rows + self.num_rows // 8, self.num_rows + k_BtKD.shape[1] + reserved_rows, 64)
        self._keys = self._allocate_like(self._keys, k_BtKD, num_rows)
        if v_BtKV is not None:
            self._values = self._allocate_like(self._values, v_BtKV, num_rows)
        self._first, self._stop = 0, self.num_rows

    def _allocate_like(self, old: Tensor | None, like_BtKX: Tensor, num_rows: int) -> Tensor:
        B, _, K, X = like_BtKX.shape
        # Generation allocates in inference mode, but the cache may be written outside it later.
        with torch.inference_mode(False):
            new = like_BtKX.new_zeros(B, num_rows, K, X)
        if old is not None:
            new[:, : self.num_rows] = old[:, self._first : self._stop]
        return new


# KV cache. Each layer appends the new tokens' keys and values and attends to all stored rows, so a generated token
# costs one row per layer instead of another pass over the sequence. Invariant between forward passes: every layer has
# seen the same number of tokens, although windowed layers store only the rows that a later query can see. Short
# sequences start in a slot of a shared pool (``slots.py``; vLLM's slots without pages), so that one kernel call serves
# several sequences; longer ones move to contiguous buffers.
class KVCache:
    """Keys, values and states for a sequence's past tokens in this process's memory, per layer.

    Subclasses share a sequence between several processes, which must all make the same calls.
    """

    def __init__(self, pool: SlotPool | None = None) -> None:
        """Create an empty cache. It uses a slot from ``pool`` while the sequence is short, if one is free."""
        self._pool, self._slot = pool, None
        if pool is not None:
            self._slot = pool.take()
        self._layers: dict[int, LayerCache] = {}
        self._expected = 0
        self.source: EncodedSource | None = None
        """Encoded source that the sequence reads in cross attention; complete on every process and never changed."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that every layer has seen; all layers agree between two forward passes."""
        return self.layer(0).num_tokens

    def layer(self, number: int) -> LayerCache:
        """Return one layer's cache; create it on first use."""
        if number not in self._layers:
            self._layers[number] = self._new_layer(number)
        return self._layers[number]

    def reserve(self, num_tokens: int) -> None:
        """Reserve room for ``num_tokens`` tokens after those read next, so that storing them needs no copy."""
        self._expected = num_tokens

    def new(self) -> Self:
        """Return an empty cache like this one."""
        return type(self)(self._pool)

    def copy(self) -> Self:
        """Copy the cache into memory of its own, so that both can continue independently."""
        other = self.new()
        other.reserve(self._expected)
        other.source = self.source
        for number, layer in self._layers.items():
            layer.copy_to(other.layer(number))
        return other

    def encoded(self, source: Stream, encode: Callable[[Stream], EncodedSource]) -> EncodedSource:
        """Encode a source that this cache's processes read together; return it complete."""
        return encode(source)

    def free(self) -> None:
        """Drop all tokens and release the slot; the next tokens start a new sequence."""
        if self._slot is not None:
            self._slot.pool.release(self._slot)
        self._slot, self._layers = None, {}

    def chunk(self, num_tokens: int) -> TokenChunk:
        """Return the next tokens as one chunk that every process receives in full."""
        return self._chunk(num_tokens, num_tokens)

    def chunks(self, num_tokens: int, chunk_tokens: int) -> Iterator[TokenChunk]:
        """Yield the next tokens as chunks of about ``chunk_tokens``; read each chunk before requesting the next.

        Every process receives the last token.
        """
        for start in range(0, num_tokens, chunk_tokens):
            left = num_tokens - start
            yield self._chunk(min(left, chunk_tokens), left)

    def tokens_per_source(self, chunk: TokenChunk) -> list[int]:
        """Count this process's tokens in the chunk, which all read one source."""
        return [chunk.num_given]

    def extend(self, chunk: TokenChunk) -> None:
        """Record that every layer has seen the chunk; a no-op here because each layer counts its own tokens."""

    def collect(self, values_Bt: Tensor, chunk: TokenChunk) -> Tensor:
        """Return the values [B, T] for all chunk tokens in order, given each process's own."""
        return values_Bt

    def once(self, choose: Callable[[], list[int]], count: int) -> list[int]:
        """Return on every process the ``count`` integers that one process chooses."""
        return choose()

    def _chunk(self, num_tokens: int, left: int) -> TokenChunk:
        start = self.num_tokens
        return TokenChunk(
            start=start,
            num_tokens=num_tokens,
            sequence_tokens=start + left,
            given=(range(start, start + num_tokens),),
            expected_tokens=self._expected,
            placement=self._slot,
        )

    def _new_layer(self, number: int) -> LayerCache:
        if self._slot is None:
            return LayerCache()
        return LayerCache(self._slot.pool.layer(number), self._slot.number)
