"""Gated delta rule with a library's kernels (flash-linear-attention, on GPUs), also across devices.

Axes: B batch, t tokens, K key heads, G value heads of a key head, H = K·G, D key head size, V value head size, W = V or
V + D columns, X = D if decays differ by channel, else 1; s states, n segments of a call, T tokens of all its rows laid
end to end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import version
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional

from longctx.kernels.devices import on_cpu
from longctx.kernels.gated_delta.front import GatedDeltaWeights, ProjectedTokens
from longctx.kernels.gated_delta.gated_delta_call import (
    CHUNK,
    GatedDeltaCall,
    GatedDeltaOptions,
    InitialStates,
    InputGradients,
)
from longctx.kernels.linear_attention import StateSegments

log = logging.getLogger(__name__)

LEAST_VERSION = (0, 5)
FRONT_CHUNKS = 128
"""Chunks per block for convolution and gates."""

_LARGEST_KEY = 256
_FUNCTIONS = {False: ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"), True: ("fla.ops.kda", "chunk_kda")}
"""Keyed by whether decays differ by channel."""


class GatedDeltaKernel(Protocol):
    """A library's gated delta rule, differentiable in all tensors."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | None,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs [1, T, H, W], and the float32 states [n, H, D, W] after the sequences; None unless requested.

        Queries and keys are [1, T, K, D], values [1, T, H, W], log decays [1, T, H] or [1, T, H, D], β [1, T, H].
        """
        ...


def library_for(tokens: ProjectedTokens, options: GatedDeltaOptions) -> GatedDeltaKernel | None:
    """Return the installed library's function if it supports these tokens; otherwise our own passes run."""
    q, a = tokens.q_BtKD, tokens.a_BtKGX
    # shorter chunks are for generation, and traces have no data
    if on_cpu(q) or isinstance(q, FakeTensor) or options.chunk != CHUNK:
        return None
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] > _LARGEST_KEY:
        return None
    return installed(by_channel=a.shape[-1] > 1)


@cache
def installed(*, by_channel: bool) -> GatedDeltaKernel | None:
    """Return the library's function if it is installed."""
    module, name = _FUNCTIONS[by_channel]
    try:
        installed_version = version("fla-core")
        found = getattr(import_module(module), name)
    except ImportError:
        log.info("Gated delta rule: PyTorch's operators. Triton kernels (fla-core) are faster: pip install fla-core")
        return None
    # older versions lack key heads shared by several value heads
    if tuple(map(int, installed_version.split(".")[:2])) < LEAST_VERSION:
        log.info("Gated delta rule: PyTorch's operators; fla-core %s is older than 0.5", installed_version)
        return None
    log.info("Gated delta rule: %s.%s", module, name)
    return found


# The library takes sequences with their incoming states. A sequence's results are affine in that state S:
#
#     out = O + R·S        outgoing state = U + M·S
#
# and R·S and M·S do not depend on the values. So D zero columns are appended to the values, and the identity to a zero
# state: the first V result columns are O and U, the others R and M. One call computes all four before any data arrives
# from other devices, and an incoming state then costs one matmul. Autograd provides backward, except for the exchange:
# other devices need the gradient Rᵀ·dout at S, again before any data arrives. Only segments with an incoming state need
# the extra columns.
def gated_delta_by(
    library: GatedDeltaKernel,
    tokens: ProjectedTokens,
    weights: GatedDeltaWeights,
    options: GatedDeltaOptions,
    initial_states: InitialStates | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``rule.gated_delta`` with a library's kernels."""
    segments, exchange, saved = options.segments, options.exchange, options.saved
    received, conv_state = initial_states or (None, None)
    if exchange is not None and saved is not None:
        # a recomputed layer reuses the tensors received in its first forward
        received, conv_state = saved.load() or (None, None)
    *activated, conv_state = _Front.apply(options, conv_state, *(tokens + weights))
    sequences = _Sequences(library, ProjectedTokens._make(activated), segments)
    if exchange is None:
        out, final_states = sequences(sequences.every, received)
        return out, sequences.sent_states(final_states)
    # final for segments without incoming state; the others assume an incoming state of 0
    alone = [n for n in sequences.every if n not in segments.received]
    out, final_states = sequences(alone)
    out_with_maps, final_states_with_maps = sequences(segments.received, with_maps=True)
    V = out.shape[-1]
    outs = sequences.split(out, alone) | sequences.split(out_with_maps[..., :V], segments.received)
    out = torch.cat([outs[n] for n in sequences.every], 1)
    maps = {n: functional.pad(x, (0, out_with_maps.shape[-1] - V)) for n, x in final_states.items()}
    sent = sequences.sent_states(maps | final_states_with_maps, out_with_maps.shape[-1])
    out, received = _Join.apply(options, received, out, out_with_maps[..., V:], sent)
    if saved is not None:
        saved.save(received, conv_state)
    return out, sent.detach()[..., :V]


class _Front(torch.autograd.Function):
    """Convolution and gates for all tokens, blockwise; backward recomputes them.

    Returns the fields of ``ProjectedTokens``, with g and β in float32 and the others in their own dtype, and the
    channels before segments that take a state.
    """

    @staticmethod
    def forward(
        ctx: Any, options: GatedDeltaOptions, conv_state: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.options, ctx.initial_dtype = options, None if conv_state is None else conv_state.dtype
        call = _call_of(tensors, options)
        if conv_state is not None:
            conv_state = conv_state.to(call.dtype)
        elif options.exchange is not None:
            conv_state = options.exchange.rows(call.tails())()
        else:
            conv_state = call.zero_rows(len(options.segments.received))
        out = ProjectedTokens._make(
            torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
            for x, dtype in zip(call.tokens, _dtypes(call), strict=True)
        )
        for span in call.spans:
            for block in span.blocks:
                found = call.activated(block, None if span.received_index is None else conv_state[span.received_index])
                for whole, part in zip(out, found, strict=True):
                    whole[:, block.rows] = part
        ctx.save_for_backward(conv_state, *tensors)
        conv_state = conv_state.detach()
        ctx.mark_non_differentiable(conv_state)
        return *out, conv_state

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        conv_state, *tensors = ctx.saved_tensors
        call = _call_of(tensors, ctx.options)
        inputs = InputGradients(call, conv_state)
        for span in call.spans:
            for block in span.blocks:
                part = inputs.recompute_block(span, block)
                inputs.add(part, part.activated, [x[:, block.rows].to(call.dtype) for x in gradients[:-1]])
        grad_conv_state = None
        if ctx.options.exchange is not None:
            inputs.add_tail(ctx.options.exchange.rows_back(inputs.grad_conv_state)())
        elif ctx.initial_dtype is not None:
            grad_conv_state = inputs.grad_conv_state.to(ctx.initial_dtype)
        return None, grad_conv_state, *inputs.results()


def _call_of(tensors: Sequence[Tensor], options: GatedDeltaOptions) -> GatedDeltaCall:
    """Build the call from fields of ``ProjectedTokens`` and ``GatedDeltaWeights``, with larger blocks."""
    return GatedDeltaCall.of(tensors, replace(options, block_chunks=FRONT_CHUNKS))


def _dtypes(call: GatedDeltaCall) -> tuple[torch.dtype, ...]:
    """Return the dtypes for activated tokens: channels keep theirs, gates use the compute dtype."""
    own = call.tokens.v_BtKGV.dtype
    return own, own, own, call.dtype, call.dtype


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # training may reuse boundaries that generation cached
def _boundaries(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Return sequence boundaries; equal ones share a tensor, because libraries cache results by identity."""
    return torch.tensor(ends, device=device)


class _Sequences:
    """Segments as sequences laid end to end."""

    def __init__(self, library: GatedDeltaKernel, tokens: ProjectedTokens, segments: StateSegments) -> None:
        """Lay out the activated ``tokens`` as a library takes them."""
        self.library, self.segments, self._sent = library, segments, set(segments.sent)
        bounds = segments.documents.bounds
        # libraries index sequences by their first chunks, and an empty sequence has no chunk
        self.every = [n for n, (start, stop) in enumerate(pairwise(bounds)) if start < stop]
        q, k, v, g, beta = tokens
        if g.shape[-1] == 1:
            g = g.squeeze(-1)
        # value heads one after another, with each key head's adjacent
        self.tokens = (q, k, v.flatten(2, 3), g.flatten(2, 3), beta.flatten(2, 3))

    def __call__(
        self, numbers: Sequence[int], received_sBHDV: Tensor | None = None, *, with_maps: bool = False
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the segments' outputs [B, t, H, W], and the outgoing states [B, H, D, W] for segments that give one.

        ``received_sBHDV``: incoming states, one per ``segments.received``. With ``with_maps``, R and M follow O and U.
        """
        q, k, v, g, beta = (self._pick(x, numbers) for x in self.tokens)
        (B, t, H, V), D = v.shape, q.shape[-1]
        states, n = None, len(numbers)
        if with_maps:
            v = functional.pad(v, (0, D))
            identity = torch.eye(D, dtype=g.dtype, device=g.device)
            states = functional.pad(identity, (V, 0)).expand(n, B, H, D, V + D)
        elif received_sBHDV is not None:
            zero = received_sBHDV.new_zeros(B, H, D, V)
            incoming = dict(zip(self.segments.received, received_sBHDV, strict=True))
            states = torch.stack([incoming.get(number, zero) for number in numbers])
        if not n:
            return v, {}
        sizes = [self._size(number) for number in numbers]
        ends = tuple(accumulate(sizes * B, initial=0))
        # Libraries take variable-length sequences as one row, so batch rows are concatenated.
        row = [x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g, beta)]
        out, final_states = self.library(
            *row,
            initial_state=None if states is None else states.to(g.dtype).transpose(0, 1).flatten(0, 1).contiguous(),
            output_final_state=not self._sent.isdisjoint(numbers),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=_boundaries(ends, q.device),
        )
        states_of = {}
        if final_states is not None:
            by_segment = zip(numbers, final_states.unflatten(0, (B, n)).unbind(1), strict=True)
            states_of = {number: x for number, x in by_segment if number in self._sent}
        return out.reshape(B, t, H, -1), states_of

    def sent_states(self, states: Mapping[int, Tensor], columns: int | None = None) -> Tensor:
        """Stack the outgoing states [s, B, H, D, W] by segment; W is ``columns``, by default V."""
        if self.segments.sent:
            return torch.stack([states[number] for number in self.segments.sent])
        q, _, v, g, _ = self.tokens
        return g.new_zeros(0, v.shape[0], v.shape[2], q.shape[-1], columns or v.shape[-1])

    def split(self, x_BtHW: Tensor, numbers: Sequence[int]) -> dict[int, Tensor]:
        """Split ``x``, the tokens in these segments, by segment."""
        return dict(zip(numbers, x_BtHW.split([self._size(number) for number in numbers], 1), strict=True))

    def _size(self, number: int) -> int:
        rows = self.segments.rows(number)
        return rows.stop - rows.start

    def _pick(self, x_Bt: Tensor, numbers: Sequence[int]) -> Tensor:
        """Concatenate the tokens in these segments."""
        if len(numbers) == len(self.every):
            return x_Bt
        return torch.cat([x_Bt[:, self.segments.rows(number)] for number in numbers] or [x_Bt[:, :0]], 1)


class _Join(torch.autograd.Function):
    """Autograd function that exchanges states and their gradients, and adds an incoming state's R·S to its outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        options: GatedDeltaOptions,
        received_sBHDV: Tensor | None,
        own_BtHV: Tensor,
        reads_BtHD: Tensor,
        pairs_sBHDW: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert options.exchange is not None
        ctx.options = options
        if received_sBHDV is None:
            received_sBHDV = options.exchange.states(pairs_sBHDW)()
        received_sBHDV = received_sBHDV.detach()
        out, at = own_BtHV.clone(), 0
        for state, segment in zip(received_sBHDV, options.segments.received, strict=True):
            rows = options.segments.rows(segment)
            reads = reads_BtHD[:, at : (at := at + rows.stop - rows.start)].to(state.dtype)
            out[:, rows] += torch.einsum("bthd,bhdv->bthv", reads, state).to(out.dtype)
        ctx.save_for_backward(received_sBHDV, reads_BtHD, pairs_sBHDW[..., own_BtHV.shape[-1] :])
        ctx.mark_non_differentiable(received_sBHDV)
        return out, received_sBHDV

    @staticmethod
    def backward(ctx: Any, dout_BtHV: Tensor, _: Tensor):  # type: ignore[override]
        received_sBHDV, reads_BtHD, maps_sBHDD = ctx.saved_tensors
        options: GatedDeltaOptions = ctx.options
        assert options.exchange is not None
        received_segments, sent_segments = options.segments.received, options.segments.sent
        # As for the states: the gradient at a segment's incoming state is affine in that at its outgoing state. So send
        # the result for gradient 0 at once, with transposed maps for segments that states pass through.
        dreads, at = torch.empty_like(reads_BtHD), 0
        grad_received, back_maps = (
            torch.zeros_like(received_sBHDV),
            maps_sBHDD.new_zeros(len(received_segments), *maps_sBHDD.shape[1:]),
        )
        for n, (state, segment) in enumerate(zip(received_sBHDV, received_segments, strict=True)):
            rows = options.segments.rows(segment)
            own = slice(at, at := at + rows.stop - rows.start)
            dout = dout_BtHV[:, rows].to(state.dtype)
            grad_received[n] = torch.einsum("bthd,bthv->bhdv", reads_BtHD[:, own].to(state.dtype), dout)
            dreads[:, own] = torch.einsum("bthv,bhdv->bthd", dout, state)
            if segment in sent_segments:
                back_maps[n] = maps_sBHDD[sent_segments.index(segment)].mT
        grad_sent = options.exchange.states_back(torch.cat((grad_received, back_maps), -1))()
        dpairs = functional.pad(grad_sent, (0, maps_sBHDD.shape[-1]))
        for n, segment in enumerate(sent_segments):
            if segment in received_segments:
                dpairs[n, ..., grad_sent.shape[-1] :] = (
                    grad_sent[n] @ received_sBHDV[received_segments.index(segment)].mT
                )
        return None, None, dout_BtHV, dreads, dpairs
