"""Asynchronous copies between a device and host memory.

Axes: B rows, t tokens, c tokens in a chunk.
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

# Page-locked memory is allocated in pages with power-of-two sizes, because PyTorch rounds every page-locked allocation
# up to one. So a tensor takes only its own size, rounded up to ``LEAST_PAGE_BYTES``. All but a tensor's last few pages
# have one size, so that PyTorch's cache can reuse them for rows of another length.
PAGE_BYTES = 64 << 20
"""Largest page. Copying it keeps a link busy for milliseconds; starting the copy takes microseconds."""
LEAST_PAGE_BYTES = 1 << 20
"""Smallest page, unless the tensor itself is smaller."""

Mark = torch.Event | None
"""A position in one direction's copies; None if copies are complete when the call returns."""


class Streams(NamedTuple):
    """CUDA streams for copies, one per direction."""

    to_host: torch.cuda.Stream
    to_device: torch.cuda.Stream


@cache
def streams_of(device: torch.device) -> Streams | None:
    """Return the device's copy streams; None if copies are synchronous."""
    # Fake tensors have a device but no stream.
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))


class AsyncCopies:
    """Copies that overlap a device's computation, and marks that make the computation wait for them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = streams_of(device)
        self.is_asynchronous = device.type == "cuda" or self._streams is not None
        """True if values leave the device's memory; on a CPU they are in host memory already."""

    def new_page(self, num_bytes: int) -> Tensor:
        """Allocate host memory for copies, page-locked for a GPU."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")

    def computed(self) -> Mark:
        """Return a mark after all computation started so far."""
        if self._streams is None:
            return None
        return torch.cuda.current_stream(self.device).record_event()

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]], *after: Mark) -> Mark:
        """Start to copy each second tensor to the first, after all of ``after``; return a mark.

        Device memory must stay until the computation has waited for the mark.
        """
        return self._start(self._streams and self._streams.to_host, pairs, after)

    def to_device(self, pairs: Sequence[tuple[Tensor, Tensor]], *after: Mark) -> Mark:
        """Start copies in the other direction; device memory must also stay until the wait for the mark."""
        return self._start(self._streams and self._streams.to_device, pairs, after)

    def wait(self, mark: Mark) -> None:
        """Make the computation wait for copies, without blocking the host."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def wait_on_host(self, mark: Mark) -> None:
        """Block the host until copies are complete."""
        if mark is not None:
            mark.synchronize()

    def hold(self, x: Tensor) -> None:
        """Keep x's memory from reuse until all started copies to the device are complete."""
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
    # All are contiguous: PyTorch would gather others on the host, at once and without waiting for a copy.
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


# Ordering. Each direction has its own stream, since a link carries both at once, and no other mechanism orders the two.
# So each host tensor records the last copy into and out of each token range: a copy out waits for the one that filled
# the range, a copy in waits for those that read the values it overwrites.
class HostTensor:
    """Values [B, t, …] in host memory, in pages."""

    def __init__(self, copies: AsyncCopies, shape: Sequence[int], dtype: torch.dtype) -> None:
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
        """Start to copy contiguous values x [B, c, …] for some tokens; return a mark.

        Their memory must stay until the computation has waited for the mark.
        """
        # Wait until the new values are computed and the old ones read.
        mark = self._copies.to_host(list(self._pairs(tokens, x)), self._copies.computed(), self._read.last(tokens))
        self._filled.note(tokens, mark)
        return mark

    def fetch(self, tokens: slice) -> FromHost:
        """Start to fetch some tokens' values to the device."""
        shape = of_tokens(self._shape, tokens.stop - tokens.start)
        values = torch.empty(shape, dtype=self._dtype, device=self._copies.device)
        return FromHost(self._copies, values, self.copy_to(values, tokens, self._copies.computed()))

    def whole(self) -> FromHost:
        """Start to fetch all values to the device."""
        return self.fetch(slice(0, self._shape[1]))

    def copy_to(self, out: Tensor, tokens: slice, computed: Mark) -> Mark:
        """Start to copy some tokens' values to ``out`` [B, c, …] on the device, which has contiguous rows.

        ``computed`` marks the point in the computation at which it took that memory.
        """
        pairs = [(part, page) for page, part in self._pairs(tokens, out)]
        # Wait until previous users release the memory and the values have reached the host.
        mark = self._copies.to_device(pairs, computed, self._filled.last(tokens))
        self._read.note(tokens, mark)
        return mark

    def _pairs(self, tokens: slice, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield page ranges with the matching ranges of x, as bytes."""
        whole = tokens.start == 0 and tokens.stop == self._shape[1] and x.is_contiguous()
        rows, token_bytes = x.detach(), self._row_bytes // max(1, self._shape[1])
        # Tokens in different rows are not adjacent on the host.
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
    """Values being copied to the device."""

    def __init__(self, copies: AsyncCopies, values: Tensor, mark: Mark) -> None:
        self._copies, self._values, self._mark = copies, values, mark
        self._is_consumed = False

    def wait(self) -> Tensor:
        """Make the computation wait for the values, and return them; they are read-only."""
        self._copies.wait(self._mark)
        self._is_consumed = True
        return self._values

    def __del__(self) -> None:
        # Without a wait, the memory must not be reused during the copy.
        if not self._is_consumed:
            self._copies.hold(self._values)


class InFlightTensors:
    """Device memory being copied to the host, held until the computation has waited for its copy."""

    _UNDER_WAY = 2
    """Tensors in flight: the computation waits for older ones, which frees their memory."""

    def __init__(self, copies: AsyncCopies) -> None:
        self._copies = copies
        self._tensors: deque[tuple[Tensor, Mark]] = deque()

    def hold(self, x: Tensor, mark: Mark) -> None:
        """Keep x's memory from reuse until the copies up to ``mark`` are complete."""
        self._tensors.append((x, mark))
        # Waits follow the computation's order, so memory is free by the time it is used again.
        while len(self._tensors) > self._UNDER_WAY:
            _, mark = self._tensors.popleft()
            self._copies.wait(mark)


class _Marks:
    """Last copy for each token range, in one direction."""

    def __init__(self) -> None:
        self._marks: dict[tuple[int, int], Mark] = {}

    def note(self, tokens: slice, mark: Mark) -> None:
        # In copy order: a repeated range moves to the end.
        self._marks.pop((tokens.start, tokens.stop), None)
        self._marks[tokens.start, tokens.stop] = mark

    def last(self, tokens: slice) -> Mark:
        """Return the last copy that touches these tokens; older ones precede it in the same stream."""
        for (start, stop), mark in reversed(self._marks.items()):
            if start < tokens.stop and tokens.start < stop:
                return mark
        return None


def page_sizes(num_bytes: int) -> list[int]:
    """Split ``num_bytes`` into pages: first ``PAGE_BYTES`` each, then decreasing powers of two."""
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
    """Return the shape [B, t, …] with another token count."""
    changed = list(shape)
    changed[1] = num_tokens
    return changed
