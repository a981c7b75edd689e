"""A call of the gated delta rule: its arguments, and the data that its passes share.

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
"""Tokens of a chunk: the work inside chunks grows with it, the number of steps from state to state shrinks."""

BLOCK_CHUNKS = 8
"""Chunks whose factors are computed together."""


class SegmentExchange(Protocol):
    """Exchange between the segments of a document on several devices.

    Each method starts at once; the function that it returns waits for the other devices.
    """

    def rows(self, tails_sBRKC: Tensor) -> Callable[[], Tensor]:
        """Return the R tokens before each segment that takes, from the last R of each that gives; 0 for none."""
        ...

    def rows_back(self, dbefore_sBRKC: Tensor) -> Callable[[], Tensor]:
        """Return the gradients of the argument of ``rows``, from those of its result."""
        ...

    def states(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        """Return the states [s, B, H, D, V] that enter segments, from the concatenated U and M of those that give."""
        ...

    def states_back(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        """Return the gradients of the states that left segments, from U′ and Mᵀ of those that took one."""
        ...


class Saved(Protocol):
    """Store for results of a layer that is computed a second time."""

    def load(self) -> tuple[Tensor, ...] | None:
        """Return the tensors that the first run saved; None in the first run."""
        ...

    def save(self, *tensors: Tensor) -> None:
        """Keep these for the second run."""
        ...


class Carried(NamedTuple):
    """States and rows of channels before the segments that take a state."""

    states_sBHDV: Tensor
    before_sBRKC: Tensor


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of a call that are not tensors."""

    segments: Segments
    beta_scale: float = 1.0
    """Factor s of β."""
    exchange: SegmentExchange | None = None
    saved: Saved | None = None
    """If the layer is computed a second time, that run takes this one's results and exchanges nothing."""
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
    """Data that forward and backward of one call share."""

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
        """Return the call with the fields of ``Tokens`` and ``Weights``, one after the other."""
        return cls(Tokens._make(tensors[:5]), weights_of(tensors[5:]), options)

    @property
    def reach(self) -> int:
        return self.weights.conv_KCR.shape[-1] - 1

    @property
    def blocks(self) -> list[Block]:
        return [block for span in self.spans for block in span.blocks]

    def each(self, blocks: Sequence[Block]) -> Iterator[Block]:
        """Yield blocks of a span in this order."""
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
        """Return [s, B·H, …] as [s, B, H, …]."""
        return states.unflatten(1, (self.tokens.q_BtKD.shape[0], -1))

    def zero_rows(self, count: int) -> Tensor:
        """Return zero channels of R tokens [count, B, R, K, C]."""
        K, C, _ = self.weights.conv_KCR.shape
        return self.zeros((count, self.tokens.q_BtKD.shape[0], self.reach, K, C))

    def tail(self, segment: int) -> slice:
        """Return the tokens of a segment that the convolution of later ones may read."""
        rows = self.options.segments.rows(segment)
        return slice(max(rows.start, rows.stop - self.reach), rows.stop)

    def before(self, block: Block, entering_BRKC: Tensor | None) -> Tensor:
        """Return the channels of the R tokens before a block, of which ``entering_BRKC`` precede its span."""
        start, n = block.rows.start, block.num_before
        own = self.tokens.channels(slice(start - n, start)).to(self.dtype)
        # All of them are in the span, as for every block of it but the first.
        if n == self.reach:
            return own
        if entering_BRKC is None:
            return functional.pad(own, (0, 0) * 2 + (self.reach - n, 0))
        return torch.cat((entering_BRKC[:, n:], own), 1)

    def tails(self) -> Tensor:
        """Return the last R tokens of each segment that gives, the newest last, 0 in front of short ones."""
        tails = self.zero_rows(len(self.options.segments.gives))
        for tail, segment in zip(tails, self.options.segments.gives, strict=True):
            rows = self.tail(segment)
            tail[:, self.reach - (rows.stop - rows.start) :] = self.tokens.channels(rows)
        return tails

    def activated(self, block: Block, entering_BRKC: Tensor | None) -> Tokens:
        """Return queries, keys, values, g and β of a block, not differentiable."""
        before = self.before(block, entering_BRKC)
        return activate(before, self.tokens.rows(block.rows), self.weights, block, self.options.beta_scale)


class Differentiable(NamedTuple):
    """A block in a graph of its own."""

    span: Span
    block: Block
    inputs: list[Tensor]
    """Its leaves: the tokens before it, the fields of ``Tokens`` and those of ``Weights``."""
    activated: Tokens

    @property
    def skip(self) -> Tensor | None:
        """Leaf of Mamba-2's skip, [K, G]; None for other weights."""
        return skip_of(weights_of(self.inputs[6:]))


class InputGradients:
    """Gradients of a call's inputs, added up block by block."""

    def __init__(self, call: Call, before_sBRKC: Tensor) -> None:
        """Start with gradients of 0; ``before_sBRKC`` precede the segments that take a state."""
        self.call, self.before = call, before_sBRKC
        self.dtokens = Tokens._make(map(torch.zeros_like, call.tokens))
        self.dweights = [torch.zeros_like(x, dtype=call.dtype) for x in call.weights]
        self.dbefore = torch.zeros_like(before_sBRKC)

    def activate(self, span: Span, block: Block) -> Differentiable:
        """Compute a block's activated tokens again, in a graph."""
        call, entering = self.call, None
        if span.takes is not None:
            entering = self.before[span.takes]
        # The R tokens before a block are inputs of their own: the block before, or another device, has their gradient.
        before = call.before(block, entering).requires_grad_()
        tokens, weights = Tokens._make(_leaves(call.tokens.rows(block.rows))), weights_of(_leaves(call.weights))
        with torch.enable_grad():
            activated = activate(before, tokens, weights, block, call.options.beta_scale)
        return Differentiable(span, block, [before, *(tokens + weights)], activated)

    def add(self, part: Differentiable, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add the gradients of the inputs, from the gradients of a block's ``outputs``."""
        # Mamba-2 takes nothing off a state: that factor is a constant.
        varies = [x.requires_grad for x in outputs]
        outputs, gradients = list(compress(outputs, varies)), list(compress(gradients, varies))
        found = torch.autograd.grad(outputs, part.inputs, gradients)
        span, block = part.span, part.block
        dbefore = found[0]
        for total, x in zip(self.dtokens, found[1:6], strict=True):
            total[:, block.rows] += x
        for total, x in zip(self.dweights, found[6:], strict=True):
            total += x
        # The first tokens of a block reach into the one before it, or into another device's.
        missing, start = self.call.reach - block.num_before, block.rows.start
        self._add_channels(slice(start - block.num_before, start), dbefore[:, missing:])
        if span.takes is not None and missing:
            self.dbefore[span.takes][:, block.num_before :] += dbefore[:, :missing]

    def add_tails(self, dtails_sBRKC: Tensor) -> None:
        """Add the gradients of ``Call.tails``."""
        for dtail, segment in zip(dtails_sBRKC, self.call.options.segments.gives, strict=True):
            rows = self.call.tail(segment)
            self._add_channels(rows, dtail[:, self.call.reach - (rows.stop - rows.start) :])

    def _add_channels(self, rows: slice, dchannels_BtKC: Tensor) -> None:
        """Add to the gradients of the tokens that the convolution read."""
        D = self.call.tokens.q_BtKD.shape[-1]
        dq, dk, dv = dchannels_BtKC.split((D, D, dchannels_BtKC.shape[-1] - 2 * D), -1)
        self.dtokens.q_BtKD[:, rows] += dq
        self.dtokens.k_BtKD[:, rows] += dk
        self.dtokens.v_BtKGV[:, rows] += dv.unflatten(-1, self.call.tokens.v_BtKGV.shape[3:])

    def results(self) -> list[Tensor]:
        """Return the gradients of the fields of ``Tokens`` and of ``Weights``."""
        gradients = list(self.dtokens)
        gradients += [total.to(x.dtype) for total, x in zip(self.dweights, self.call.weights, strict=True)]
        return gradients


def skip_of(weights: Weights | StateSpaceWeights) -> Tensor | None:
    """Return the skip of Mamba-2, which ``prepare`` needs; None otherwise."""
    return weights.skip_KG if isinstance(weights, StateSpaceWeights) else None


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors as leaves of a graph of their own."""
    return [x.detach().requires_grad_() for x in tensors]
