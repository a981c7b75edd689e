"""Linear attention on one device: a small matrix, the state, summarizes all keys that a query needs.

With the feature map φ(x) = elu(x) + 1 (arXiv 2006.16236), out_i = φ(q_i)·S_i / φ(q_i)·z_i, where S_i = Σ φ(k_j)ᵀ v_j
and z_i = Σ φ(k_j) over the keys j in i's document up to i (all keys if not causal).

Axes: B batch, t rows, H query heads, K key/value heads, G = H/K, D query/key head size, V value head size, W = V + 1, N
chunks, C rows of a chunk, s states; X, Y, R, S stand for any of these in a generic contraction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.dtypes import accumulate_dtype

# A column of ones appended to the values makes z the last column of S, so only one sum is kept. Rows are cut into
# chunks: within a chunk rows attend under a mask, as in softmax attention; preceding rows enter a chunk as a state. For
# any number of documents, a pass is a few batched matmuls.
CHUNK = 64
"""Rows per chunk: a larger chunk means more work within chunks, but less work and memory for the states between them.
"""


@dataclass(frozen=True)
class StateSegments:
    """One device's rows, cut into segments: contiguous rows from one document."""

    documents: PackedDocuments
    """Segments as documents packed into these rows; boundaries as a list or tensor are converted."""
    received: tuple[int, ...] = ()
    """Segments that also see their document's keys on other devices: each receives an incoming state."""
    sent: tuple[int, ...] = ()
    """Segments that return their own state."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "documents", PackedDocuments.of(self.documents))

    def rows(self, segment: int) -> slice:
        """Return a segment's row range."""
        return slice(self.documents.bounds[segment], self.documents.bounds[segment + 1])


class StateExchange(Protocol):
    """Exchange of states between one document's segments on several devices.

    Both methods start immediately; the function they return waits for the result.
    """

    def carry(self, sent_sBKDW: Tensor) -> Callable[[], Tensor]:
        """Map the provided states to the incoming states for segments that take one."""
        ...

    def carry_back(self, grad_received_sBKDW: Tensor) -> Callable[[], Tensor]:
        """Apply the transposed map: gradients at incoming states to gradients at provided states."""
        ...


def linear_attention(
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    *,
    segments: StateSegments,
    causal: bool = True,
    initial_states_sBKDW: Tensor | None = None,
    exchange: StateExchange | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return output [B, t, H, V] in q's dtype and the state [s, B, K, D, V+1] for each segment in ``segments.sent``.

    A query sees the keys in its own segment and, in a segment from ``segments.received``, the incoming state:
    ``initial_states_sBKDW``, or the result of ``exchange`` on the returned states. A returned state only covers its
    segment's own keys: add the segment's incoming state to get the state after it. Sums and states are float32 (float64
    for float64 inputs). The output is 0 if all of a query's weights underflow to 0. Everything is differentiable. Raise
    ConfigError if sizes do not fit.
    """
    check_qkv(q_BtHD, k_BtKD, v_BtKV)
    _check_segments(segments, q_BtHD.shape[1], chunk)
    K, D = k_BtKD.shape[2:]
    wanted = (len(segments.received), q_BtHD.shape[0], K, D, v_BtKV.shape[3] + 1)
    if initial_states_sBKDW is not None and (exchange is not None or tuple(initial_states_sBKDW.shape) != wanted):
        raise ConfigError(
            f"carried states have shape {tuple(initial_states_sBKDW.shape)}; the {len(segments.received)} "
            "segments that receive one "
            f"need {wanted} (segments, B, key heads, D, V+1), without an exchange."
        )
    return _LinearAttention.apply(q_BtHD, k_BtKD, v_BtKV, initial_states_sBKDW, segments, causal, exchange, chunk)


def check_qkv(q_BtHD: Tensor, k_BtKD: Tensor, v_BtKV: Tensor) -> None:
    """Raise ConfigError unless shapes and dtypes are consistent."""
    q, k, v = q_BtHD, k_BtKD, v_BtKV
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ConfigError(f"linear attention takes q [B,t,H,D], k [B,t,K,D] and v [B,t,K,V]; got {shapes}.")
    if not q.dtype.is_floating_point or not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"linear attention takes one floating dtype; got {q.dtype}, {k.dtype} and {v.dtype}.")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ConfigError(f"{k.shape[2]} key heads do not divide {q.shape[2]} query heads ({shapes}).")


def _check_segments(segments: StateSegments, rows: int, chunk: int) -> None:
    """Raise ConfigError unless the segments cover these rows and a chunk has at least one row."""
    count = PackedDocuments.of(segments.documents, rows).num_documents
    if any(not 0 <= s < count for s in segments.received + segments.sent):
        raise ConfigError(f"received {segments.received} and sent {segments.sent} must be among the {count} segments.")
    if chunk < 1:
        raise ConfigError(f"chunk={chunk} must be at least 1 row. Use {CHUNK}.")


class _LinearAttention(torch.autograd.Function):
    """Autograd function that saves q, k, v, out and one denominator per row, and recomputes the rest in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        initial_states: Tensor | None,
        segments: StateSegments,
        causal: bool,
        exchange: StateExchange | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        f, g, u = _features(q, k, v)
        # states first: they travel to other devices while this one computes its own rows
        sent, received = _states(g, u, segments, segments.sent), initial_states
        wait_for_states = None
        if exchange is not None:
            wait_for_states = exchange.carry(sent)
        chunks = _chunks(segments.documents, chunk, q.device)
        sums = _scan(f, g, u, chunks, before=True, after=not causal)
        if wait_for_states is not None:
            received = wait_for_states()
        if received is not None:
            received = received.to(sums.dtype)
            _add_product(sums, f, received, segments, segments.received)
        # The ones column has summed the denominators. If all weights underflow, use 0 / 1 instead of 0 / 0.
        weight = sums[..., -1:]
        weight = weight.masked_fill(weight == 0, 1.0)
        out = (sums[..., :-1] / weight).to(q.dtype).flatten(2, 3)
        ctx.save_for_backward(q, k, v, out, weight, received)
        ctx.segments, ctx.causal, ctx.exchange, ctx.chunks = segments, causal, exchange, chunks
        return out, sent

    @staticmethod
    def backward(ctx: Any, dout: Tensor, grad_sent: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, weight, received = ctx.saved_tensors
        segments, causal, exchange, chunks = ctx.segments, ctx.causal, ctx.exchange, ctx.chunks
        f, g, u = _features(q, k, v)
        dsums = _sums_gradient(dout, out, weight)
        grad_received: Tensor | None = None
        if received is not None:
            grad_received = _states(f, dsums, segments, segments.received)
        # start the transfer back, to overlap it with local computation
        wait_for_grads = None
        if exchange is not None:
            wait_for_grads = exchange.carry_back(grad_received)
        # y = Σ (f·g) u: each factor's gradient is the same sum with that factor replaced by the output gradient. A
        # query sums over keys before it, so a key's gradient sums over queries after it.
        df = _scan(dsums, u, g, chunks, before=True, after=not causal)
        dg = _scan(u, dsums, f, chunks, before=not causal, after=True)
        du = _scan(g, f, dsums, chunks, before=not causal, after=True)
        if received is not None:
            _add_product(df, dsums, received.mT, segments, segments.received)
        if wait_for_grads is not None:
            grad_sent = grad_sent + wait_for_grads()
        _add_product(dg, u, grad_sent.mT, segments, segments.sent)
        _add_product(du, g, grad_sent, segments, segments.sent)
        dq, dk = df * f.clamp(max=1.0), dg * g.clamp(max=1.0)  # φ' is 1 above 0 and φ itself below
        dv = du[..., :-1]  # the column of ones has no gradient
        dq, dk, dv = (part.to(x.dtype).reshape(x.shape) for part, x in ((dq, q), (dk, k), (dv, v)))
        # states from an exchange get their gradients through it
        if exchange is not None:
            grad_received = None
        return dq, dk, dv, grad_received, None, None, None, None


def _features(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return φ(q) as [B, t, K, G, D], φ(k) as [B, t, K, 1, D], and values with a column of ones as [B, t, K, 1, W]."""
    q, k, v = (x.to(accumulate_dtype(x.dtype)) for x in (q, k, v))
    f, g = _feature_map(q).unflatten(2, (k.shape[2], -1)), _feature_map(k).unsqueeze(3)
    return f, g, functional.pad(v, (0, 1), value=1.0).unsqueeze(3)


def _feature_map(x: Tensor) -> Tensor:
    """Return elu(x) + 1, without the cancellation that rounds it to 0 below -17 in float32."""
    return x.clamp(max=0).exp_().add_(x.clamp(min=0))


def _sums_gradient(dout: Tensor, out: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient at the unnormalized sums [B, t, K, G, W]."""
    dout, out = (x.to(weight.dtype).unflatten(2, weight.shape[2:4]) for x in (dout, out))
    # quotient rule for n / w: dn = dout / w and dw = −(dout · out) / w
    return torch.cat((dout, -(dout * out).sum(-1, keepdim=True)), -1).div_(weight)


def _states(b_BtKGX: Tensor, c_BtKGY: Tensor, segments: StateSegments, which: tuple[int, ...]) -> Tensor:
    """Return Σ bᵀc over each of these segments' rows (and the group's heads), [s, B, K, X, Y]."""
    B, _, K, _, X = b_BtKGX.shape
    out = b_BtKGX.new_zeros(len(which), B, K, X, c_BtKGY.shape[-1])
    for state, segment in zip(out, which, strict=True):
        b, c = (x[:, segments.rows(segment)].transpose(1, 2).flatten(2, 3) for x in (b_BtKGX, c_BtKGY))
        torch.matmul(b.mT, c, out=state)
    return out


def _add_product(
    y_BtKGY: Tensor, a_BtKGX: Tensor, state_sBKXY: Tensor, segments: StateSegments, which: tuple[int, ...]
) -> None:
    """Add a·state to each of these segments' rows, in place."""
    for state_BKXY, segment in zip(state_sBKXY, which, strict=True):
        a = a_BtKGX[:, segments.rows(segment)].transpose(1, 2)
        product = a.flatten(2, 3) @ state_BKXY
        y_BtKGY[:, segments.rows(segment)] += product.unflatten(2, a.shape[2:4]).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class _Chunks:
    """Masks for row pairs in a chunk, and state flow between chunks, from before (0) and from after (1)."""

    size: int
    count: int
    same_NCC: Tensor
    """Whether two rows in a chunk share a segment; [1, C, C] if all do."""
    passes: tuple[list[bool], list[bool]]
    """Whether the neighbouring chunk's state passes through this one."""
    final_rows_NC: tuple[Tensor | None, Tensor | None]
    """Rows included in the state that leaves a chunk: its last (first) row's segment; unset for all."""
    incoming_rows_NC: tuple[Tensor | None, Tensor | None]
    """Rows affected by the state that enters a chunk; unset for all."""


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # training may reuse chunks that generation cached
def _chunks(segments: PackedDocuments, size: int, device: torch.device) -> _Chunks:
    """Build the chunks for these segments; the last one is padded with zero rows."""
    t = segments.num_tokens
    count = max(1, -(-t // size))
    rows = torch.arange(count * size).clamp(max=max(t - 1, 0))
    segment_NC = torch.bucketize(rows, segments.cu_seqlens[1:], right=True).view(count, size)
    first, last = segment_NC[:, 0], segment_NC[:, -1]
    # segments of the rows just before and just after each chunk
    before, after = last.roll(1), first.roll(-1)
    before[0], after[-1] = -1, -1
    passes = ((last == before).tolist(), (first == after).tolist())
    # one segment: all rows see each other, and masks would only add cost
    if first[0] == last[-1]:
        all_visible = torch.ones(1, size, size, dtype=torch.bool, device=device)
        return _Chunks(size, count, all_visible, passes, (None, None), (None, None))
    same = segment_NC.unsqueeze(2) == segment_NC.unsqueeze(1)

    def on_device(mask: Tensor) -> Tensor:
        return mask.to(device, non_blocking=True)

    last, first, before, after = (on_device(segment_NC == of.unsqueeze(1)) for of in (last, first, before, after))
    return _Chunks(size, count, on_device(same), passes, (last, first), (before, after))


def _scan(a_BtKGX: Tensor, b_BtKGX: Tensor, c_BtKGY: Tensor, chunks: _Chunks, *, before: bool, after: bool) -> Tensor:
    """Return y_i = Σ (a_i·b_j) c_j over rows j in i's segment, [B, t, K, G, Y].

    The sum covers i itself and, if requested, rows before and after it.
    """
    # Forward and all gradients are this one sum. A group's heads become extra rows in a chunk, on either side.
    groups, t = a_BtKGX.shape[3], a_BtKGX.shape[1]
    a, b, c = (_fold(x, chunks) for x in (a_BtKGX, b_BtKGX, c_BtKGY))
    # within a chunk: the square score matrix, as in softmax attention
    scores = a @ b.mT
    mask_NCC = chunks.same_NCC
    if not (before and after):
        if before:
            mask_NCC = mask_NCC.tril()
        else:
            mask_NCC = mask_NCC.triu()
    scores.unflatten(4, (-1, chunks.size)).unflatten(3, (-1, chunks.size)).mul_(mask_NCC[:, None, None, :, None])
    y = scores @ c
    del scores  # the largest tensor here
    # across chunks: through the incoming state
    for wanted, side in ((before, 0), (after, 1)):
        if wanted and chunks.count > 1:
            part = a @ _incoming_states(b, c, chunks, side)
            y += _only(part, chunks.incoming_rows_NC[side])
    return y.unflatten(3, (groups, chunks.size)).permute(0, 1, 4, 2, 3, 5).flatten(1, 2)[:, :t]


def _fold(x_BtKGX: Tensor, chunks: _Chunks) -> Tensor:
    """Cut the rows into chunks, [B, N, K, G·C, X]; missing rows are 0."""
    missing, x = chunks.size * chunks.count - x_BtKGX.shape[1], x_BtKGX
    if missing:
        x = functional.pad(x, (0, 0) * 3 + (0, missing))
    return x.unflatten(1, (chunks.count, chunks.size)).permute(0, 1, 3, 4, 2, 5).flatten(3, 4)


def _only(x_BNKRX: Tensor, rows_NC: Tensor | None) -> Tensor:
    """Zero all other rows in a chunk."""
    if rows_NC is None:
        return x_BNKRX
    return (x_BNKRX.unflatten(3, (-1, rows_NC.shape[1])) * rows_NC[:, None, None, :, None]).flatten(3, 4)


def _incoming_states(b_BNKSX: Tensor, c_BNKSY: Tensor, chunks: _Chunks, side: int) -> Tensor:
    """Return each chunk's incoming state, [B, N, K, X, Y], from rows before it (side 0) or after it (side 1)."""
    states = b_BNKSX.mT @ _only(c_BNKSY, chunks.final_rows_NC[side])
    order, step, first = range(1, chunks.count), 1, 0
    if side == 1:
        order, step, first = range(chunks.count - 2, -1, -1), -1, chunks.count - 1
    # running sum within one segment; a chunk that starts another segment starts a new sum
    for n in order:
        if chunks.passes[side][n]:
            states[:, n] += states[:, n - step]
    # the state leaving a chunk enters the next one; the first chunk receives zeros
    incoming = states.roll(step, 1)
    incoming[:, first] = 0
    return incoming
