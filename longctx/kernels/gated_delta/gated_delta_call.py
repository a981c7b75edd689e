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
from longctx.kernels.gated_delta.chunk_spans import ChunkBlock, Cut, StateSpan, cut_spans
from longctx.kernels.gated_delta.front import (
    GatedDeltaWeights,
    ProjectedTokens,
    StateSpaceWeights,
    conv_and_gates,
    weights_of,
)
from longctx.kernels.linear_attention import StateSegments
from longctx.kernels.traced_loops import in_a_trace_once

CHUNK = 64
"""Tokens per chunk: a larger chunk means more work within chunks, but fewer sequential state steps."""

BLOCK_CHUNKS = 8
"""Chunks per block: their factors are computed together."""


class SegmentExchange(Protocol):
    """Exchange between one document's segments on several devices.

    Each method starts immediately; the function it returns waits for the other devices.
    """

    def rows(self, tail_sBRKC: Tensor) -> Callable[[], Tensor]:
        """Map each giving segment's last R tokens to the R tokens before each taking segment; 0 if there are none."""
        ...

    def rows_back(self, grad_conv_state_sBRKC: Tensor) -> Callable[[], Tensor]:
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
        """Return the tensors that the first forward saved; None during that forward."""
        ...

    def save(self, *tensors: Tensor) -> None:
        """Save these for the recomputation."""
        ...


class InitialStates(NamedTuple):
    """Incoming states and preceding channel rows for the segments that take a state."""

    states_sBHDV: Tensor
    conv_state_sBRKC: Tensor


@dataclass(frozen=True, kw_only=True)
class GatedDeltaOptions:
    """Non-tensor arguments for a call."""

    segments: StateSegments
    beta_scale: float = 1.0
    """Scale s for β."""
    exchange: SegmentExchange | None = None
    saved: Saved | None = None
    """Lets a recomputed layer reuse the first forward's results without exchanging again."""
    chunk: int = CHUNK
    block_chunks: int = BLOCK_CHUNKS


def check_call(
    tokens: ProjectedTokens,
    weights: GatedDeltaWeights | StateSpaceWeights,
    options: GatedDeltaOptions,
    initial_states: InitialStates | None,
) -> None:
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
    if initial_states is not None:
        num_received, lookback = len(options.segments.received), weights.conv_KCR.shape[-1] - 1
        sizes["carried states"] = (initial_states.states_sBHDV, (num_received, B, K * G, D, V))
        sizes["carried rows"] = (initial_states.conv_state_sBRKC, (num_received, B, lookback, K, 2 * D + G * V))
    for name, (tensor, shape) in sizes.items():
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"gated delta rule: {name} has shape {tuple(tensor.shape)}; expected {shape}.")
    if a.shape[-1] not in (1, D):
        raise ConfigError(
            f"gated delta rule: a has {a.shape[-1]} decays per head; expected 1, or {D} (one per channel)."
        )
    if options.segments.documents.num_tokens != t:
        raise ConfigError(
            f"gated delta rule: got {t} tokens; the segments have {options.segments.documents.num_tokens}."
        )


@dataclass(eq=False)
class GatedDeltaCall:
    """Data shared by a call's forward and backward."""

    tokens: ProjectedTokens
    weights: GatedDeltaWeights | StateSpaceWeights
    options: GatedDeltaOptions
    spans: Sequence[StateSpan] = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        cut = Cut(options.chunk, options.block_chunks, self.lookback)
        self.spans = cut_spans(options.segments, cut, self.tokens.q_BtKD.device)
        self.dtype = accumulate_dtype(self.tokens.v_BtKGV.dtype)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], options: GatedDeltaOptions) -> GatedDeltaCall:
        """Build the call from the concatenated fields of ``ProjectedTokens`` and ``GatedDeltaWeights``."""
        return cls(ProjectedTokens._make(tensors[:5]), weights_of(tensors[5:]), options)

    @property
    def lookback(self) -> int:
        return self.weights.conv_KCR.shape[-1] - 1

    @property
    def blocks(self) -> list[ChunkBlock]:
        return [block for span in self.spans for block in span.blocks]

    def each(self, blocks: Sequence[ChunkBlock]) -> Iterator[ChunkBlock]:
        """Yield a span's chunk blocks in this order."""
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
        return self.zeros((count, self.tokens.q_BtKD.shape[0], self.lookback, K, C))

    def tail(self, segment: int) -> slice:
        """Return a segment's last tokens, which the convolution in later segments may read."""
        rows = self.options.segments.rows(segment)
        return slice(max(rows.start, rows.stop - self.lookback), rows.stop)

    def conv_state(self, block: ChunkBlock, span_conv_state_BRKC: Tensor | None) -> Tensor:
        """Return the channels of the R tokens before a block; ``span_conv_state_BRKC`` precede its span."""
        start, n = block.rows.start, block.num_before
        own = self.tokens.channels(slice(start - n, start)).to(self.dtype)
        # all R tokens are in the span, as for all its blocks except the first
        if n == self.lookback:
            return own
        if span_conv_state_BRKC is None:
            return functional.pad(own, (0, 0) * 2 + (self.lookback - n, 0))
        return torch.cat((span_conv_state_BRKC[:, n:], own), 1)

    def tails(self) -> Tensor:
        """Return each giving segment's last R tokens, newest last; short segments are zero-padded in front."""
        tails = self.zero_rows(len(self.options.segments.sent))
        for tail, segment in zip(tails, self.options.segments.sent, strict=True):
            rows = self.tail(segment)
            tail[:, self.lookback - (rows.stop - rows.start) :] = self.tokens.channels(rows)
        return tails

    def activated(self, block: ChunkBlock, span_conv_state_BRKC: Tensor | None) -> ProjectedTokens:
        """Compute a block's queries, keys, values, g and β without autograd."""
        conv_state = self.conv_state(block, span_conv_state_BRKC)
        return conv_and_gates(conv_state, self.tokens.rows(block.rows), self.weights, block, self.options.beta_scale)


class Differentiable(NamedTuple):
    """A chunk block with its own autograd graph."""

    span: StateSpan
    block: ChunkBlock
    inputs: list[Tensor]
    """Graph leaves: the preceding tokens, then the fields of ``ProjectedTokens`` and ``GatedDeltaWeights``."""
    activated: ProjectedTokens

    @property
    def skip(self) -> Tensor | None:
        """Leaf for Mamba-2's skip, [K, G]."""
        return skip_of(weights_of(self.inputs[6:]))


class InputGradients:
    """Gradients for a call's inputs, accumulated over its chunk blocks."""

    def __init__(self, call: GatedDeltaCall, conv_state_sBRKC: Tensor) -> None:
        """Initialize gradients to 0; ``conv_state_sBRKC`` precede the segments that take a state."""
        self.call, self.conv_state = call, conv_state_sBRKC
        self.dtokens = ProjectedTokens._make(map(torch.zeros_like, call.tokens))
        self.dweights = [torch.zeros_like(x, dtype=call.dtype) for x in call.weights]
        self.grad_conv_state = torch.zeros_like(conv_state_sBRKC)

    def recompute_block(self, span: StateSpan, block: ChunkBlock) -> Differentiable:
        """Recompute a block's activated tokens under autograd."""
        call, span_conv_state = self.call, None
        if span.received_index is not None:
            span_conv_state = self.conv_state[span.received_index]
        # The R preceding tokens are separate leaves: their gradient belongs to the previous block or to another device.
        conv_state = call.conv_state(block, span_conv_state).requires_grad_()
        tokens, weights = (
            ProjectedTokens._make(_leaves(call.tokens.rows(block.rows))),
            weights_of(_leaves(call.weights)),
        )
        with torch.enable_grad():
            activated = conv_and_gates(conv_state, tokens, weights, block, call.options.beta_scale)
        return Differentiable(span, block, [conv_state, *(tokens + weights)], activated)

    def add(self, part: Differentiable, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Backpropagate gradients for a block's ``outputs`` and accumulate its input gradients."""
        # In Mamba-2 this factor is constant and has no gradient.
        varies = [x.requires_grad for x in outputs]
        outputs, gradients = list(compress(outputs, varies)), list(compress(gradients, varies))
        found = torch.autograd.grad(outputs, part.inputs, gradients)
        span, block = part.span, part.block
        grad_conv_state = found[0]
        for total, x in zip(self.dtokens, found[1:6], strict=True):
            total[:, block.rows] += x
        for total, x in zip(self.dweights, found[6:], strict=True):
            total += x
        # a block's first tokens read from the previous block, or from another device
        missing, start = self.call.lookback - block.num_before, block.rows.start
        self._add_channels(slice(start - block.num_before, start), grad_conv_state[:, missing:])
        if span.received_index is not None and missing:
            self.grad_conv_state[span.received_index][:, block.num_before :] += grad_conv_state[:, :missing]

    def add_tail(self, dtail_sBRKC: Tensor) -> None:
        """Add the gradients for ``GatedDeltaCall.tails``."""
        for dtail, segment in zip(dtail_sBRKC, self.call.options.segments.sent, strict=True):
            rows = self.call.tail(segment)
            self._add_channels(rows, dtail[:, self.call.lookback - (rows.stop - rows.start) :])

    def _add_channels(self, rows: slice, dchannels_BtKC: Tensor) -> None:
        """Add to the gradients of the tokens the convolution read."""
        D = self.call.tokens.q_BtKD.shape[-1]
        dq, dk, dv = dchannels_BtKC.split((D, D, dchannels_BtKC.shape[-1] - 2 * D), -1)
        self.dtokens.q_BtKD[:, rows] += dq
        self.dtokens.k_BtKD[:, rows] += dk
        self.dtokens.v_BtKGV[:, rows] += dv.unflatten(-1, self.call.tokens.v_BtKGV.shape[3:])

    def results(self) -> list[Tensor]:
        """Return the gradients for the fields of ``ProjectedTokens`` and ``GatedDeltaWeights``."""
        gradients = list(self.dtokens)
        gradients += [total.to(x.dtype) for total, x in zip(self.dweights, self.call.weights, strict=True)]
        return gradients


def skip_of(weights: GatedDeltaWeights | StateSpaceWeights) -> Tensor | None:
    """Return Mamba-2's skip, which ``prepare`` needs."""
    return weights.skip_KG if isinstance(weights, StateSpaceWeights) else None


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Detach the tensors into leaves for a separate graph."""
    return [x.detach().requires_grad_() for x in tensors]
