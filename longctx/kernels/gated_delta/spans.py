"""Cut a device's tokens into chunks for the gated delta rule.

A chunk is some neighbouring tokens. Documents that are complete on this device are packed into chunks densely, and
masks keep them apart inside a chunk. If the document of a segment continues on another device, the segment begins and
ends with chunks of its own: a state enters it at its first chunk and leaves it after its last. Missing tokens at a
span's end are zeros, which change no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longctx.kernels.linear_attention import Segments


@dataclass(frozen=True, eq=False)
class Masks:
    """Masks of a block that has several segments."""

    same_NCC: Tensor
    """True for two tokens of a chunk that belong to one segment."""
    enter_NC: Tensor
    """True for tokens that continue the last segment of the chunk before."""
    leave_NC: Tensor
    """True for tokens of the segment that ends the chunk."""
    pass_N: Tensor
    """True for chunks whose entering state also leaves them."""
    reach_tR: Tensor
    """True for tokens whose segment has a token so far before them, column r at distance r + 1."""


@dataclass(frozen=True, eq=False)
class Block:
    """Neighbouring chunks that are computed together."""

    rows: slice
    """Its tokens on the device; the last chunk may be padded."""
    num_chunks: int
    num_before: int
    """Tokens before them on the device that belong to the span and that the convolution may read."""
    masks: Masks | None
    """None if all tokens belong to one segment."""


@dataclass(frozen=True, eq=False)
class Span:
    """Neighbouring tokens of a device with one state: an open segment, or a run of complete documents."""

    takes: int | None
    """Index into ``Segments.takes``; None if no state enters."""
    gives: int | None
    """Index into ``Segments.gives``; None if no state is asked for."""
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Cut:
    """Sizes by which tokens are cut."""

    chunk: int
    """Tokens of a chunk."""
    block_chunks: int
    """Chunks of a block, at most."""
    reach: int
    """Tokens before its own that the convolution reads."""


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # training may find spans that generation cached
def cut_spans(segments: Segments, cut: Cut, device: torch.device) -> tuple[Span, ...]:
    """Return the spans of these segments in their order."""
    bounds = segments.documents.bounds
    takes = {segment: index for index, segment in enumerate(segments.takes)}
    gives = {segment: index for index, segment in enumerate(segments.gives)}
    spans: list[Span] = []
    # Complete documents since the last open segment, and the token at which they begin.
    ends: list[int] = []
    start = 0
    for number, stop in enumerate(bounds[1:]):
        is_open = number in takes or number in gives
        # An open segment has chunks of its own, so complete documents before it end theirs.
        if is_open and ends:
            spans.append(Span(None, None, _blocks(start, ends, cut, device)))
            start, ends = ends[-1], []
        if is_open:
            blocks = _blocks(start, [stop], cut, device)
            spans.append(Span(takes.get(number), gives.get(number), blocks))
            start = stop
        elif stop > start:
            ends.append(stop)
    if ends:
        spans.append(Span(None, None, _blocks(start, ends, cut, device)))
    return tuple(spans)


def _blocks(first: int, ends: Sequence[int], cut: Cut, device: torch.device) -> tuple[Block, ...]:
    """Return the blocks of neighbouring segments, the first of which begins at token ``first``."""
    blocks = []
    for start in range(first, ends[-1], cut.chunk * cut.block_chunks):
        stop = min(ends[-1], start + cut.chunk * cut.block_chunks)
        masks = None
        if len(ends) > 1:
            masks = _masks(first, ends, range(start, stop), cut, device)
        before = min(cut.reach, start - first)
        blocks.append(Block(slice(start, stop), -(-(stop - start) // cut.chunk), before, masks))
    return tuple(blocks)


def _masks(first: int, ends: Sequence[int], rows: range, cut: Cut, device: torch.device) -> Masks:
    # The first boundary is the beginning of the first segment.
    bounds = torch.tensor((first, *ends))
    num_chunks = -(-len(rows) // cut.chunk)
    # Padding belongs to the last token's segment.
    tokens = (rows.start + torch.arange(num_chunks * cut.chunk)).clamp(max=rows.stop - 1)
    segment = torch.bucketize(tokens, bounds[1:], right=True)
    segment_NC = segment.view(num_chunks, cut.chunk)
    before = torch.bucketize(tokens.view(num_chunks, cut.chunk)[:, :1] - 1, bounds[1:], right=True)
    # The first chunk of a run of documents continues none.
    if rows.start == first:
        before[0] = -1
    # A state that enters a chunk concerns tokens up to the first boundary in it, one that leaves those after the last.
    enter_NC = segment_NC == before
    age = (tokens - bounds[segment])[: len(rows)]
    return Masks(
        same_NCC=(segment_NC[:, :, None] == segment_NC[:, None, :]).to(device, non_blocking=True),
        enter_NC=enter_NC.to(device, non_blocking=True),
        leave_NC=(segment_NC == segment_NC[:, -1:]).to(device, non_blocking=True),
        pass_N=enter_NC.all(1).to(device, non_blocking=True),
        reach_tR=(age[:, None] > torch.arange(cut.reach)).to(device, non_blocking=True),
    )
