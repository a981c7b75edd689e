"""Cut a device's tokens into chunks for the gated delta rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longctx.kernels.linear_attention import StateSegments


@dataclass(frozen=True, eq=False)
class Masks:
    """Masks for a chunk block with several segments."""

    same_NCC: Tensor
    """True for token pairs in a chunk that share a segment."""
    enter_NC: Tensor
    """True for tokens that continue the previous chunk's last segment."""
    leave_NC: Tensor
    """True for tokens in the segment that ends the chunk."""
    pass_N: Tensor
    """True for chunks that the incoming state passes through."""
    lookback_tR: Tensor
    """True if the token's segment has a token that far before it; column r is distance r + 1."""


@dataclass(frozen=True, eq=False)
class ChunkBlock:
    """Contiguous chunks that are computed together."""

    rows: slice
    """Token range on this device; the last chunk may be padded."""
    num_chunks: int
    num_before: int
    """Preceding tokens on the device that belong to the span and that the convolution may read."""
    masks: Masks | None
    """Unset if all tokens belong to one segment."""


@dataclass(frozen=True, eq=False)
class StateSpan:
    """A device's contiguous tokens with one state: an open segment, or consecutive complete documents."""

    received_index: int | None
    """Index into ``StateSegments.received``; unset without an incoming state."""
    sent_index: int | None
    """Index into ``StateSegments.sent``; unset if no outgoing state is requested."""
    blocks: tuple[ChunkBlock, ...]


@dataclass(frozen=True)
class Cut:
    """Parameters for cutting tokens."""

    chunk: int
    """Tokens per chunk."""
    block_chunks: int
    """Maximum chunks per block."""
    lookback: int
    """Preceding tokens that the convolution reads."""


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # training may reuse spans that generation cached
def cut_spans(segments: StateSegments, cut: Cut, device: torch.device) -> tuple[StateSpan, ...]:
    """Cut these segments into spans, in order."""
    # Documents that are complete on this device are packed densely into chunks, and masks separate them within a chunk.
    # A segment whose document continues on another device is open: it starts and ends on chunk boundaries, so that a
    # state enters at its first chunk and leaves after its last. Tokens missing at a span's end are zeros, which change
    # no state.
    bounds = segments.documents.bounds
    received_index = {segment: index for index, segment in enumerate(segments.received)}
    sent_index = {segment: index for index, segment in enumerate(segments.sent)}
    spans: list[StateSpan] = []
    # complete documents since the last open segment, and their first token
    ends: list[int] = []
    start = 0
    for number, stop in enumerate(bounds[1:]):
        is_open = number in received_index or number in sent_index
        # an open segment has its own chunks, so preceding complete documents end theirs
        if is_open and ends:
            spans.append(StateSpan(None, None, _blocks(start, ends, cut, device)))
            start, ends = ends[-1], []
        if is_open:
            blocks = _blocks(start, [stop], cut, device)
            spans.append(StateSpan(received_index.get(number), sent_index.get(number), blocks))
            start = stop
        elif stop > start:
            ends.append(stop)
    if ends:
        spans.append(StateSpan(None, None, _blocks(start, ends, cut, device)))
    return tuple(spans)


def _blocks(first: int, ends: Sequence[int], cut: Cut, device: torch.device) -> tuple[ChunkBlock, ...]:
    """Cut contiguous segments, starting at token ``first``, into chunk blocks."""
    blocks = []
    for start in range(first, ends[-1], cut.chunk * cut.block_chunks):
        stop = min(ends[-1], start + cut.chunk * cut.block_chunks)
        masks = None
        if len(ends) > 1:
            masks = _masks(first, ends, range(start, stop), cut, device)
        before = min(cut.lookback, start - first)
        blocks.append(ChunkBlock(slice(start, stop), -(-(stop - start) // cut.chunk), before, masks))
    return tuple(blocks)


def _masks(first: int, ends: Sequence[int], rows: range, cut: Cut, device: torch.device) -> Masks:
    # the first boundary is the first segment's start
    bounds = torch.tensor((first, *ends))
    num_chunks = -(-len(rows) // cut.chunk)
    # padding belongs to the last token's segment
    tokens = (rows.start + torch.arange(num_chunks * cut.chunk)).clamp(max=rows.stop - 1)
    segment = torch.bucketize(tokens, bounds[1:], right=True)
    segment_NC = segment.view(num_chunks, cut.chunk)
    before = torch.bucketize(tokens.view(num_chunks, cut.chunk)[:, :1] - 1, bounds[1:], right=True)
    # a span's first chunk continues no segment
    if rows.start == first:
        before[0] = -1
    # an incoming state affects tokens up to the first boundary in the chunk, an outgoing one those after the last
    enter_NC = segment_NC == before
    age = (tokens - bounds[segment])[: len(rows)]
    return Masks(
        same_NCC=(segment_NC[:, :, None] == segment_NC[:, None, :]).to(device, non_blocking=True),
        enter_NC=enter_NC.to(device, non_blocking=True),
        leave_NC=(segment_NC == segment_NC[:, -1:]).to(device, non_blocking=True),
        pass_N=enter_NC.all(1).to(device, non_blocking=True),
        lookback_tR=(age[:, None] > torch.arange(cut.lookback)).to(device, non_blocking=True),
    )
