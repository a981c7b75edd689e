"""The gated delta rule on one device (arXiv 2412.06464; by channel, Kimi Delta Attention, arXiv 2510.26692).

A token decays its document's state S [D, V], replaces what its key reads of it, and reads the result:

    S ← exp(g)·S        S ← S + β k (v − kᵀS)        out = qᵀS / √D        with q and k of length 1

g ≤ 0 is one number a head or one a channel of the keys.

The step is affine in S. So a segment of a document is one pair a head: what leaves it is M·S + U for the state S that
enters it. Devices exchange the pairs of their segments, compose those of a document in its order, and continue with the
state that enters each of their own. Backward is the mirror image: with dS of the leaving state, the gradient of the
entering state is Mᵀ·dS + U′ for another U′. A document's first segment needs no M, its last gives nothing; both are
computed before anything arrives.

Both passes go through blocks of chunks. Forward keeps the state at the start of each block. Backward computes a block's
factors again and differentiates them, so the memory beside the inputs is that of one block and of those states.

Axes: B batch, t tokens, K key heads, G value heads of a key head, H = K·G, D key head size, V value head size, C
channels of the convolution, R tokens before its own that it reads, X = D if decays differ by channel, else 1; s states,
N chunks of a block, W columns of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from longctx.errors import ConfigError
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.gated_delta.chunks import Chunked, fold, prepare, unfold
from longctx.kernels.gated_delta.front import Tokens, Weights, activate
from longctx.kernels.gated_delta.spans import Block, Cut, Span, cut_spans
from longctx.kernels.linear_attention import Segments

CHUNK = 64
"""Tokens of a chunk: the work inside chunks grows with it, the number of steps from state to state shrinks."""

BLOCK_CHUNKS = 8
"""Chunks whose factors are computed together."""


class SegmentExchange(Protocol):
    """Joins the segments of a document over devices. Each method starts at once; its result waits for the others."""

    def rows(self, tails_sBRKC: Tensor) -> Callable[[], Tensor]:
        """Return the R tokens before each segment that takes, from the last R of each that gives; 0 for none."""
        ...

    def rows_back(self, dbefore_sBRKC: Tensor) -> Callable[[], Tensor]:
        """Return the gradients of what ``rows`` was given, from those of its result."""
        ...

    def states(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        """Return the states [s, B, H, D, V] that enter segments, from U and M beside each other of those that give."""
        ...

    def states_back(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        """Return the gradients of the states that left segments, from U′ and Mᵀ of those that took one."""
        ...


class Saved(Protocol):
    """Keeps results of a layer that is computed a second time."""

    def load(self) -> tuple[Tensor, ...] | None:
        """Return what the first run saved; None in the first run."""
        ...

    def save(self, *tensors: Tensor) -> None:
        """Keep these for the second run."""
        ...


class Carried(NamedTuple):
    """What precedes the segments that take a state."""

    states_sBHDV: Tensor
    before_sBRKC: Tensor


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of a call that are no tensors."""

    segments: Segments
    beta_scale: float = 1.0
    """Factor s of β."""
    exchange: SegmentExchange | None = None
    saved: Saved | None = None
    """If the layer is computed a second time, that run takes this one's results and exchanges nothing."""
    chunk: int = CHUNK
    block_chunks: int = BLOCK_CHUNKS


def gated_delta(
    tokens: Tokens, weights: Weights, options: Options, carried: Carried | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output [B, t, H, V] in the dtype of the values, and the states [s, B, H, D, V] that leave segments.

    States leave those of ``segments.gives``. What enters those of ``segments.takes`` is ``carried``, or comes from the
    exchange; other documents begin at 0. Decays, states and products are float32 (float64 for float64 inputs).
    Everything is differentiable, but for states beside an exchange. ConfigError if sizes do not fit.
    """
    _check(tokens, weights, options, carried)
    states, before = carried or (None, None)
    return _GatedDelta.apply(options, states, before, *(tokens + weights))


def _check(tokens: Tokens, weights: Weights, options: Options, carried: Carried | None) -> None:
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
class _Call:
    """What forward and backward of one call share."""

    tokens: Tokens
    weights: Weights
    options: Options
    spans: Sequence[Span] = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        cut = Cut(options.chunk, options.block_chunks, self.reach)
        self.spans = cut_spans(options.segments, cut, self.tokens.q_BtKD.device)
        self.dtype = accumulate_dtype(self.tokens.v_BtKGV.dtype)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], options: Options) -> _Call:
        """Return the call with the fields of ``Tokens`` and ``Weights``, one after the other."""
        return cls(Tokens._make(tensors[:5]), Weights._make(tensors[5:]), options)

    @property
    def reach(self) -> int:
        return self.weights.conv_KCR.shape[-1] - 1

    @property
    def blocks(self) -> list[Block]:
        return [block for span in self.spans for block in span.blocks]

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
        """Return states or maps [count, B·H, D, columns], 0."""
        BH, D, _ = self.sizes
        return self.zeros((count, BH, D, columns))

    def by_batch(self, states: Tensor) -> Tensor:
        """Return [s, B·H, …] as [s, B, H, …]."""
        return states.unflatten(1, (self.tokens.q_BtKD.shape[0], -1))

    def zero_rows(self, count: int) -> Tensor:
        """Return channels of R tokens [count, B, R, K, C], 0."""
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
        if n == self.reach:
            return own
        if entering_BRKC is None:
            return functional.pad(own, (0, 0) * 2 + (self.reach - n, 0))
        return torch.cat((entering_BRKC[:, n:], own), 1)

    def factors(self, block: Block, entering_BRKC: Tensor | None) -> Chunked:
        """Return the factors of a block, not differentiable."""
        before, tokens = self.before(block, entering_BRKC), self.tokens.rows(block.rows)
        activated = activate(before, tokens, self.weights, block, self.options.beta_scale)
        return prepare(activated, block, self.options.chunk)


class _GatedDelta(torch.autograd.Function):
    """Keeps its inputs, what entered segments, the state at the start of each block, and the maps M."""

    @staticmethod
    def forward(
        ctx: Any, options: Options, states: Tensor | None, before: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.options = options
        ctx.carried_dtypes = [None if x is None else x.dtype for x in (states, before)]
        results = None
        if options.saved is not None:
            results = options.saved.load()
        if results is None:
            results = _run_forward(_Call.of(tensors, options), states, before)
            if options.saved is not None:
                options.saved.save(*results)
        out, given, before, starts, maps = results
        if options.exchange is not None:
            ctx.mark_non_differentiable(given)
        ctx.save_for_backward(before, starts, maps, *tensors)
        return out, given

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dgiven: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Asked for once: a layer that is computed again hands them out as it makes them.
        saved = ctx.saved_tensors
        before, starts, maps = saved[:3]
        call = _Call.of(saved[3:], ctx.options)
        run = _Backward(call, before, dict(zip(call.blocks, starts, strict=True)), maps, dout)
        run(dgiven.flatten(1, 2))
        gradients: list[Tensor | None] = [None]
        for dtype, gradient in zip(ctx.carried_dtypes, (call.by_batch(run.dtaken), run.dbefore), strict=True):
            gradients.append(None if dtype is None else gradient.to(dtype))
        gradients.extend(run.dtokens)
        gradients.extend(total.to(x.dtype) for total, x in zip(run.dweights, call.weights, strict=True))
        return tuple(gradients)


def _run_forward(call: _Call, states: Tensor | None, before: Tensor | None) -> tuple[Tensor, ...]:
    """Return output, given states, and what backward needs beside the inputs."""
    run = _Forward(call, states, before)
    run()
    starts = call.zero_maps(len(call.blocks), call.sizes[2])
    for start, block in zip(starts, call.blocks, strict=True):
        start.copy_(run.starts[block])
    return run.out.flatten(2, 3), call.by_batch(run.given), run.before, starts, run.maps


class _Forward:
    """A forward pass: what needs nothing of other devices, the exchange, then what does."""

    def __init__(self, call: _Call, states: Tensor | None, before: Tensor | None) -> None:
        self.call, self.carried = call, states
        _, D, V = call.sizes
        segments = call.options.segments
        # Values are a part of wider rows; the output is not.
        self.out = call.tokens.v_BtKGV.new_empty(call.tokens.v_BtKGV.shape)
        self.given = call.zero_maps(len(segments.gives), V)
        self.maps = call.zero_maps(len(segments.gives), D)
        self.before = call.zero_rows(len(segments.takes))
        if before is not None:
            self.before = before.to(call.dtype)
        self.starts: dict[Block, Tensor] = {}

    def __call__(self) -> None:
        call, exchange = self.call, self.call.options.exchange
        arriving = None
        if exchange is not None:
            arriving = exchange.rows(self._tails())
        # Whole documents and first segments meanwhile: what they give is final.
        waiting = [span for span in call.spans if span.takes is not None]
        for span in call.spans:
            if span.takes is None:
                self._finish(span, call.zero_state())
        taken = self.carried
        if exchange is not None:
            assert arriving is not None
            self.before = arriving()
            # The others' states are not known yet, so their map is what can be sent.
            for span in waiting:
                self._summarize(span)
            taken = exchange.states(call.by_batch(torch.cat((self.given, self.maps), -1)))()
        for span in waiting:
            assert taken is not None
            assert span.takes is not None
            self._finish(span, taken[span.takes].flatten(0, 1).to(call.dtype))

    def _tails(self) -> Tensor:
        """Return the last tokens of each segment that gives, the newest last, 0 in front of short ones."""
        call = self.call
        tails = call.zero_rows(len(call.options.segments.gives))
        for tail, segment in zip(tails, call.options.segments.gives, strict=True):
            rows = call.tail(segment)
            tail[:, call.reach - (rows.stop - rows.start) :] = call.tokens.channels(rows)
        return tails

    def _entering(self, span: Span) -> Tensor | None:
        return None if span.takes is None else self.before[span.takes]

    def _finish(self, span: Span, state: Tensor) -> None:
        """Compute a span's output from the state that enters it, and the state that leaves it."""
        for block in span.blocks:
            self.starts[block] = state
            factors = self.call.factors(block, self._entering(span))
            states, written, state = _advance(factors, state)
            out = factors.p_NBKGCC @ written + factors.q_NBKGCD @ states
            self.out[:, block.rows] = unfold(out, block.rows.stop - block.rows.start)
        if span.gives is not None:
            self.given[span.gives] = state

    def _summarize(self, span: Span) -> None:
        """Set U and M of a span from which a state leaves."""
        if span.gives is None:
            return
        _, D, V = self.call.sizes
        state = self.call.zero_maps(1, V + D)[0]
        # The identity beside a state of 0: its columns become M, those of the state U.
        state[..., V:] = torch.eye(D, dtype=state.dtype, device=state.device)
        for block in span.blocks:
            state = _advance(self.call.factors(block, self._entering(span)), state)[2]
        self.given[span.gives], self.maps[span.gives] = state.split((V, D), -1)


class _Backward:
    """A backward pass in the opposite order: what no later segment reads, the exchange, then what one reads."""

    def __init__(
        self, call: _Call, before_sBRKC: Tensor, starts: dict[Block, Tensor], maps: Tensor, dout_BtHV: Tensor
    ) -> None:
        self.call, self.before, self.starts, self.maps = call, before_sBRKC, starts, maps
        self.dout = dout_BtHV.unflatten(2, call.tokens.v_BtKGV.shape[2:4])
        _, D, V = call.sizes
        num_takes = len(call.options.segments.takes)
        self.dtokens = Tokens._make(map(torch.zeros_like, call.tokens))
        self.dweights = [torch.zeros_like(x, dtype=call.dtype) for x in call.weights]
        self.dbefore = call.zero_rows(num_takes)
        self.dtaken = call.zero_maps(num_takes, V)
        self.back_maps = call.zero_maps(num_takes, D)

    def __call__(self, dgiven: Tensor) -> None:
        call, exchange = self.call, self.call.options.exchange
        # Whole documents and last segments meanwhile: no gradient arrives for the state behind them.
        waiting = [span for span in call.spans if span.gives is not None]
        for span in call.spans:
            if span.gives is None:
                self._finish(span, call.zero_state())
        if exchange is not None:
            for span in waiting:
                self._summarize(span)
            pairs = torch.cat((self.dtaken, self.back_maps), -1)
            dgiven = exchange.states_back(call.by_batch(pairs))().flatten(1, 2)
        for span in waiting:
            self._finish(span, dgiven[span.gives].to(call.dtype))
        if exchange is not None:
            dtails = exchange.rows_back(self.dbefore)()
            for dtail, segment in zip(dtails, call.options.segments.gives, strict=True):
                rows = call.tail(segment)
                self._add_channels(rows, dtail[:, call.reach - (rows.stop - rows.start) :])

    def _finish(self, span: Span, dstate: Tensor) -> None:
        """Compute a span's gradients from that of the state that leaves it, and that of the state that enters it."""
        call, entering = self.call, None
        if span.takes is not None:
            entering = self.before[span.takes]
        # From the last block on: each is given the gradient of the state that it left.
        for block in reversed(span.blocks):
            before = call.before(block, entering).requires_grad_()
            tokens, weights = Tokens._make(_leaves(call.tokens.rows(block.rows))), Weights._make(_leaves(call.weights))
            with torch.enable_grad():
                activated = activate(before, tokens, weights, block, call.options.beta_scale)
                factors = prepare(activated, block, call.options.chunk)
            dfactors, dstate = _retreat(factors, self.starts[block], self._dout(block), dstate)
            inputs = [before]
            inputs.extend(tokens + weights)
            found = torch.autograd.grad(factors, inputs, dfactors)
            dbefore = found[0]
            for total, part in zip(self.dtokens, found[1:6], strict=True):
                total[:, block.rows] += part
            for total, part in zip(self.dweights, found[6:], strict=True):
                total += part
            # The first tokens of a block reach into the one before it, or into another device's.
            missing, start = call.reach - block.num_before, block.rows.start
            self._add_channels(slice(start - block.num_before, start), dbefore[:, missing:])
            if span.takes is not None and missing:
                self.dbefore[span.takes][:, block.num_before :] += dbefore[:, :missing]
        if span.takes is not None:
            self.dtaken[span.takes] = dstate

    def _summarize(self, span: Span) -> None:
        """Set U′ and Mᵀ of a span that a state both enters and leaves."""
        if span.takes is None or span.gives is None:
            return
        dstate = self.call.zero_state()
        for block in reversed(span.blocks):
            factors = self.call.factors(block, self.before[span.takes])
            dstate = _pull_back(factors, self._dout(block), dstate)[2]
        self.dtaken[span.takes], self.back_maps[span.takes] = dstate, self.maps[span.gives].mT

    def _dout(self, block: Block) -> Tensor:
        """Return the output's gradient in the chunks of a block, in the dtype of accumulation."""
        return fold(self.dout[:, block.rows].to(self.call.dtype), block, self.call.options.chunk)

    def _add_channels(self, rows: slice, dchannels_BtKC: Tensor) -> None:
        """Add to the gradients of the tokens that the convolution read."""
        D = self.call.tokens.q_BtKD.shape[-1]
        dq, dk, dv = dchannels_BtKC.split((D, D, dchannels_BtKC.shape[-1] - 2 * D), -1)
        self.dtokens.q_BtKD[:, rows] += dq
        self.dtokens.k_BtKD[:, rows] += dk
        self.dtokens.v_BtKGV[:, rows] += dv.unflatten(-1, self.call.tokens.v_BtKGV.shape[3:])


def _advance(factors: Chunked, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pass a state [B·H, D, W] through the chunks of a block.

    Returns the states that enter them [N, B, K, G, D, W], the values that they write [N, B, K, G, C, W], and the state
    behind the last. Into columns beyond those of the values nothing is written but what the state itself causes.
    """
    u, w, k, total = _by_head((factors.u_NBKGCV, factors.w_NBKGCD, factors.k_NBKGCD, factors.total_NBKGX1))
    u = functional.pad(u, (0, state.shape[-1] - u.shape[-1]))
    states = torch.empty_like(state.expand(len(u), -1, -1, -1), memory_format=torch.contiguous_format)
    written = torch.empty_like(u)
    for n in range(len(u)):
        states[n] = state
        # What the keys read of the old state is taken off the values before they are written.
        torch.baddbmm(u[n], w[n], state, alpha=-1, out=written[n])
        state = torch.baddbmm(state * total[n], k[n].mT, written[n])
    heads = factors.w_NBKGCD.shape[1:4]
    return states.unflatten(1, heads), written.unflatten(1, heads), state


def _retreat(factors: Chunked, start: Tensor, dout_NBKGCV: Tensor, dstate: Tensor) -> tuple[Chunked, Tensor]:
    """Return the gradients of a block's factors, and of the state before it, from that of the state after it."""
    factors = Chunked._make(x.detach() for x in factors)
    states, written, _ = _advance(factors, start)
    dwritten, after, dstate = _pull_back(factors, dout_NBKGCV, dstate)
    # A decay of a whole head counts for all channels of its keys.
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
    """Pass the gradient of a state [B·H, D, V] back through the chunks of a block.

    Returns the gradients of the values that they write [N, B, K, G, C, V], of the states that leave them
    [N, B, K, G, D, V], and of the state before the first.
    """
    w, k, total = _by_head((factors.w_NBKGCD, factors.k_NBKGCD, factors.total_NBKGX1))
    reads, dwritten = _by_head((factors.q_NBKGCD.mT @ dout_NBKGCV, factors.p_NBKGCC.mT @ dout_NBKGCV))
    after = torch.empty_like(reads)
    for n in reversed(range(len(w))):
        after[n] = dstate
        # Written values reach the output of their own chunk, and through the state those of later ones.
        dwritten[n].baddbmm_(k[n], dstate)
        dstate = torch.baddbmm(reads[n].addcmul_(dstate, total[n]), w[n].mT, dwritten[n], alpha=-1)
    heads = factors.w_NBKGCD.shape[1:4]
    return dwritten.unflatten(1, heads), after.unflatten(1, heads), dstate


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors as leaves of a graph of their own."""
    return [x.detach().requires_grad_() for x in tensors]


def _by_head(factors: Sequence[Tensor]) -> list[Tensor]:
    """Return factors [N, B, K, G, …] as [N, B·H, …]."""
    return [x.flatten(1, 3) for x in factors]
