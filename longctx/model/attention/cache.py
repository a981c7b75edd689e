"""KVCache: keys, values and states that one process stores of a sequence to continue it."""

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
        # As numbers if they are few, as in decoding: an operator for each range would take longer.
        if self.num_given <= _FEW_TOKENS:
            return int64_tensor(list(chain.from_iterable(self.given)))
        return torch.cat([torch.arange(part.start, part.stop, part.step) for part in self.given])

    @property
    def later_tokens(self) -> int:
        """Tokens that are known or expected to follow the chunk, on all processes together."""
        return self.sequence_tokens - self.start - self.num_tokens + self.expected_tokens


class LayerCache:
    """One layer's rows of keys and values, in buffers that are reallocated when they are full, or its state.

    The first buffers may be a slot's: rows leave it when they no longer fit.
    """

    def __init__(self, slots: SlotLayer | None = None, slot: int = 0) -> None:
        """Create an empty cache; ``slot`` is its number in the layer's ``slots``."""
        self.slots = slots
        """Where the rows are; None where they are in memory of their own."""
        self._slot = slot
        self.num_tokens = 0
        """Tokens that were added, whether their rows are still stored or not."""
        self.state: Any = None
        """What a layer with a state knows of them, which is its core's own."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._first, self._stop = 0, 0
        """The stored rows among those of the buffers."""

    @property
    def num_rows(self) -> int:
        """Number of rows that are stored."""
        return self._stop - self._first

    def append(
        self, k_BtKD: Tensor, v_BtKV: Tensor | None, *, earlier_rows: int | None = None, later_rows: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Store new rows after the newest ``earlier_rows`` of those stored; return all rows, with values if any.

        Reallocated buffers also have space for ``later_rows``.
        """
        if earlier_rows is not None:
            assert earlier_rows <= self.num_rows, f"{earlier_rows} of {self.num_rows} rows"
            self._first = self._stop - earlier_rows
        stop = self._stop + k_BtKD.shape[1]
        if self.slots is not None and stop <= SLOT_TOKENS and len(k_BtKD) == 1:
            self.slots.make_ready(stop, k_BtKD, v_BtKV)
            self._keys, self._values = self.slots.of_slot(self._slot)
        elif self._keys is None or self._keys.shape[1] < stop:
            self._relay(k_BtKD, v_BtKV, later_rows)
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
        """Note that one more row was stored in the slot."""
        self._stop += 1
        self.num_tokens += 1

    def add_state(self, state_sBKDW: Tensor, num_tokens: int) -> None:
        """Add a state of ``num_tokens`` tokens."""
        # Not in place: the forward pass was given the old state, and a backward may still read it.
        if self.state is not None:
            state_sBKDW = self.state + state_sBKDW
        self.set_state(state_sBKDW, num_tokens)

    def set_state(self, state: Any, num_tokens: int) -> None:
        """Replace the state by the one after ``num_tokens`` more tokens."""
        self.state = state
        self.num_tokens += num_tokens

    def copy_to(self, other: LayerCache) -> None:
        """Store the same rows, or the same state, in an empty buffer."""
        if self._keys is not None:
            values = None
            if self._values is not None:
                values = self._values[:, self._first : self._stop]
            # As much space as here: the next rows are as many.
            later_rows = self._keys.shape[1] - self._stop
            other.append(self._keys[:, self._first : self._stop], values, later_rows=later_rows)
        # States are never written in place.
        other.state, other.num_tokens = self.state, self.num_tokens

    def _relay(self, k_BtKD: Tensor, v_BtKV: Tensor | None, later_rows: int) -> None:
        """Move the stored rows to new buffers that have space for these rows and for ``later_rows``."""
        self.slots = None
        # Space for an eighth more copies eight rows for each token: little next to attention, which reads them all.
        num_rows = max(self.num_rows + self.num_rows // 8, self.num_rows + k_BtKD.shape[1] + later_rows, 64)
        self._keys = self._relaid(self._keys, k_BtKD, num_rows)
        if v_BtKV is not None:
            self._values = self._relaid(self._values, v_BtKV, num_rows)
        self._first, self._stop = 0, self.num_rows

    def _relaid(self, old: Tensor | None, like_BtKX: Tensor, num_rows: int) -> Tensor:
        B, _, K, X = like_BtKX.shape
        # Generation runs in inference mode, but its cache may go on outside of it.
        with torch.inference_mode(False):
            new = like_BtKX.new_zeros(B, num_rows, K, X)
        if old is not None:
            new[:, : self.num_rows] = old[:, self._first : self._stop]
        return new


class KVCache:
    """Keys, values and states of the tokens already seen of a sequence, in this process's memory, layer by layer.

    A cache that several processes share is a subclass; all of them must make the same calls.
    """

    def __init__(self, pool: SlotPool | None = None) -> None:
        """Create an empty cache; while the sequence is short, it has a slot of the ``pool`` if one is free."""
        self._pool, self._slot = pool, None
        if pool is not None:
            self._slot = pool.take()
        self._layers: dict[int, LayerCache] = {}
        self._expected = 0
        self.source: EncodedSource | None = None
        """What the sequence's tokens read beside themselves; it is whole on every process, and never changes."""

    @property
    def num_tokens(self) -> int:
        """Tokens that every layer has seen; between two forward passes it is the same number in all layers."""
        return self.layer(0).num_tokens

    def layer(self, number: int) -> LayerCache:
        """Return the cache of one layer."""
        if number not in self._layers:
            self._layers[number] = self._new_layer(number)
        return self._layers[number]

    def expect(self, num_tokens: int) -> None:
        """Reserve space for ``num_tokens`` tokens after those read next, so that storing them copies nothing."""
        self._expected = num_tokens

    def new(self) -> Self:
        """Return an empty cache of the same kind."""
        return type(self)(self._pool)

    def copy(self) -> Self:
        """Return a cache of the same tokens with memory of its own: both may go on, in different ways."""
        other = self.new()
        other.expect(self._expected)
        other.source = self.source
        for number, layer in self._layers.items():
            layer.copy_to(other.layer(number))
        return other

    def encoded(self, source: Stream, encode: Callable[[Stream], EncodedSource]) -> EncodedSource:
        """Encode a source that the processes of this cache read together, and return all of it."""
        return encode(source)

    def free(self) -> None:
        """Forget all tokens, and release the slot; the tokens read next begin a new sequence."""
        if self._slot is not None:
            self._slot.pool.give_back(self._slot)
        self._slot, self._layers = None, {}

    def chunk(self, num_tokens: int) -> TokenChunk:
        """Return the next tokens as a chunk that every process is given in full."""
        return self._chunk(num_tokens, num_tokens)

    def chunks(self, num_tokens: int, chunk_tokens: int) -> Iterator[TokenChunk]:
        """Yield the next tokens as chunks of about ``chunk_tokens``, each to be read before the next is requested.

        Every process is given the last token.
        """
        for start in range(0, num_tokens, chunk_tokens):
            left = num_tokens - start
            yield self._chunk(min(left, chunk_tokens), left)

    def extend(self, chunk: TokenChunk) -> None:
        """Note that every layer has seen the chunk: here layers count their tokens."""

    def collect(self, values_Bt: Tensor, chunk: TokenChunk) -> Tensor:
        """Return values of all tokens of the chunk, [B, T] in order, from those of each process's tokens."""
        return values_Bt

    def once(self, choose: Callable[[], list[int]], count: int) -> list[int]:
        """Return the ``count`` integers that one of the processes chooses, on all processes."""
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
