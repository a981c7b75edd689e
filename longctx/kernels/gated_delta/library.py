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
from longctx.kernels.gated_delta.call import CHUNK, Call, Carried, InputGradients, Options
from longctx.kernels.gated_delta.front import Tokens, Weights
from longctx.kernels.linear_attention import Segments

log = logging.getLogger(__name__)

LEAST_VERSION = (0, 5)
FRONT_CHUNKS = 128
"""Chunks per block for convolution and gates."""

_LARGEST_KEY = 256
_FUNCTIONS = {False: ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"), True: ("fla.ops.kda", "chunk_kda")}
"""Keyed by whether decays differ by channel."""


class Rule(Protocol):
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


def library_for(tokens: Tokens, options: Options) -> Rule | None:
    """Return the installed library's function if it supports these tokens; otherwise our own passes run."""
    q, a = tokens.q_BtKD, tokens.a_BtKGX
    # shorter chunks are for generation, and traces have no data
    if on_cpu(q) or isinstance(q, FakeTensor) or options.chunk != CHUNK:
        return None
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] > _LARGEST_KEY:
        return None
    return installed(by_channel=a.shape[-1] > 1)


@cache
def installed(*, by_channel: bool) -> Rule | None:
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
    library: Rule, tokens: Tokens, weights: Weights, options: Options, carried: Carried | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``rule.gated_delta`` with a library's kernels."""
    segments, exchange, saved = options.segments, options.exchange, options.saved
    taken, before = carried or (None, None)
    if exchange is not None and saved is not None:
        # a recomputed layer reuses the tensors received in its first run
        taken, before = saved.load() or (None, None)
    *activated, before = _Front.apply(options, before, *(tokens + weights))
    sequences = _Sequences(library, Tokens._make(activated), segments)
    if exchange is None:
        out, behind = sequences(sequences.every, taken)
        return out, sequences.given(behind)
    # final for segments without incoming state; the others assume an incoming state of 0
    alone = [n for n in sequences.every if n not in segments.takes]
    out, behind = sequences(alone)
    wide, behind_wide = sequences(segments.takes, with_maps=True)
    V = out.shape[-1]
    outs = sequences.split(out, alone) | sequences.split(wide[..., :V], segments.takes)
    out = torch.cat([outs[n] for n in sequences.every], 1)
    maps = {n: functional.pad(x, (0, wide.shape[-1] - V)) for n, x in behind.items()}
    given = sequences.given(maps | behind_wide, wide.shape[-1])
    out, taken = _Join.apply(options, taken, out, wide[..., V:], given)
    if saved is not None:
        saved.save(taken, before)
    return out, given.detach()[..., :V]


class _Front(torch.autograd.Function):
    """Convolution and gates for all tokens, blockwise; backward recomputes them.

    Returns the fields of ``Tokens``, with g and β in float32 and the others in their own dtype, and the channels before
    segments that take a state.
    """

    @staticmethod
    def forward(ctx: Any, options: Options, before: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options, ctx.carried_dtype = options, None if before is None else before.dtype
        call = _call_of(tensors, options)
        if before is not None:
            before = before.to(call.dtype)
        elif options.exchange is not None:
            before = options.exchange.rows(call.tails())()
        else:
            before = call.zero_rows(len(options.segments.takes))
        out = Tokens._make(
            torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
            for x, dtype in zip(call.tokens, _dtypes(call), strict=True)
        )
        for span in call.spans:
            for block in span.blocks:
                found = call.activated(block, None if span.takes is None else before[span.takes])
                for whole, part in zip(out, found, strict=True):
                    whole[:, block.rows] = part
        ctx.save_for_backward(before, *tensors)
        before = before.detach()
        ctx.mark_non_differentiable(before)
        return *out, before

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        before, *tensors = ctx.saved_tensors
        call = _call_of(tensors, ctx.options)
        inputs = InputGradients(call, before)
        for span in call.spans:
            for block in span.blocks:
                part = inputs.activate(span, block)
                inputs.add(part, part.activated, [x[:, block.rows].to(call.dtype) for x in gradients[:-1]])
        dbefore = None
        if ctx.options.exchange is not None:
            inputs.add_tails(ctx.options.exchange.rows_back(inputs.dbefore)())
        elif ctx.carried_dtype is not None:
            dbefore = inputs.dbefore.to(ctx.carried_dtype)
        return None, dbefore, *inputs.results()


def _call_of(tensors: Sequence[Tensor], options: Options) -> Call:
    """Build the call from fields of ``Tokens`` and ``Weights``, with larger blocks."""
    return Call.of(tensors, replace(options, block_chunks=FRONT_CHUNKS))


def _dtypes(call: Call) -> tuple[torch.dtype, ...]:
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

    def __init__(self, library: Rule, tokens: Tokens, segments: Segments) -> None:
        """Lay out the activated ``tokens`` as a library takes them."""
        self.library, self.segments, self._gives = library, segments, set(segments.gives)
        bounds = segments.documents.bounds
        # libraries index sequences by their first chunks, and an empty sequence has no chunk
        self.every = [n for n, (start, stop) in enumerate(pairwise(bounds)) if start < stop]
        q, k, v, g, beta = tokens
        if g.shape[-1] == 1:
            g = g.squeeze(-1)
        # value heads one after another, with each key head's adjacent
        self.tokens = (q, k, v.flatten(2, 3), g.flatten(2, 3), beta.flatten(2, 3))

    def __call__(
        self, numbers: Sequence[int], taken_sBHDV: Tensor | None = None, *, with_maps: bool = False
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the segments' outputs [B, t, H, W], and the outgoing states [B, H, D, W] for segments that give one.

        ``taken_sBHDV`` are the incoming states for ``segments.takes``. With ``with_maps``, R and M follow O and U.
        """
        q, k, v, g, beta = (self._pick(x, numbers) for x in self.tokens)
        (B, t, H, V), D = v.shape, q.shape[-1]
        states, n = None, len(numbers)
        if with_maps:
            v = functional.pad(v, (0, D))
            identity = torch.eye(D, dtype=g.dtype, device=g.device)
            states = functional.pad(identity, (V, 0)).expand(n, B, H, D, V + D)
        elif taken_sBHDV is not None:
            zero = taken_sBHDV.new_zeros(B, H, D, V)
            entering = dict(zip(self.segments.takes, taken_sBHDV, strict=True))
            states = torch.stack([entering.get(number, zero) for number in numbers])
        if not n:
            return v, {}
        sizes = [self._size(number) for number in numbers]
        ends = tuple(accumulate(sizes * B, initial=0))
        # Libraries take variable-length sequences as one row, so batch rows are concatenated.
        row = [x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g, beta)]
        out, behind = self.library(
            *row,
            initial_state=None if states is None else states.to(g.dtype).transpose(0, 1).flatten(0, 1).contiguous(),
            output_final_state=not self._gives.isdisjoint(numbers),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=_boundaries(ends, q.device),
        )
        states_of = {}
        if behind is not None:
            by_segment = zip(numbers, behind.unflatten(0, (B, n)).unbind(1), strict=True)
            states_of = {number: x for number, x in by_segment if number in self._gives}
        return out.reshape(B, t, H, -1), states_of

    def given(self, states: Mapping[int, Tensor], columns: int | None = None) -> Tensor:
        """Stack the outgoing states [s, B, H, D, W] by segment; W is ``columns``, by default V."""
        if self.segments.gives:
            return torch.stack([states[number] for number in self.segments.gives])
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
        options: Options,
        taken_sBHDV: Tensor | None,
        own_BtHV: Tensor,
        reads_BtHD: Tensor,
        pairs_sBHDW: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert options.exchange is not None
        ctx.options = options
        if taken_sBHDV is None:
            taken_sBHDV = options.exchange.states(pairs_sBHDW)()
        taken_sBHDV = taken_sBHDV.detach()
        out, at = own_BtHV.clone(), 0
        for state, segment in zip(taken_sBHDV, options.segments.takes, strict=True):
            rows = options.segments.rows(segment)
            reads = reads_BtHD[:, at : (at := at + rows.stop - rows.start)].to(state.dtype)
            out[:, rows] += torch.einsum("bthd,bhdv->bthv", reads, state).to(out.dtype)
        ctx.save_for_backward(taken_sBHDV, reads_BtHD, pairs_sBHDW[..., own_BtHV.shape[-1] :])
        ctx.mark_non_differentiable(taken_sBHDV)
        return out, taken_sBHDV

    @staticmethod
    def backward(ctx: Any, dout_BtHV: Tensor, _: Tensor):  # type: ignore[override]
        taken_sBHDV, reads_BtHD, maps_sBHDD = ctx.saved_tensors
        options: Options = ctx.options
        assert options.exchange is not None
        takes, gives = options.segments.takes, options.segments.gives
        # As for the states: the gradient at a segment's incoming state is affine in that at its outgoing state. So send
        # the result for gradient 0 at once, with transposed maps for segments that states pass through.
        dreads, at = torch.empty_like(reads_BtHD), 0
        dtaken, back_maps = torch.zeros_like(taken_sBHDV), maps_sBHDD.new_zeros(len(takes), *maps_sBHDD.shape[1:])
        for n, (state, segment) in enumerate(zip(taken_sBHDV, takes, strict=True)):
            rows = options.segments.rows(segment)
            own = slice(at, at := at + rows.stop - rows.start)
            dout = dout_BtHV[:, rows].to(state.dtype)
            dtaken[n] = torch.einsum("bthd,bthv->bhdv", reads_BtHD[:, own].to(state.dtype), dout)
            dreads[:, own] = torch.einsum("bthv,bhdv->bthd", dout, state)
            if segment in gives:
                back_maps[n] = maps_sBHDD[gives.index(segment)].mT
        dgiven = options.exchange.states_back(torch.cat((dtaken, back_maps), -1))()
        dpairs = functional.pad(dgiven, (0, maps_sBHDD.shape[-1]))
        for n, segment in enumerate(gives):
            if segment in takes:
                dpairs[n, ..., dgiven.shape[-1] :] = dgiven[n] @ taken_sBHDV[takes.index(segment)].mT
        return None, None, dout_BtHV, dreads, dpairs
