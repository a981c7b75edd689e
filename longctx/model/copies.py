"""Values on their way between a device and the host's memory.

Each direction has a stream of its own: a link carries both at once. Nothing else puts them in order, so each piece of
host memory knows the last copy into it and out of it: a copy out of it runs behind the one that filled it, a copy into
it behind those that read the values it overwrites.

Page-locked memory comes in pages with sizes of powers of two, because PyTorch rounds every page-locked allocation up to
one: so a tensor takes only its own size of host memory, rounded up to ``LEAST_PAGE_BYTES``. All but the last few pages
of a tensor have one size, so that rows of another length find them again in PyTorch's cache.

Axes: B rows, t tokens, c of a chunk.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.tensor_bytes import as_bytes

PAGE_BYTES = 64 << 20
"""The largest page. A copy of that size keeps a link busy for milliseconds, and starting it takes microseconds."""
LEAST_PAGE_BYTES = 1 << 20
"""The smallest page, unless the whole tensor is smaller."""

Mark = torch.Event | None
"""A place in the order of copies in one direction; None where copies are done when the call returns."""


class Streams(NamedTuple):
    """CUDA streams of copies, one per direction."""

    to_host: torch.cuda.Stream
    to_device: torch.cuda.Stream


@cache
def streams_of(device: torch.device) -> Streams | None:
    """Return the device's streams for copies; None if copies are done at once."""
    # On tensors without data there is a device and no stream.
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))


class Copies:
    """Copies that overlap a device's computation, and marks that make the computation wait for them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = streams_of(device)
        self.is_asynchronous = device.type == "cuda" or self._streams is not None
        """True where values leave the device's memory; on a CPU they are in the host's already."""

    def new_page(self, num_bytes: int) -> Tensor:
        """Return memory of the host that the device can copy to and from, page-locked for a GPU."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")

    def computed(self) -> Mark:
        """Return a mark behind all computation that was started so far."""
        if self._streams is None:
            return None
        return torch.cuda.current_stream(self.device).record_event()

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]], *after: Mark) -> Mark:
        """Start to copy each second tensor to the first, behind all of ``after``; return a mark.

        The device memory must stay until the computation has waited for the mark.
        """
        return self._start(self._streams and self._streams.to_host, pairs, after)

    def to_device(self, pairs: Sequence[tuple[Tensor, Tensor]], *after: Mark) -> Mark:
        """Start copies in the other direction; the device memory must likewise stay until the wait for the mark."""
        return self._start(self._streams and self._streams.to_device, pairs, after)

    def wait(self, mark: Mark) -> None:
        """Make the computation wait for copies; the host does not."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def wait_on_host(self, mark: Mark) -> None:
        """Wait until copies are done."""
        if mark is not None:
            mark.synchronize()

    def hold(self, x: Tensor) -> None:
        """Keep the memory of x from reuse until all copies to the device that have been started are done."""
        if self._streams is not None:
            x.record_stream(self._streams.to_device)

    def _start(
        self, stream: torch.cuda.Stream | None, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Mark]
    ) -> Mark:
        if stream is None:
            _copy(pairs)
            return None
        for mark in after:
            if mark is not None:
                stream.wait_event(mark)
        with torch.cuda.stream(stream):
            _copy(pairs)
        return stream.record_event()


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    # Each is contiguous: PyTorch would gather other tensors on the host, at once and without waiting for any copy.
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


class HostTensor:
    """Values [B, t, …] in the host's memory, in pages."""

    def __init__(self, copies: Copies, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._copies, self._shape, self._dtype = copies, list(shape), dtype
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        sizes = page_sizes(shape[0] * self._row_bytes)
        self._pages = [copies.new_page(size) for size in sizes]
        self._starts = list(accumulate(sizes, initial=0))
        self._filled, self._read = _Marks(), _Marks()

    @property
    def pages(self) -> list[Tensor]:
        """All values as bytes, in order; wait for copies before reading or writing them."""
        return list(self._parts(0, self._shape[0] * self._row_bytes))

    def write(self, tokens: slice, x: Tensor) -> Mark:
        """Start to copy the contiguous values x [B, c, …] of some tokens; return a mark.

        Their memory must stay until the computation has waited for the mark.
        """
        # The copied values must have been computed, and the overwritten ones must have been read.
        mark = self._copies.to_host(list(self._pairs(tokens, x)), self._copies.computed(), self._read.last(tokens))
        self._filled.note(tokens, mark)
        return mark

    def fetch(self, tokens: slice) -> FromHost:
        """Start to bring the values of some tokens to the device."""
        shape = of_tokens(self._shape, tokens.stop - tokens.start)
        values = torch.empty(shape, dtype=self._dtype, device=self._copies.device)
        return FromHost(self._copies, values, self.copy_to(values, tokens, self._copies.computed()))

    def whole(self) -> FromHost:
        """Start to bring all values to the device."""
        return self.fetch(slice(0, self._shape[1]))

    def copy_to(self, out: Tensor, tokens: slice, computed: Mark) -> Mark:
        """Start to copy the values of some tokens to ``out`` [B, c, …] on the device, which has contiguous rows.

        ``computed`` marks the point of the computation at which it took that memory."""
        pairs = [(part, page) for page, part in self._pairs(tokens, out)]
        # Earlier users of the memory must be done, and the copied values must be here.
        mark = self._copies.to_device(pairs, computed, self._filled.last(tokens))
        self._read.note(tokens, mark)
        return mark

    def _pairs(self, tokens: slice, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of pages with the parts of x that belong there, as bytes."""
        whole = tokens.start == 0 and tokens.stop == self._shape[1] and x.is_contiguous()
        rows, token_bytes = x.detach(), self._row_bytes // max(1, self._shape[1])
        # Rows of tokens are apart on the host.
        for row, values in enumerate([rows] if whole else rows):
            values, start = as_bytes(values), row * self._row_bytes + tokens.start * token_bytes
            done = 0
            for page in self._parts(start, start + len(values)):
                yield page, values.narrow(0, done, len(page))
                done += len(page)

    def _parts(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yield bytes ``start`` to ``stop``, page by page."""
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            end = min(stop, self._starts[number + 1])
            yield self._pages[number][start - self._starts[number] : end - self._starts[number]]
            start = end


class FromHost:
    """Values on their way to the device."""

    def __init__(self, copies: Copies, values: Tensor, mark: Mark) -> None:
        self._copies, self._values, self._mark = copies, values, mark
        self._is_awaited = False

    def wait(self) -> Tensor:
        """Make the computation wait for the values, and return them; they must not be written to."""
        self._copies.wait(self._mark)
        self._is_awaited = True
        return self._values

    def __del__(self) -> None:
        # Nothing waited for them: the memory must not be reused during the copy.
        if not self._is_awaited:
            self._copies.hold(self._values)


class Leaving:
    """Device memory on its way to the host: held until the computation has waited for its copy."""

    _UNDER_WAY = 2
    """Tensors that may be on their way: the computation waits for older ones, which frees their memory."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._tensors: deque[tuple[Tensor, Mark]] = deque()

    def hold(self, x: Tensor, mark: Mark) -> None:
        """Keep the memory of x from reuse until the copies up to ``mark`` are done."""
        self._tensors.append((x, mark))
        # In the order of the computation, so that the memory is free when the computation comes to use it again.
        while len(self._tensors) > self._UNDER_WAY:
            _, mark = self._tensors.popleft()
            self._copies.wait(mark)


class _Marks:
    """Marks of the last copy of each range of tokens, in one direction."""

    def __init__(self) -> None:
        self._marks: dict[tuple[int, int], Mark] = {}

    def note(self, tokens: slice, mark: Mark) -> None:
        # In the order of the copies: a range that is noted again comes last.
        self._marks.pop((tokens.start, tokens.stop), None)
        self._marks[tokens.start, tokens.stop] = mark

    def last(self, tokens: slice) -> Mark:
        """Return the last copy of any of these tokens; all others are done before it, as one stream carries them."""
        for (start, stop), mark in reversed(self._marks.items()):
            if start < tokens.stop and tokens.start < stop:
                return mark
        return None


def page_sizes(num_bytes: int) -> list[int]:
    """Cut a tensor of ``num_bytes`` into pages: of ``PAGE_BYTES``, then of smaller and smaller powers of two."""
    full, rest = divmod(num_bytes, PAGE_BYTES)
    sizes = [PAGE_BYTES] * full
    if not full and rest < LEAST_PAGE_BYTES:
        return [rest] if rest else []
    rest = -(-rest // LEAST_PAGE_BYTES) * LEAST_PAGE_BYTES
    while rest:
        sizes.append(1 << (rest.bit_length() - 1))
        rest -= sizes[-1]
    return sizes


def of_tokens(shape: Sequence[int], num_tokens: int) -> list[int]:
    """Return the shape [B, t, …] with another number of tokens."""
    changed = list(shape)
    changed[1] = num_tokens
    return changed
