"""Functions with the signatures of flash-attn 2 and 4, of PyTorch's CUDA operators and of FlexAttention, on any device.

They compute by definition in float64 what the libraries' sources say, traps included: windows counted from the
bottom-right corner and clamped as each library clamps them, log-sum-exps in float32 [H, n], outputs that hold garbage
where no sequence wrote. What a library refuses, they refuse.
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import AuxOutput


def _check(q, k, v, cu_q, cu_k, max_q, max_k, *, same_head=True, largest=256):
    for x in (q, k, v):
        assert x.dim() == 3
        assert x.stride(-1) == 1
        assert x.dtype == q.dtype
        assert x.shape[-1] % 8 == 0
        assert x.shape[-1] <= largest
    assert k.shape[:2] == v.shape[:2]
    assert k.shape[-1] == q.shape[-1]
    assert not same_head or v.shape[-1] == q.shape[-1]
    assert q.shape[1] % k.shape[1] == 0
    for cu, rows, longest in ((cu_q, q.shape[0], max_q), (cu_k, k.shape[0], max_k)):
        assert cu.dtype == torch.int32
        assert cu.is_contiguous()
        assert cu.shape == cu_q.shape
        assert int(cu[0]) == 0
        assert int(cu[-1]) <= rows
        assert int(cu.diff().min()) > 0
        assert int(cu.diff().max()) <= longest, "a row beyond the maximum would not be computed"


def _sequences(cu_q, cu_k):
    q, k = cu_q.tolist(), cu_k.tolist()
    for n in range(len(q) - 1):
        yield slice(q[n], q[n + 1]), slice(k[n], k[n + 1])


def _distance(sq, sk):
    """i + sk − sq − j."""
    return torch.arange(sq)[:, None] + sk - sq - torch.arange(sk)


class _Rule:
    """Mask and scores of one call: raw scores of a sequence to final ones, and their derivative."""

    def __init__(self, *, scale, left, right, softcap=0.0):
        self.scale, self.left, self.right, self.softcap = scale, left, right, softcap

    def scores(self, q, k):
        """Final scores [H, sq, sk] (−inf where masked) and d final / d (q·k)."""
        raw = torch.einsum("ihd,jhd->hij", q, k) * self.scale
        slope = torch.full_like(raw, self.scale)
        if self.softcap > 0:
            tanh = torch.tanh(raw / self.softcap)
            raw, slope = self.softcap * tanh, self.scale * (1 - tanh**2)
        distance = _distance(*raw.shape[1:])
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.left is not None:
            hidden |= distance > self.left
        if self.right is not None:
            hidden |= distance < -self.right
        return raw.masked_fill(hidden, -torch.inf), slope


def _forward(q, k, v, cu_q, cu_k, rule):
    groups = q.shape[1] // k.shape[1]
    out = torch.full((*q.shape[:2], v.shape[-1]), torch.nan, dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.float32)
    for rows, keys in _sequences(cu_q, cu_k):
        kk, vv = (x[keys].double().repeat_interleave(groups, 1) for x in (k, v))
        scores, _ = rule.scores(q[rows].double(), kk)
        here = scores.logsumexp(-1)
        assert here.isfinite().all(), "a row without a key must not reach the kernel"
        out[rows] = torch.einsum("hij,jhd->ihd", torch.exp(scores - here[..., None]), vv)
        lse[:, rows] = here.float()
    return out.to(q.dtype), lse


def _backward(dout, q, k, v, out, lse, cu_q, cu_k, rule):
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert dout.dtype == out.dtype == q.dtype
    assert dout.stride(-1) == out.stride(-1) == 1
    assert dout.shape == out.shape == (*q.shape[:2], v.shape[-1])
    groups = q.shape[1] // k.shape[1]
    grads = [torch.full(x.shape, torch.nan, dtype=torch.float64) for x in (q, k, v)]
    for rows, keys in _sequences(cu_q, cu_k):
        kk, vv = (x[keys].double().repeat_interleave(groups, 1) for x in (k, v))
        qq, do = q[rows].double(), dout[rows].double()
        scores, slope = rule.scores(qq, kk)
        weights = torch.exp(scores - lse[:, rows].double()[..., None])
        delta = (do * out[rows].double()).sum(-1).T[..., None]
        dscores = weights * (torch.einsum("ihd,jhd->hij", do, vv) - delta) * slope
        found = (
            torch.einsum("hij,jhd->ihd", dscores, kk),
            torch.einsum("hij,ihd->jhd", dscores, qq).unflatten(1, (-1, groups)).sum(2),
            torch.einsum("hij,ihd->jhd", weights, do).unflatten(1, (-1, groups)).sum(2),
        )
        for grad, place, part in zip(grads, (rows, keys, keys), found, strict=True):
            grad[place] = part
    return [g.to(q.dtype) for g in grads]


def _rule_of_flash2(scale, causal, left, right, softcap, max_k):
    """The window after flash-attn 2's own clamping (``flash_api.cpp``), in which −1 was a bound's absence."""
    if causal:
        right = 0
    left = -1 if left >= max_k else left
    right = -1 if right >= max_k else right
    purely_causal = left < 0 and right == 0
    if not purely_causal and right >= 0 > left:
        left = max_k
    if right < 0 <= left:
        right = max_k
    return _Rule(
        scale=scale,
        left=None if left < 0 else left,
        right=None if right < 0 else right,
        softcap=softcap,
    )


class Flash2:
    """``flash_attn.flash_attn_interface`` 2.7."""

    calls = 0

    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        self.calls += 1
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert alibi_slopes is None
        window = (window_size_left, window_size_right, softcap, max_seqlen_k)
        out, lse = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, _rule_of_flash2(softmax_scale, causal, *window))
        return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        self.deterministic = deterministic
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert alibi_slopes is None
        window = (window_size_left, window_size_right, softcap, max_seqlen_k)
        rule = _rule_of_flash2(softmax_scale, causal, *window)
        found = _backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, rule)
        for given, x in zip((dq, dk, dv), found, strict=True):
            assert given.shape == x.shape
            given.copy_(x)
        return torch.empty(0)


class Aten:
    """``torch.ops.aten``'s two CUDA flash operators, as of PyTorch 2.13."""

    def _flash_attention_forward(
        self, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
        scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
        num_splits=None,
    ):  # fmt: skip
        out, lse, *_ = Flash2()._flash_attn_varlen_forward(
            query,
            key,
            value,
            cum_seq_q,
            cum_seq_k,
            max_q,
            max_k,
            dropout_p,
            scale or query.shape[-1] ** -0.5,
            is_causal,
            -1 if window_size_left is None else window_size_left,
            -1 if window_size_right is None else window_size_right,
        )
        return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64), torch.empty(0)

    def _flash_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
        left, right = (-1 if w is None else w for w in (window_size_left, window_size_right))
        rule = _rule_of_flash2(scale or query.shape[-1] ** -0.5, is_causal, left, right, 0.0, max_k)
        return tuple(_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, rule))


class Flash4:
    """``flash_attn.cute.interface`` 4.0.0b36 on Hopper; arguments that concern paging, sinks and tuning left out."""

    def _flash_attn_fwd(
        self, q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False,
        softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, *, return_lse=False,
    ):  # fmt: skip
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, same_head=False)
        assert return_lse
        rule = self._rule(softmax_scale, causal, window_size_left, window_size_right, softcap)
        return (*_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, rule), None, None, None)

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False,
    ):  # fmt: skip
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, same_head=False)
        rule = self._rule(softmax_scale, causal, window_size_left, window_size_right, softcap)
        return tuple(_backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, rule))

    def _rule(self, scale, causal, left, right, softcap):
        assert left is None or left >= 0
        assert right is None or right >= 0
        return _Rule(scale=scale, left=left, right=0 if causal else right, softcap=softcap or 0.0)


class Cudnn:
    """``torch.ops.aten``'s two cuDNN operators over sequences of one length, as of PyTorch 2.13."""

    def __init__(self):
        self.calls = []

    def _scaled_dot_product_cudnn_attention(
        self, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
        return_debug_mask=False, *, scale=None,
    ):  # fmt: skip
        assert attn_bias is None
        assert compute_log_sumexp
        assert dropout_p == 0.0
        assert not return_debug_mask
        q, k, v, cu = self._packed(query, key, value, is_causal)
        self.calls.append((query.shape[2], key.shape[2], is_causal))
        rule = _Rule(scale=scale, left=None, right=0 if is_causal else None)
        out, lse = _forward(q, k, v, *cu, rule)
        B, H, n, _ = query.shape
        out = out.view(B, n, H, -1).transpose(1, 2)
        return out, lse.view(H, B, n).transpose(0, 1).contiguous(), None, None, n, key.shape[2], None, None, None

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
        max_q, max_k, dropout_p, is_causal, *, scale=None,
    ):  # fmt: skip
        assert attn_bias is cum_seq_q is cum_seq_k is None
        assert (max_q, max_k) == (query.shape[2], key.shape[2])
        assert dropout_p == 0.0
        B, H, n, _ = query.shape
        assert logsumexp.shape == (B, H, n), "the operator adds the axis of 1 itself"
        assert logsumexp.is_contiguous()
        for x in (out, grad_out):
            # the plan of the first call is taken again, whatever their strides are then
            assert x.transpose(1, 2).is_contiguous()
        q, k, v, cu = self._packed(query, key, value, is_causal)
        o, do = (x.transpose(1, 2).flatten(0, 1) for x in (out, grad_out))
        rule = _Rule(scale=scale, left=None, right=0 if is_causal else None)
        lse = logsumexp.transpose(0, 1).flatten(1).contiguous()
        dq, dk, dv = _backward(do, q, k, v, o, lse, *cu, rule)
        return tuple(x.unflatten(0, (B, -1)).transpose(1, 2) for x in (dq, dk, dv))

    def _packed(self, query, key, value, is_causal):
        for x in (query, key, value):
            assert x.dim() == 4
            assert x.stride(-1) == 1
            assert x.shape[-1] % 8 == 0
        assert (query.shape[-1], value.shape[-1]) == (192, 128) or query.shape[-1] == value.shape[-1] <= 128
        assert key.shape[2] > 1, "not supported"
        assert not is_causal or query.shape[2] == key.shape[2], "the corner that causal masks count from"
        cu = [torch.arange(x.shape[0] + 1, dtype=torch.int32) * x.shape[2] for x in (query, key)]
        return *(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)), cu


def flex(
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
    kernel_options=None, *, return_aux=None,
):  # fmt: skip
    """``flex_attention`` with gradients, on the CPU too: whole blocks as they are, partial ones under ``mask_mod``."""
    assert block_mask is not None
    assert return_aux is not None
    assert return_aux.lse
    assert (query.shape[-2], key.shape[-2]) == block_mask.seq_lengths
    assert enable_gqa == (query.shape[1] != key.shape[1])
    dtype, lse_dtype = query.dtype, torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(x.double().repeat_interleave(groups, 1) for x in (key, value))
    q, k = torch.arange(query.shape[-2])[:, None], torch.arange(key.shape[-2])
    b, h = torch.zeros((), dtype=torch.int64), torch.arange(query.shape[1])[:, None, None]
    scores = (query @ key.mT) * scale
    if score_mod is not None:
        scores = score_mod(scores, b, h, q, k)
    partial = _blocks(block_mask.kv_num_blocks, block_mask.kv_indices)
    whole = _blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    assert not (partial & whole).any()
    seen = block_mask.mask_mod(b, h, q, k)
    assert (seen | ~_by_row(whole, scores)).all(), "a whole block has a key that a row does not see"
    scores = scores.masked_fill(~(_by_row(partial, scores) & seen | _by_row(whole, scores)), -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - lse[..., None]) @ value
    return out.to(dtype), AuxOutput(lse=lse.to(lse_dtype), max_scores=None)


def _blocks(counts, indices):
    chosen = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, (count, order) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
        chosen[row, order[:count]] = True
    return chosen


def _by_row(blocks, scores):
    return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[: scores.shape[-2], : scores.shape[-1]]
