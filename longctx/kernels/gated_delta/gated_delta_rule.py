"""Gated delta rule on one device (arXiv 2412.06464; per channel, Kimi Delta Attention, arXiv 2510.26692).

A token decays its document's state S [D, V], replaces the value that its key reads from it, and reads the result:

    S ← exp(g)·S        S ← S + β k (v − kᵀS)        out = qᵀS / √D        with unit-length q and k

g ≤ 0 is one number per head, or one per key channel.

Mamba-2's step (arXiv 2405.21060) subtracts nothing: S ← exp(g)·S + β k vᵀ, out = qᵀS + skip·v, with any q and k.

Axes: B batch, t tokens, K key heads, G value heads of a key head, H = K·G, D key head size, V value head size, C
channels of the convolution, R tokens before its own that it reads, X = D if decays differ by channel, else 1; s states,
N chunks of a block, W columns of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longctx.kernels.gated_delta.chunk_spans import ChunkBlock, StateSpan
from longctx.kernels.gated_delta.delta_chunks import Chunked, chunk_factors, fold, unfold
from longctx.kernels.gated_delta.front import GatedDeltaWeights, ProjectedTokens, StateSpaceWeights
from longctx.kernels.gated_delta.gated_delta_call import (
    GatedDeltaCall,
    GatedDeltaOptions,
    InitialStates,
    InputGradients,
    check_call,
    skip_of,
)
from longctx.kernels.gated_delta.library import gated_delta_by, library_for


def gated_delta(
    tokens: ProjectedTokens,
    weights: GatedDeltaWeights | StateSpaceWeights,
    options: GatedDeltaOptions,
    initial_states: InitialStates | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, t, H, V] in the values' dtype, and the outgoing states [s, B, H, D, V].

    Segments in ``segments.sent`` return a state. Incoming states for ``segments.received`` are ``initial_states``, or
    come from the exchange; other documents start at 0. Decays, states and matmuls are float32 (float64 for float64
    inputs). Everything is differentiable, except states with an exchange. Raise ConfigError if sizes do not fit.
    """
    check_call(tokens, weights, options, initial_states)
    library = library_for(tokens, options)
    if library is not None and isinstance(weights, GatedDeltaWeights):
        return gated_delta_by(library, tokens, weights, options, initial_states)
    states, conv_state = initial_states or (None, None)
    return _GatedDelta.apply(options, states, conv_state, *(tokens + weights))


# The step is affine in S, so a document segment is one pair (M, U) per head: incoming state S becomes outgoing state
# M·S + U. Devices exchange their segments' pairs, compose each document's pairs in order, and continue from the
# incoming state for each local segment. Backward mirrors this: given dS at the outgoing state, the gradient at the
# incoming state is Mᵀ·dS + U′ for another U′. A document's first segment needs no M, and its last has no outgoing
# state, so both are computed before any data arrives.
#
# Both passes iterate over blocks of chunks. Forward keeps the state at each block's start; backward recomputes one
# block's factors at a time and differentiates them. So apart from the inputs, memory holds one block and those states.
class _GatedDelta(torch.autograd.Function):
    """Autograd function for the rule; saves inputs, rows before segments, each block's start state, and the maps M."""

    @staticmethod
    def forward(
        ctx: Any, options: GatedDeltaOptions, states: Tensor | None, conv_state: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.options = options
        ctx.initial_dtypes = [None if x is None else x.dtype for x in (states, conv_state)]
        results = None
        if options.saved is not None:
            results = options.saved.load()
        B, t, K, G, V = ProjectedTokens._make(tensors[: len(ProjectedTokens._fields)]).v_BtKGV.shape
        if results is None:
            results = _run_forward(GatedDeltaCall.of(tensors, options), states, conv_state)
            if options.saved is not None:
                # In the shape a layer passes on, so that both savers share one tensor.
                options.saved.save(results[0].view(B, t, K, G * V), *results[1:])
        out, sent, conv_state, starts, maps = results
        out = out.view(B, t, K * G, V)
        if options.exchange is not None:
            ctx.mark_non_differentiable(sent)
        ctx.save_for_backward(conv_state, starts, maps, *tensors)
        return out, sent

    @staticmethod
    def backward(ctx: Any, dout: Tensor, grad_sent: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Read once: a recomputed layer materializes saved tensors on access.
        saved = ctx.saved_tensors
        conv_state, starts, maps = saved[:3]
        call = GatedDeltaCall.of(saved[3:], ctx.options)
        run = _Backward(call, conv_state, dict(zip(call.blocks, starts, strict=True)), maps, dout)
        run(grad_sent.flatten(1, 2))
        gradients: list[Tensor | None] = [None]
        for dtype, gradient in zip(
            ctx.initial_dtypes, (call.by_batch(run.grad_received), run.inputs.grad_conv_state), strict=True
        ):
            gradients.append(None if dtype is None else gradient.to(dtype))
        gradients += run.inputs.results()
        return tuple(gradients)


def _run_forward(call: GatedDeltaCall, states: Tensor | None, conv_state: Tensor | None) -> tuple[Tensor, ...]:
    """Return output, outgoing states, and the tensors that backward needs in addition to the inputs."""
    run = _Forward(call, states, conv_state)
    run()
    return run.out.flatten(2, 3), call.by_batch(run.sent), run.conv_state, run.starts, run.maps


class _Forward:
    """Forward pass: spans that need no remote state, the exchange, then the remaining spans."""

    def __init__(self, call: GatedDeltaCall, states: Tensor | None, conv_state: Tensor | None) -> None:
        self.call, self.initial_states = call, states
        _, D, V = call.sizes
        segments = call.options.segments
        # values are views into wider rows; the output is not
        self.out = call.tokens.v_BtKGV.new_empty(call.tokens.v_BtKGV.shape)
        self.sent = call.zero_maps(len(segments.sent), V)
        self.maps = call.zero_maps(len(segments.sent), D)
        self.conv_state = call.zero_rows(len(segments.received))
        if conv_state is not None:
            self.conv_state = conv_state.to(call.dtype)
        self.starts = call.zero_maps(len(call.blocks), V)
        self.start_of = dict(zip(call.blocks, self.starts, strict=True))

    def __call__(self) -> None:
        call, exchange = self.call, self.call.options.exchange
        wait_for_rows = None
        if exchange is not None:
            wait_for_rows = exchange.rows(call.tails())
        # meanwhile complete documents and first segments: their outgoing states are final
        waiting = [span for span in call.spans if span.received_index is not None]
        for span in call.spans:
            if span.received_index is None:
                self._finish(span, call.zero_state())
        received = self.initial_states
        if exchange is not None:
            assert wait_for_rows is not None
            self.conv_state = wait_for_rows()
            # The remaining states are unknown yet, so only their map can be sent.
            for span in waiting:
                self._summarize(span)
            received = exchange.states(call.by_batch(torch.cat((self.sent, self.maps), -1)))()
        for span in waiting:
            assert received is not None
            assert span.received_index is not None
            self._finish(span, received[span.received_index].flatten(0, 1).to(call.dtype))

    def _factors(self, span: StateSpan, block: ChunkBlock) -> Chunked:
        return _factors(self.call, block, None if span.received_index is None else self.conv_state[span.received_index])

    def _finish(self, span: StateSpan, state: Tensor) -> None:
        """Compute a span's output and outgoing state from its incoming state."""
        for block in self.call.each(span.blocks):
            self.start_of[block].copy_(state)
            factors = self._factors(span, block)
            states, written, state = _advance(factors, state)
            out = factors.p_NBKGCC @ written + factors.q_NBKGCD @ states
            self.out[:, block.rows] = unfold(out, block.rows.stop - block.rows.start)
        if span.sent_index is not None:
            self.sent[span.sent_index] = state

    def _summarize(self, span: StateSpan) -> None:
        """Set U and M for a span with an outgoing state."""
        if span.sent_index is None:
            return
        _, D, V = self.call.sizes
        state = self.call.zero_maps(1, V + D)[0]
        # Append the identity to a zero state: its columns become M, the state's columns U.
        state[..., V:] = torch.eye(D, dtype=state.dtype, device=state.device)
        for block in self.call.each(span.blocks):
            state = _advance(self._factors(span, block), state)[2]
        self.sent[span.sent_index], self.maps[span.sent_index] = state.split((V, D), -1)


class _Backward:
    """Backward pass in reverse order: spans without outgoing state, the exchange, then the remaining spans."""

    def __init__(
        self,
        call: GatedDeltaCall,
        conv_state_sBRKC: Tensor,
        starts: dict[ChunkBlock, Tensor],
        maps: Tensor,
        dout_BtHV: Tensor,
    ) -> None:
        self.call, self.starts, self.maps = call, starts, maps
        self.inputs = InputGradients(call, conv_state_sBRKC)
        self.dout = dout_BtHV.unflatten(2, call.tokens.v_BtKGV.shape[2:4])
        _, D, V = call.sizes
        num_received = len(call.options.segments.received)
        self.grad_received = call.zero_maps(num_received, V)
        self.back_maps = call.zero_maps(num_received, D)

    def __call__(self, grad_sent: Tensor) -> None:
        call, exchange = self.call, self.call.options.exchange
        # meanwhile complete documents and last segments: no gradient arrives for the state after them
        waiting = [span for span in call.spans if span.sent_index is not None]
        for span in call.spans:
            if span.sent_index is None:
                self._finish(span, call.zero_state())
        if exchange is not None:
            for span in waiting:
                self._summarize(span)
            pairs = torch.cat((self.grad_received, self.back_maps), -1)
            grad_sent = exchange.states_back(call.by_batch(pairs))().flatten(1, 2)
        for span in waiting:
            self._finish(span, grad_sent[span.sent_index].to(call.dtype))
        if exchange is not None:
            self.inputs.add_tail(exchange.rows_back(self.inputs.grad_conv_state)())

    def _finish(self, span: StateSpan, dstate: Tensor) -> None:
        """Compute a span's input gradients and incoming-state gradient from the gradient at its outgoing state."""
        # last block first: each takes the gradient at its outgoing state
        for block in self.call.each(span.blocks[::-1]):
            part = self.inputs.recompute_block(span, block)
            with torch.enable_grad():
                factors = chunk_factors(part.activated, block, self.call.options.chunk, part.skip)
            dfactors, dstate = _retreat(factors, self.starts[block], self._dout(block), dstate)
            self.inputs.add(part, factors, dfactors)
        if span.received_index is not None:
            self.grad_received[span.received_index] = dstate

    def _summarize(self, span: StateSpan) -> None:
        """Set U′ and Mᵀ for a span with both an incoming and an outgoing state."""
        if span.received_index is None or span.sent_index is None:
            return
        dstate = self.call.zero_state()
        for block in self.call.each(span.blocks[::-1]):
            factors = _factors(self.call, block, self.inputs.conv_state[span.received_index])
            dstate = _pull_back(factors, self._dout(block), dstate)[2]
        self.grad_received[span.received_index], self.back_maps[span.received_index] = (
            dstate,
            self.maps[span.sent_index].mT,
        )

    def _dout(self, block: ChunkBlock) -> Tensor:
        """Return a block's output gradient in chunks, in the accumulation dtype."""
        return fold(self.dout[:, block.rows].to(self.call.dtype), block, self.call.options.chunk)


def _factors(call: GatedDeltaCall, block: ChunkBlock, span_conv_state_BRKC: Tensor | None) -> Chunked:
    """Compute a block's factors without autograd."""
    return chunk_factors(call.activated(block, span_conv_state_BRKC), block, call.options.chunk, skip_of(call.weights))


def _advance(factors: Chunked, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pass a state [B·H, D, W] through a block's chunks.

    Return the chunks' incoming states [N, B, K, G, D, W], the values they write [N, B, K, G, C, W], and the state after
    the last chunk. Columns beyond V receive only the state's own effect.
    """
    u, w, k, total = _by_head((factors.u_NBKGCV, factors.w_NBKGCD, factors.k_NBKGCD, factors.total_NBKGX1))
    u = functional.pad(u, (0, state.shape[-1] - u.shape[-1]))
    states = torch.empty_like(state.expand(len(u), -1, -1, -1), memory_format=torch.contiguous_format)
    written = torch.empty_like(u)
    for n in range(len(u)):
        states[n] = state
        # subtract what the keys read from the old state before writing new values
        torch.baddbmm(u[n], w[n], state, alpha=-1, out=written[n])
        state = torch.baddbmm(state * total[n], k[n].mT, written[n])
    heads = factors.w_NBKGCD.shape[1:4]
    return states.unflatten(1, heads), written.unflatten(1, heads), state


def _retreat(factors: Chunked, start: Tensor, dout_NBKGCV: Tensor, dstate: Tensor) -> tuple[Chunked, Tensor]:
    """Return gradients for a block's factors and the state before it, given the gradient at the state after it."""
    factors = Chunked._make(x.detach() for x in factors)
    states, written, _ = _advance(factors, start)
    dwritten, after, dstate = _pull_back(factors, dout_NBKGCV, dstate)
    # a per-head decay applies to all key channels
    dims = [-1] if factors.total_NBKGX1.shape[-2] > 1 else [-2, -1]
    gradients = Chunked(
        dwritten,
        -(dwritten @ states.mT),
        dout_NBKGCV @ states.mT,
        written @ after.mT,
        dout_NBKGCV @ written.mT,
        (states * after).sum(dims, keepdim=True),
    )
    return gradients, dstate


def _pull_back(factors: Chunked, dout_NBKGCV: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pass a state gradient [B·H, D, V] back through a block's chunks.

    Return the gradients for the values they write [N, B, K, G, C, V], for their outgoing states [N, B, K, G, D, V], and
    for the state before the first chunk.
    """
    w, k, total = _by_head((factors.w_NBKGCD, factors.k_NBKGCD, factors.total_NBKGX1))
    reads, dwritten = _by_head((factors.q_NBKGCD.mT @ dout_NBKGCV, factors.p_NBKGCC.mT @ dout_NBKGCV))
    after = torch.empty_like(reads)
    for n in reversed(range(len(w))):
        after[n] = dstate
        # written values reach their own chunk's output, and later chunks' through the state
        dwritten[n].baddbmm_(k[n], dstate)
        dstate = torch.baddbmm(reads[n].addcmul_(dstate, total[n]), w[n].mT, dwritten[n], alpha=-1)
    heads = factors.w_NBKGCD.shape[1:4]
    return dwritten.unflatten(1, heads), after.unflatten(1, heads), dstate


def _by_head(factors: Sequence[Tensor]) -> list[Tensor]:
    """Flatten factors [N, B, K, G, …] to [N, B·H, …]."""
    return [x.flatten(1, 3) for x in factors]
