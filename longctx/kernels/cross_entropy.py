"""Fused linear cross-entropy: never materializes all logits at once.

float32 and float64 inputs are multiplied in their own dtype. ``matmul_mode`` selects how bfloat16 is multiplied: in
float32 (exact logits, and several times faster on processors without bfloat16 instructions), or in bfloat16, with
logits rounded to 8 bits as in any bfloat16 head; everything between the matmuls is float32 in either case. On CUDA the
weight's gradient accumulates bfloat16 matmuls in float32 and is rounded once at the end.

Axes: N tokens, n tokens of one chunk, r of one row block, M model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.batch import IGNORED_TARGET
from longctx.kernels.devices import on_cpu
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.loss_options import PLAIN, LossOptions
from longctx.kernels.matmul import add_upcast_matmul_, multiplies_in_float32, row_tiles
from longctx.kernels.processor import MatmulMode
from longctx.kernels.regions import RegionRunner, call_function

# The loss is linear in its incoming scalar gradient, so forward can compute its own gradients up to that factor. Chunk
# by chunk, logits are computed, become losses and then, in the same memory, their gradient, which is multiplied back
# into dhidden and dweight. The chunk size balances two costs: logits memory, and adding a full [V, M] gradient per
# chunk. Between the matmuls a chunk is processed in row blocks that fit a core's cache. Same idea as Liger Kernel's
# FusedLinearCrossEntropy (arXiv 2410.10989).
_CHUNK_ELEMENTS = 1 << 24
"""Logits per chunk: 64 MiB in float32. Below about 512 tokens, accumulating the weight's gradient dominates."""
_CHUNK_ELEMENTS_OF_GPU = 1 << 29
"""The same on an accelerator: 1 GiB in bfloat16. A thousand tokens neither saturate it nor hide the accumulation."""
_BLOCK_ELEMENTS = 1 << 18
"""Elements per row block and thread on a CPU: 1 MiB in float32, the L2 cache of a server core."""
_BLOCK_ELEMENTS_OF_GPU = 1 << 27
"""Elements per row block on an accelerator: 512 MiB in float32, with a few copies alive at a time."""
TILE_ELEMENTS = 1 << 21
"""Weight elements converted at a time if matmuls use another dtype: 8 MiB in float32."""


def loss_sums(
    hidden_NM: Tensor,
    weight_VM: Tensor,
    targets_N: Tensor,
    bias_V: Tensor | None = None,
    *,
    options: LossOptions = PLAIN,
    matmul_mode: MatmulMode = "native",
    chunk_tokens: int | None = None,
    run: RegionRunner = call_function,
    weights_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (Σ weight · objective, Σ −log softmax(logits)[target]) over all targets that are not ignored.

    Both are float32 scalars (float64 for float64 inputs). ``LossOptions`` defines the logits. The first sum has a
    gradient; the second, the plain negative log-likelihood, is for reporting and has none. Targets are token ids or
    ``IGNORED_TARGET``. ``weights_N``, of any sign and without gradient, defaults to 1 for each token.

    ``chunk_tokens`` limits the tokens whose logits exist at a time. The default uses 64 MiB for logits, or a quarter of
    the memory that the weight's gradient takes; on an accelerator 8,192 tokens, or as many as have 2^29 logits. The
    weight's gradient is summed over chunks in float32. ``matmul_mode`` selects how a CPU multiplies bfloat16; ``run``
    calls the function that turns logits into losses if a gradient is needed.
    """
    if torch.is_grad_enabled() and (hidden_NM.requires_grad or weight_VM.requires_grad):
        return _LossSums.apply(
            hidden_NM, weight_VM, bias_V, targets_N, weights_N, options, matmul_mode, chunk_tokens, run
        )
    computed = sums_and_gradients(
        hidden_NM, weight_VM, targets_N, options, matmul_mode, bias_V, chunk_tokens, weights_N=weights_N
    )
    return as_scalars(computed.sums, hidden_NM.dtype)


@torch.no_grad()
def token_nll(
    hidden_NM: Tensor,
    weight_VM: Tensor,
    targets_N: Tensor,
    bias_V: Tensor | None = None,
    *,
    options: LossOptions = PLAIN,
    matmul_mode: MatmulMode = "native",
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return each token's −log softmax(logits)[target], [N] float32, without gradient; 0 if the target is ignored.

    Only options that change the logits have an effect.
    """
    nll_N = hidden_NM.new_zeros(len(targets_N), dtype=accumulate_dtype(hidden_NM.dtype))
    for chunk, _, logits_nV in _chunks(hidden_NM, weight_VM, bias_V, matmul_mode, chunk_tokens):
        losses_4n, _ = losses_(logits_nV, targets_N[chunk], options, None, with_gradient=False)
        nll_N[chunk] = losses_4n[1]
    return nll_N


class _LossSums(torch.autograd.Function):
    """Autograd function for ``loss_sums``: forward computes the gradients, backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor | None,
        options: LossOptions,
        matmul_mode: MatmulMode,
        chunk_tokens: int | None,
        run: RegionRunner,
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[:2]
        computed = sums_and_gradients(
            hidden,
            weight,
            targets,
            options,
            matmul_mode,
            bias,
            chunk_tokens,
            wanted=wanted,
            run=run,
            weights_N=weights,
        )
        ctx.save_for_backward(computed.dhidden_NM, computed.dweight_VM, computed.dbias_V)
        ctx.weight_dtype = weight.dtype
        sums = as_scalars(computed.sums, hidden.dtype)
        ctx.mark_non_differentiable(sums[1])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dobjective: Tensor, _: Tensor):  # type: ignore[override]
        dhidden, dweight, dbias = ctx.saved_tensors
        # linear in dobjective: forward has computed the sum's gradients, only this factor is missing
        if dhidden is not None:
            dhidden = (dhidden * dobjective).to(dhidden.dtype)
        if dweight is not None:
            dweight = scaled(dweight, dobjective, ctx.weight_dtype)
        if dbias is not None:
            dbias = (dbias * dobjective).to(ctx.weight_dtype)
        return dhidden, dweight, dbias, None, None, None, None, None, None


def scaled(total_VM: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return total · factor in ``dtype``, without a copy in the total's own dtype."""
    out_VM = torch.empty_like(total_VM, dtype=dtype)
    for tile in row_tiles(len(total_VM), max(1, TILE_ELEMENTS // total_VM.shape[1])):
        out_VM[tile] = total_VM[tile] * factor
    return out_VM


class SumsAndGradients(NamedTuple):
    """Loss sums and gradients from one pass."""

    sums: Tensor
    """Σ objective and Σ negative log-likelihood, [2] in float64."""
    dhidden_NM: Tensor | None
    """Objective's gradient, in the hidden states' dtype."""
    dweight_VM: Tensor | None
    """Objective's gradient, a partial sum in ``accumulate_dtype``."""
    dbias_V: Tensor | None
    """Like ``dweight_VM``; computed if the weight's gradient is."""
    softmax_2N: Tensor | None = None
    """On request, each token's largest logit, and the sum of all exponentials after subtracting it."""


def sums_and_gradients(
    hidden_NM: Tensor,
    weight_VM: Tensor,
    targets_N: Tensor,
    options: LossOptions,
    matmul_mode: MatmulMode,
    bias_V: Tensor | None = None,
    chunk_tokens: int | None = None,
    wanted: tuple[bool, ...] = (False, False),
    run: RegionRunner = call_function,
    dweight_VM: Tensor | None = None,
    dbias_V: Tensor | None = None,
    *,
    weights_N: Tensor | None = None,
    with_softmax: bool = False,
) -> SumsAndGradients:
    """Compute ``loss_sums`` and, if ``wanted``, the objective's gradients, without backward's factor.

    ``dweight_VM`` and ``dbias_V`` hold gradients from previous tokens and are accumulated in place. ``with_softmax``
    keeps the values that ``gradient_of_rows`` needs.
    """
    partial = accumulate_dtype(hidden_NM.dtype)
    # float64: otherwise rounding in a sum over a million tokens would depend on the chunking
    sums = hidden_NM.new_zeros(2, dtype=torch.float64)
    dhidden_NM: Tensor | None = None
    if wanted[0]:
        dhidden_NM = torch.empty_like(hidden_NM)
    softmax_2N: Tensor | None = None
    if with_softmax:
        softmax_2N = hidden_NM.new_empty(2, len(hidden_NM), dtype=partial)
    product_VM: Tensor | None = None
    if wanted[1] and bias_V is not None and dbias_V is None:
        dbias_V = torch.zeros_like(bias_V, dtype=partial)
    for chunk, hidden_nM, logits_nV in _chunks(hidden_NM, weight_VM, bias_V, matmul_mode, chunk_tokens):
        losses_4n, dlogits_nV = losses_(
            logits_nV, targets_N[chunk], options, _part(weights_N, chunk), with_gradient=any(wanted), run=run
        )
        sums += losses_4n[:2].sum(1, dtype=torch.float64)
        if softmax_2N is not None:
            softmax_2N[:, chunk] = losses_4n[2:]
        if dhidden_NM is not None:
            dhidden_NM[chunk] = _times_weight(dlogits_nV, weight_VM)
        if wanted[1] and dbias_V is not None:
            dbias_V += dlogits_nV.sum(0, dtype=partial)
        if wanted[1]:
            dweight_VM, product_VM = _plus_gradient(dweight_VM, dlogits_nV, hidden_nM, product_VM)
        del dlogits_nV  # may be a compiled function's own tensor: free it before allocating the next chunk's
    if wanted[1] and dweight_VM is None:  # no local tokens
        dweight_VM = torch.zeros_like(weight_VM, dtype=partial)
    return SumsAndGradients(sums, dhidden_NM, dweight_VM, dbias_V, softmax_2N)


def gradient_of_rows(
    hidden_NM: Tensor,
    weight_vM: Tensor,
    targets_N: Tensor,
    softmax_2N: Tensor,
    rows: slice,
    vocab_size: int,
    options: LossOptions,
    matmul_mode: MatmulMode,
    dweight_vM: Tensor | None = None,
    weights_N: Tensor | None = None,
) -> Tensor:
    """Return the gradient for ``weight_vM``, the weight's ``rows`` v, as ``sums_and_gradients`` would.

    Recompute their logits, with ``softmax_2N`` from the first pass, and accumulate into ``dweight_vM`` in place.
    """
    product_vM: Tensor | None = None
    for chunk, hidden_nM, logits_nv in _chunks(hidden_NM, weight_vM, None, matmul_mode, None):
        weights_n = _part(weights_N, chunk)
        _gradient_of_logits_(
            logits_nv, targets_N[chunk], weights_n, softmax_2N[:, chunk], rows.start, vocab_size, options
        )
        dweight_vM, product_vM = _plus_gradient(dweight_vM, logits_nv, hidden_nM, product_vM)
    if dweight_vM is None:  # no local tokens
        dweight_vM = torch.zeros_like(weight_vM, dtype=accumulate_dtype(hidden_NM.dtype))
    return dweight_vM


def _plus_gradient(
    total_VM: Tensor | None, dlogits_nV: Tensor, hidden_nM: Tensor, product_VM: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Add a chunk's contribution to the weight's gradient; return it with a buffer for the next chunk's matmul."""
    partial = accumulate_dtype(dlogits_nV.dtype)
    if dlogits_nV.dtype == partial:
        return _plus_product(total_VM, dlogits_nV.T, hidden_nM), None
    if not on_cpu(dlogits_nV):
        if total_VM is None:
            total_VM = hidden_nM.new_zeros(dlogits_nV.shape[1], hidden_nM.shape[1], dtype=partial)
        add_upcast_matmul_(total_VM, dlogits_nV.T, hidden_nM)
        return total_VM, None
    product_VM = torch.mm(dlogits_nV.T, hidden_nM, out=product_VM)
    return _plus(total_VM, product_VM, partial), product_VM


def as_scalars(sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return both sums as scalars in the accumulation dtype for ``dtype`` hidden states."""
    objective, nll = sums.to(accumulate_dtype(dtype)).unbind()
    # an autograd function's two outputs must not be views of one tensor
    return objective.clone(), nll.clone()


def _chunks(
    hidden_NM: Tensor, weight_VM: Tensor, bias_V: Tensor | None, matmul_mode: MatmulMode, chunk_tokens: int | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each chunk's token range, hidden states, and logits before scale and cap, in the matmul dtype."""
    V, M = weight_VM.shape
    size = chunk_tokens or tokens_of_chunk(V, M, weight_VM.device.type)
    dtype = hidden_NM.dtype
    if multiplies_in_float32(hidden_NM, matmul_mode):
        dtype = torch.float32
    # All chunks reuse one logits buffer: separate buffers would be allocated from the system again for each chunk.
    memory = _memory(weight_VM, min(size, len(hidden_NM)), dtype)
    for chunk in row_tiles(len(hidden_NM), size):
        hidden_nM = hidden_NM[chunk].to(dtype)
        logits_nV = memory[: len(hidden_nM)]
        for tile, weight_vM in _weight_tiles(weight_VM, dtype):
            if bias_V is None:
                torch.mm(hidden_nM, weight_vM.T, out=logits_nV[:, tile])
            else:
                torch.addmm(bias_V[tile].to(dtype), hidden_nM, weight_vM.T, out=logits_nV[:, tile])
        yield chunk, hidden_nM, logits_nV


def _times_weight(dlogits_nV: Tensor, weight_VM: Tensor) -> Tensor:
    dhidden_nM = dlogits_nV.new_zeros(len(dlogits_nV), weight_VM.shape[1])
    for tile, weight_vM in _weight_tiles(weight_VM, dlogits_nV.dtype):
        dhidden_nM.addmm_(dlogits_nV[:, tile], weight_vM)
    return dhidden_nM


def _weight_tiles(weight_VM: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the weight in the matmul dtype: all at once if it has that dtype, else in row tiles."""
    # tiles, because a full converted copy would need twice the weight's own memory
    if weight_VM.dtype == dtype:
        yield slice(0, len(weight_VM)), weight_VM
        return
    for tile in row_tiles(len(weight_VM), max(1, TILE_ELEMENTS // weight_VM.shape[1])):
        yield tile, weight_VM[tile].to(dtype)


def _memory(weight_VM: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Allocate uninitialized logits [tokens, V]."""
    # On a CPU, pad rows that fill whole pages: otherwise a column maps to one cache set, and matmuls take 25 % longer.
    vocab_size, padding = len(weight_VM), 0
    if on_cpu(weight_VM) and vocab_size * dtype.itemsize % 4096 == 0:
        padding = 64
    return weight_VM.new_empty(tokens, vocab_size + padding, dtype=dtype)[:, :vocab_size]


def tokens_of_chunk(vocab_size: int, width: int, device_type: str) -> int:
    """Return the default chunk size in tokens, a multiple of 64.

    On a CPU it has 2^24 logits, or a quarter as many elements as the weight if that is more; on an accelerator 2^29
    logits, but at least 1,024 and at most 8,192 tokens.
    """
    if device_type == "cpu":
        return max(_CHUNK_ELEMENTS // vocab_size, width // 4, 64) // 64 * 64
    return min(max(_CHUNK_ELEMENTS_OF_GPU // vocab_size, 1024), 8192) // 64 * 64


def _rows_of_block(whole: Tensor) -> int:
    """Return the rows per block, limited by a CPU's cache or an accelerator's memory."""
    if not on_cpu(whole):
        return max(1, _BLOCK_ELEMENTS_OF_GPU // whole.shape[1])
    return max(1, _BLOCK_ELEMENTS * torch.get_num_threads() // whole.shape[1])


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a · b, accumulated in place if there is a total."""
    return a @ b if total is None else total.addmm_(a, b)


def _plus(total: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    """Add a partial sum with another dtype to the total in place; without a total, return it in ``dtype``."""
    if total is None:
        return part.to(dtype)
    # PyTorch converts a full operand before adding; block by block, the converted copy stays in the cache
    for block in row_tiles(len(total), _rows_of_block(total)):
        total[block] += part[block]
    return total


def _part(weights_N: Tensor | None, tokens: slice) -> Tensor | None:
    if weights_N is None:
        return None
    return weights_N[tokens]


def losses_(
    logits_nV: Tensor,
    targets_n: Tensor,
    options: LossOptions,
    weights_n: Tensor | None = None,
    *,
    with_gradient: bool,
    run: RegionRunner = call_function,
) -> tuple[Tensor, Tensor]:
    """Return each token's losses, and the gradient for the objectives' sum.

    Losses are [4, n] in the accumulation dtype: objective, negative log-likelihood, and the two rows for
    ``SumsAndGradients.softmax_2N``. The gradient is [n, V] in the logits' dtype, undefined without ``with_gradient``.
    Overwrites the logits; the gradient may share their memory.
    """
    # On a CPU the blocks below stay in cache, which beats any compiled loop over a vocabulary.
    if run is not call_function and not on_cpu(logits_nV):
        return run(whole_losses, logits_nV, targets_n, options, with_gradient, weights_n, tokens_dim=0)
    # exponentials over the vocabulary are summed in float32 for any matmul dtype
    partial = accumulate_dtype(logits_nV.dtype)
    losses_4n = logits_nV.new_empty(4, len(logits_nV), dtype=partial)
    for block in row_tiles(len(logits_nV), _rows_of_block(logits_nV)):
        block_rV = logits_nV[block].to(partial)  # the logits themselves if they have this dtype
        found = _block_losses_(block_rV, targets_n[block], options, with_gradient, _part(weights_n, block))
        for row, values_r in enumerate(found):
            losses_4n[row, block] = values_r
        if with_gradient and partial != logits_nV.dtype:
            logits_nV[block] = block_rV
    return losses_4n, logits_nV


def _gradient_of_logits_(
    logits_nv: Tensor,
    targets_n: Tensor,
    weights_n: Tensor | None,
    softmax_2n: Tensor,
    first: int,
    vocab_size: int,
    options: LossOptions,
) -> None:
    """Replace the logits for the vocabulary shard starting at ``first`` by their gradient."""
    partial = accumulate_dtype(logits_nv.dtype)
    for block in row_tiles(len(logits_nv), _rows_of_block(logits_nv)):
        block_rv = logits_nv[block].to(partial)
        targets_r, (peak_r1, sum_exp_r1) = targets_n[block], softmax_2n[:, block].unsqueeze(2).unbind()
        is_valid_r1 = (targets_r != IGNORED_TARGET).unsqueeze(1)
        slope_rv = _scale_and_cap_(block_rv, options, True)
        exp_rv = block_rv.sub_(peak_r1).exp_()
        chosen_r1 = targets_r.unsqueeze(1) - first
        is_local_r1 = is_valid_r1 & (chosen_r1 >= 0) & (chosen_r1 < exp_rv.shape[1])
        target = (chosen_r1, is_local_r1)
        factor_r1 = _factor(is_valid_r1, _part(weights_n, block), options, exp_rv.dtype)
        _gradient_of_exponentials_(exp_rv, (peak_r1, sum_exp_r1), factor_r1, target, slope_rv, options, vocab_size)
        if block_rv.dtype != logits_nv.dtype:
            logits_nv[block] = block_rv


def whole_losses(
    logits_nV: Tensor,
    targets_n: Tensor,
    options: LossOptions,
    with_gradient: bool,
    weights_n: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``losses_`` without row blocks and without writing to the logits.

    For use under a compiler, which fuses instead. Without ``with_gradient`` the second result is empty.
    """
    upcast_nV = logits_nV.to(accumulate_dtype(logits_nV.dtype), copy=True)
    losses = torch.stack(_block_losses_(upcast_nV, targets_n, options, with_gradient, weights_n))
    if not with_gradient:
        return losses, logits_nV.new_empty(0)
    return losses, upcast_nV.to(logits_nV.dtype)


def _block_losses_(
    logits_rV: Tensor, targets_r: Tensor, options: LossOptions, with_gradient: bool, weights_r: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute one row block's losses, largest logits and exponential sums, and, in place, its gradient."""
    # With p the softmax and f the derivative of scale and cap, a logit's gradient is f · ((1 + 2 · z_loss · lse) · p −
    # label_smoothing / V − (1 − label_smoothing) · [it is the target's]).
    smoothing, z_loss = options.label_smoothing, options.z_loss
    is_valid_r1 = (targets_r != IGNORED_TARGET).unsqueeze(1)
    chosen_r1 = targets_r.unsqueeze(1).where(is_valid_r1, 0)
    slope_rV = _scale_and_cap_(logits_rV, options, with_gradient)

    # scores are logits less the row's largest: no exponential exceeds 1, and their sum is at least 1
    peak_r1 = logits_rV.amax(1, keepdim=True)
    score_rV = logits_rV.sub_(peak_r1)
    score_r1 = score_rV.gather(1, chosen_r1)
    smooth_score_r1 = score_r1
    if smoothing:
        smooth_score_r1 = score_r1.lerp(score_rV.mean(1, keepdim=True), smoothing)
    exp_rV = score_rV.exp_()
    sum_exp_r1 = exp_rV.sum(1, keepdim=True)
    log_sum_exp_r1 = sum_exp_r1.log()
    lse_r1 = peak_r1 + log_sum_exp_r1
    # −log p = lse − logit = log_mass − score: the peak cancels, and is never rounded into the loss
    objective_r1 = log_sum_exp_r1 - smooth_score_r1
    if z_loss:
        objective_r1 += z_loss * lse_r1.square()
    if weights_r is not None:
        objective_r1 = objective_r1 * weights_r.unsqueeze(1)

    if with_gradient:
        factor_r1, target = _factor(is_valid_r1, weights_r, options, exp_rV.dtype), (chosen_r1, is_valid_r1)
        _gradient_of_exponentials_(exp_rV, (peak_r1, sum_exp_r1), factor_r1, target, slope_rV, options, exp_rV.shape[1])

    objective_r, nll_r = (x.where(is_valid_r1, 0).squeeze(1) for x in (objective_r1, log_sum_exp_r1 - score_r1))
    return objective_r, nll_r, peak_r1.squeeze(1), sum_exp_r1.squeeze(1)


def _factor(is_valid_r1: Tensor, weights_r: Tensor | None, options: LossOptions, dtype: torch.dtype) -> Tensor:
    """Return the factor on each token's gradient of the scaled logits."""
    factor_r1 = is_valid_r1.to(dtype) * options.logit_scale
    if weights_r is None:
        return factor_r1
    return factor_r1 * weights_r.unsqueeze(1).to(dtype)


def _gradient_of_exponentials_(
    exp_rV: Tensor,
    softmax: tuple[Tensor, Tensor],
    factor_r1: Tensor,
    target: tuple[Tensor, Tensor],
    slope_rV: Tensor | None,
    options: LossOptions,
    vocab_size: int,
) -> None:
    """Replace exponentials for some of a block's logits by their gradient.

    ``softmax`` holds the largest logits and the exponential sums, ``target`` the target columns and an in-range mask.
    """
    smoothing, (peak_r1, sum_exp_r1), (chosen_r1, is_local_r1) = options.label_smoothing, softmax, target
    lse_r1 = peak_r1 + sum_exp_r1.log()
    dlogits_rV = exp_rV.mul_((1 + 2 * options.z_loss * lse_r1) / sum_exp_r1 * factor_r1)
    if smoothing:
        dlogits_rV.sub_(factor_r1 * (smoothing / vocab_size))
    dlogits_rV.scatter_add_(1, chosen_r1.where(is_local_r1, 0), factor_r1 * (smoothing - 1) * is_local_r1)
    if slope_rV is not None:
        dlogits_rV.mul_(slope_rV)


def _scale_and_cap_(logits_rV: Tensor, options: LossOptions, with_gradient: bool) -> Tensor | None:
    """Apply scale and cap in place; return the derivative of cap · tanh(x / cap) if a cap is set and it is needed."""
    if not options.softcap:
        if options.logit_scale != 1:
            logits_rV.mul_(options.logit_scale)
        return None
    tanh_rV = logits_rV.mul_(options.logit_scale / options.softcap).tanh_()
    slope_rV: Tensor | None = None
    if with_gradient:
        slope_rV = tanh_rV.square().neg_().add_(1)  # before the multiplication below overwrites the tanh
    tanh_rV.mul_(options.softcap)
    return slope_rV
