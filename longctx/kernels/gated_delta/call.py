"""One gated delta rule call: its arguments, and the data shared by its passes.

Axes: B batch, t tokens, K key heads, G value heads of a key head, H = K·G, D key head size, V value head size, C
channels of the convolution, R tokens before its own that it reads; s states, W columns of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from longctx.errors import ConfigError
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.gated_delta.front import StateSpaceWeights, Tokens, Weights, activate, weights_of
from longctx.kernels.gated_delta.spans import Block, Cut, Span, cut_spans
from longctx.kernels.linear_attention import Segments
from longctx.kernels.traced_loops import in_a_trace_once

CHUNK = 64
"""Tokens per chunk: a larger chunk means more work within chunks, but fewer sequential state steps."""

BLOCK_CHUNKS = 8
"""Chunks per block: their factors are computed together."""


class SegmentExchange(Protocol):
    """Exchange between one document's segments on several devices.

    Each method starts immediately; the function it returns waits for the other devices.
    """

    def rows(self, tails_sBRKC: Tensor) -> Callable[[], Tensor]:
        """Map each giving segment's last R tokens to the R tokens before each taking segment; 0 if there are none."""
        ...

    def rows_back(self, dbefore_sBRKC: Tensor) -> Callable[[], Tensor]:
        """Return the gradients for the argument of ``rows``, given those for its result."""
        ...

    def states(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        """Return the incoming states [s, B, H, D, V], given each giving segment's concatenated U and M."""
        ...

    def states_back(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        """Return the gradients at outgoing states, given each taking segment's U′ and Mᵀ."""
        ...


class Saved(Protocol):
    """Store for the results of a layer that will be recomputed."""

    def load(self) -> tuple[Tensor, ...] | None:
        """Return the tensors saved by the first run; None in the first run."""
        ...

    def save(self, *tensors: Tensor) -> None:
        """Save these for the second run."""
        ...


class Carried(NamedTuple):
    """Incoming states and preceding channel rows for the segments that take a state."""

    states_sBHDV: Tensor
    before_sBRKC: Tensor


@dataclass(frozen=True, kw_only=True)
class Options:
    """Non-tensor arguments for a call."""

    segments: Segments
    beta_scale: float = 1.0
    """Scale s for β."""
    exchange: SegmentExchange | None = None
    saved: Saved | None = None
    """Lets a recomputed layer reuse the first run's results without exchanging again."""
    chunk: int = CHUNK
    block_chunks: int = BLOCK_CHUNKS


def check(tokens: Tokens, weights: Weights | StateSpaceWeights, options: Options, carried: Carried | None) -> None:
    """Raise ConfigError if sizes do not fit."""
    q, v, a = tokens.q_BtKD, tokens.v_BtKGV, tokens.a_BtKGX
    B, t, K, D = q.shape
    G, V = v.shape[3:]
    sizes = {
        "k": (tokens.k_BtKD, (B, t, K, D)),
        "v": (v, (B, t, K, G, V)),
        "a": (a, (B, t, K, G, a.shape[-1])),
        "b": (tokens.b_BtKG, (B, t, K, G)),
        "conv": (weights.conv_KCR, (K, 2 * D + G * V, weights.conv_KCR.shape[-1])),
        "log_rate": (weights.log_rate_KG, (K, G)),
        "rate_bias": (weights.rate_bias_KGX, (K, G, a.shape[-1])),
    }
    if isinstance(weights, StateSpaceWeights):
        sizes["convolution's bias"] = (weights.conv_bias_KC, (K, 2 * D + G * V))
        sizes["skip"] = (weights.skip_KG, (K, G))
    if carried is not None:
        takes, reach = len(options.segments.takes), weights.conv_KCR.shape[-1] - 1
        sizes["carried states"] = (carried.states_sBHDV, (takes, B, K * G, D, V))
        sizes["carried rows"] = (carried.before_sBRKC, (takes, B, reach, K, 2 * D + G * V))
    for name, (tensor, shape) in sizes.items():
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"gated delta rule: {name} has shape {tuple(tensor.shape)}; it needs {shape}.")
    if a.shape[-1] not in (1, D):
        raise ConfigError(f"gated delta rule: a has {a.shape[-1]} decays a head; it needs 1, or {D} (one a channel).")
    if options.segments.documents.num_tokens != t:
        raise ConfigError(f"{t} tokens are not the {options.segments.documents.num_tokens} of the segments.")


@dataclass(eq=False)
class Call:
    """Data shared by a call's forward and backward."""

    tokens: Tokens
    weights: Weights | StateSpaceWeights
    options: Options
    spans: Sequence[Span] = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        cut = Cut(options.chunk, options.block_chunks, self.reach)
        self.spans = cut_spans(options.segments, cut, self.tokens.q_BtKD.device)
        self.dtype = accumulate_dtype(self.tokens.v_BtKGV.dtype)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], options: Options) -> Call:
        """Build the call from the concatenated fields of ``Tokens`` and ``Weights``."""
        return cls(Tokens._make(tensors[:5]), weights_of(tensors[5:]), options)

    @property
    def reach(self) -> int:
        return self.weights.conv_KCR.shape[-1] - 1

    @property
    def blocks(self) -> list[Block]:
        return [block for span in self.spans for block in span.blocks]

    def each(self, blocks: Sequence[Block]) -> Iterator[Block]:
        """Yield a span's blocks in this order."""
        return in_a_trace_once(blocks, self.tokens.q_BtKD)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B·H, D and V."""
        B, _, K, G, V = self.tokens.v_BtKGV.shape
        return B * K * G, self.tokens.q_BtKD.shape[-1], V

    def zeros(self, shape: Sequence[int]) -> Tensor:
        return self.tokens.q_BtKD.new_zeros(shape, dtype=self.dtype)

    def zero_state(self) -> Tensor:
        return self.zeros(self.sizes)

    def zero_maps(self, count: int, columns: int) -> Tensor:
        """Return zero states or maps [count, B·H, D, columns]."""
        BH, D, _ = self.sizes
        return self.zeros((count, BH, D, columns))

    def by_batch(self, states: Tensor) -> Tensor:
        """Unflatten [s, B·H, …] to [s, B, H, …]."""
        return states.unflatten(1, (self.tokens.q_BtKD.shape[0], -1))

    def zero_rows(self, count: int) -> Tensor:
        """Return zero channels for R tokens [count, B, R, K, C]."""
        K, C, _ = self.weights.conv_KCR.shape
        return self.zeros((count, self.tokens.q_BtKD.shape[0], self.reach, K, C))

    def tail(self, segment: int) -> slice:
        """Return a segment's last tokens, which the convolution in later segments may read."""
        rows = self.options.segments.rows(segment)
        return slice(max(rows.start, rows.stop - self.reach), rows.stop)

    def before(self, block: Block, entering_BRKC: Tensor | None) -> Tensor:
        """Return the channels of the R tokens before a block; ``entering_BRKC`` precede its span."""
        start, n = block.rows.start, block.num_before
        own = self.tokens.channels(slice(start - n, start)).to(self.dtype)
        # all R tokens are in the span, as for all its blocks except the first
        if n == self.reach:
            return own
        if entering_BRKC is None:
            return functional.pad(own, (0, 0) * 2 + (self.reach - n, 0))
        return torch.cat((entering_BRKC[:, n:], own), 1)

    def tails(self) -> Tensor:
        """Return each giving segment's last R tokens, newest last; short segments are zero-padded in front."""
        tails = self.zero_rows(len(self.options.segments.gives))
        for tail, segment in zip(tails, self.options.segments.gives, strict=True):
            rows = self.tail(segment)
            tail[:, self.reach - (rows.stop - rows.start) :] = self.tokens.channels(rows)
        return tails

    def activated(self, block: Block, entering_BRKC: Tensor | None) -> Tokens:
        """Compute a block's queries, keys, values, g and β without autograd."""
        before = self.before(block, entering_BRKC)
        return activate(before, self.tokens.rows(block.rows), self.weights, block, self.options.beta_scale)


class Differentiable(NamedTuple):
    """A block with its own autograd graph."""

    span: Span
    block: Block
    inputs: list[Tensor]
    """Graph leaves: the preceding tokens, then the fields of ``Tokens`` and ``Weights``."""
    activated: Tokens

    @property
    def skip(self) -> Tensor | None:
        """Leaf for Mamba-2's skip, [K, G]."""
        return skip_of(weights_of(self.inputs[6:]))


class InputGradients:
    """Gradients for a call's inputs, accumulated block by block."""

    def __init__(self, call: Call, before_sBRKC: Tensor) -> None:
        """Initialize gradients to 0; ``before_sBRKC`` precede the segments that take a state."""
        self.call, self.before = call, before_sBRKC
        self.dtokens = Tokens._make(map(torch.zeros_like, call.tokens))
        self.dweights = [torch.zeros_like(x, dtype=call.dtype) for x in call.weights]
        self.dbefore = torch.zeros_like(before_sBRKC)

    def activate(self, span: Span, block: Block) -> Differentiable:
        """Recompute a block's activated tokens under autograd."""
        call, entering = self.call, None
        if span.takes is not None:
            entering = self.before[span.takes]
        # The R preceding tokens are separate leaves: their gradient belongs to the previous block or to another device.
        before = call.before(block, entering).requires_grad_()
        tokens, weights = Tokens._make(_leaves(call.tokens.rows(block.rows))), weights_of(_leaves(call.weights))
        with torch.enable_grad():
            activated = activate(before, tokens, weights, block, call.options.beta_scale)
        return Differentiable(span, block, [before, *(tokens + weights)], activated)

    def add(self, part: Differentiable, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Backpropagate gradients for a block's ``outputs`` and accumulate its input gradients."""
        # In Mamba-2 this factor is constant and has no gradient.
        varies = [x.requires_grad for x in outputs]
        outputs, gradients = list(compress(outputs, varies)), list(compress(gradients, varies))
        found = torch.autograd.grad(outputs, part.inputs, gradients)
        span, block = part.span, part.block
        dbefore = found[0]
        for total, x in zip(self.dtokens, found[1:6], strict=True):
            total[:, block.rows] += x
        for total, x in zip(self.dweights, found[6:], strict=True):
            total += x
        # a block's first tokens read from the previous block, or from another device
        missing, start = self.call.reach - block.num_before, block.rows.start
        self._add_channels(slice(start - block.num_before, start), dbefore[:, missing:])
        if span.takes is not None and missing:
            self.dbefore[span.takes][:, block.num_before :] += dbefore[:, :missing]

    def add_tails(self, dtails_sBRKC: Tensor) -> None:
        """Add the gradients for ``Call.tails``."""
        for dtail, segment in zip(dtails_sBRKC, self.call.options.segments.gives, strict=True):
            rows = self.call.tail(segment)
            self._add_channels(rows, dtail[:, self.call.reach - (rows.stop - rows.start) :])

    def _add_channels(self, rows: slice, dchannels_BtKC: Tensor) -> None:
        """Add to the gradients of the tokens the convolution read."""
        D = self.call.tokens.q_BtKD.shape[-1]
        dq, dk, dv = dchannels_BtKC.split((D, D, dchannels_BtKC.shape[-1] - 2 * D), -1)
        self.dtokens.q_BtKD[:, rows] += dq
        self.dtokens.k_BtKD[:, rows] += dk
        self.dtokens.v_BtKGV[:, rows] += dv.unflatten(-1, self.call.tokens.v_BtKGV.shape[3:])

    def results(self) -> list[Tensor]:
        """Return the gradients for the fields of ``Tokens`` and ``Weights``."""
        gradients = list(self.dtokens)
        gradients += [total.to(x.dtype) for total, x in zip(self.dweights, self.call.weights, strict=True)]
        return gradients


def skip_of(weights: Weights | StateSpaceWeights) -> Tensor | None:
    """Return Mamba-2's skip, which ``prepare`` needs."""
    return weights.skip_KG if isinstance(weights, StateSpaceWeights) else None


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Detach the tensors into leaves for a separate graph."""
    return [x.detach().requires_grad_() for x in tensors]
