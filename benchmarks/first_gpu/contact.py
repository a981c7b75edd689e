"""Step contact: every GPU-specific branch once, against float64 on the CPU.

Each branch has its own ``attempt``: an exception stops no other. Inputs are rounded to their dtype before the reference
reads them, so errors come from the computation alone. Bounds: float32 sums over some thousand terms are off by a few
units of 1e-7, and 1e-5 is far above them and far below a wrong term; one rounding to bfloat16 is 1.7e-3 of the norm
(2^-9 · 1/√3 · up to 1.5), and gradients pass through four to six of them.

Axes: N tokens, M width, V vocabulary, E experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.first_gpu.checks import Job, Sheet, run_step
from benchmarks.first_gpu.models import loss_and_gradients, packed_row, relative, small_config, worst_part
from longctx.batch import IGNORED_TARGET, PackedDocuments
from longctx.compact_batch import CompactBatch, DocumentEnd
from longctx.kernels.attention.kernel_interface import AttentionKernel, KernelRequest, ScoreRules
from longctx.kernels.attention.kernel_selection import KERNELS
from longctx.kernels.attention.reference import ReferenceKernel
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from longctx.kernels.cross_entropy import loss_sums
from longctx.kernels.grouped import grouped_outer, grouped_rows, sum_by_expert
from longctx.kernels.loss_options import LossOptions
from longctx.kernels.merge import merge_, merge_eager_
from longctx.kernels.regions import missing_for_compiling, run_with
from longctx.kernels.rms_norm import rms_norm
from longctx.model.async_copies import AsyncCopies, HostTensor, InFlightTensors
from longctx.model.training_pass import Execution
from parallel.comm.messages.message_checksum import bit_sum, grid_sum

BFLOAT16, FLOAT32 = 1.5e-2, 1e-5
_KERNELS = ("flash3", "flash2", "flash4", "cuda_flash", "cudnn")
_CPU_KERNELS = ("cpu_flash", "blockwise")


def run(job: Job, sheet: Sheet) -> None:
    """Try the selected branches, or all but FlexAttention, which compiles and has its own step."""
    for name, branch in BRANCHES.items():
        if name in (job.which or BRANCHES.keys() - {"flex"}):
            torch.manual_seed(0)
            with sheet.attempt(name):
                branch(job, sheet)


# --- attention ----------------------------------------------------------------------------------------------


def kernels(job: Job, sheet: Sheet) -> None:
    """Check every flash adapter on a packed row with grouped keys."""
    for name in job.pick(_KERNELS, _CPU_KERNELS):
        with sheet.attempt(name):
            check_kernel(job, sheet, name)


def flex(job: Job, sheet: Sheet) -> None:
    """Check FlexAttention, which compiles, in bfloat16 and in float32; in a dry run a CPU kernel instead."""
    for dtype in (torch.bfloat16, torch.float32):
        check_kernel(job, sheet, job.pick("flex", "blockwise"), dtype)


def check_kernel(job: Job, sheet: Sheet, name: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compare output, log-sum-exp and gradients of documents of 1, 299 … tokens with float64."""
    H, K, D = 8, 2, job.pick(128, 16)
    kernel, scores = KERNELS[name], ScoreRules(scale=D**-0.5)
    refusal = kernel.supports(KernelRequest(job.device, dtype, D, H, K))
    if refusal is not None:
        sheet.add(f"{name} {_short(dtype)}", skipped=refusal)
        return
    bounds = (0, 1, 300, 429, job.pick(1100, 500))
    slices = slice_table(AttentionSlice(a, b, a, b, 0) for a, b in pairwise(bounds))
    inputs = [torch.randn(1, bounds[-1], heads, D).to(dtype) for heads in (H, K, K, H)]
    got = _attention(kernel, [x.to(job.device) for x in inputs], slices, scores)
    want = _attention(ReferenceKernel(), [x.double() for x in inputs], slices, scores)
    bound = BFLOAT16 if dtype == torch.bfloat16 else FLOAT32
    for part, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        # A log-sum-exp is about 6, and float32 arithmetic computes it from rounded scores.
        sheet.add(f"{name} {_short(dtype)} {part}", relative(a, b), bound=1e-4 if part == "lse" else bound)


def _attention(kernel: AttentionKernel, inputs: list[Tensor], slices: Tensor, scores: ScoreRules) -> list[Tensor]:
    q, k, v, dout = inputs
    out, lse = kernel.forward(q, k, v, slices, scores=scores)
    gradients = kernel.backward(dout, q, k, v, out.to(q.dtype), lse, slices, scores=scores)
    return [out, lse, *gradients[:3]]


def merges(job: Job, sheet: Sheet) -> None:
    """Check the merge of two softmax results, with rows without keys in one, the other and both."""
    out, more = (torch.randn(300, 4, 128) for _ in range(2))
    lse, more_lse = (torch.randn(300, 4, dtype=torch.float64) for _ in range(2))
    for rows, empty in ((slice(0, 9), [lse]), (slice(9, 20), [more_lse]), (slice(20, 30), [lse, more_lse])):
        for one in empty:
            one[rows] = -torch.inf
    out[lse.isinf()], more[more_lse.isinf()] = 0, 0
    got, got_lse = (x.to(job.device, copy=True) for x in (out, lse))
    merge_(got, got_lse, more.to(job.device), more_lse.to(job.device))
    want, want_lse = out.double(), lse.clone()
    merge_eager_(want, want_lse, more.double(), more_lse)
    sheet.add("merge out", relative(got, want), bound=FLOAT32)
    # For rows without a key it is −inf: their exponentials are 0.
    sheet.add("merge lse", relative(got_lse.exp(), want_lse.exp()), bound=FLOAT32)


# --- the loss -----------------------------------------------------------------------------------------------


def losses(job: Job, sheet: Sheet) -> None:
    """Check the head and its loss: full vocabulary pages and others, a short last token chunk, compiled and not."""
    ways = {"eager": None}
    missing = missing_for_compiling(job.device)
    if missing is None:
        # Pass the function that would be compiled; on a CPU no backend makes the loss faster, and this one needs none.
        ways["compiled"] = job.pick("inductor", "aot_eager")
    else:
        sheet.add("loss compiled", skipped=missing)
    for way, compiler in ways.items():
        for V in (4096, 5000):
            for dtype in (torch.bfloat16, torch.float32):
                # Each compilation takes seconds.
                if compiler is not None and dtype == torch.float32:
                    continue
                name = f"loss {way} V={V} {_short(dtype)}"
                with sheet.attempt(name):
                    check_loss(job, sheet, name, V, dtype, compiler)


def check_loss(job: Job, sheet: Sheet, name: str, V: int, dtype: torch.dtype, compiler: str | None) -> None:
    """Compare the loss and both gradients with float64 on the same values: 300 tokens in token chunks of 128."""
    N, M, options = 300, 256, LossOptions(z_loss=1e-3)
    hidden, weight = torch.randn(N, M).to(dtype), (torch.randn(V, M) / M**0.5).to(dtype)
    targets = torch.randint(V, (N,))
    targets[7] = IGNORED_TARGET
    found = []
    for place, wide, run_of in ((job.device, dtype, run_with(compiler)), ("cpu", torch.float64, run_with(None))):
        h, w = leaf(hidden, place, wide), leaf(weight, place, wide)
        total, nll = loss_sums(h, w, targets.to(place), options=options, chunk_tokens=128, run=run_of)
        total.backward()
        found.append([total, nll, h.grad, w.grad])
    bounds = (1e-3, 1e-3, BFLOAT16, BFLOAT16) if dtype == torch.bfloat16 else (FLOAT32,) * 4
    for part, got, want, bound in zip(("objective", "nll", "dhidden", "dweight"), *found, bounds, strict=True):
        sheet.add(f"{name} {part}", relative(got, want), bound=bound)


# --- the rest of a layer ------------------------------------------------------------------------------------


def norms(job: Job, sheet: Sheet) -> None:
    """Check RMSNorm, forward and backward."""
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, dy = torch.randn(500, 512), 1 + torch.rand(512), torch.randn(500, 512)
        leaves = [t.to(dtype) for t in (x, weight, dy)]
        found = []
        for place, wide in ((job.device, dtype), ("cpu", torch.float64)):
            a, w = (leaf(t, place, wide) for t in leaves[:2])
            y = rms_norm(a, w, 1e-5) if wide == dtype else functional.rms_norm(a, w.shape, w, 1e-5)
            y.backward(leaves[2].to(place, wide))
            found.append([y, a.grad, w.grad])
        for part, got, want in zip(("y", "dx", "dweight"), *found, strict=True):
            bound = BFLOAT16 if dtype == torch.bfloat16 else FLOAT32
            sheet.add(f"rms_norm {_short(dtype)} {part}", relative(got, want), bound=bound)


def experts(job: Job, sheet: Sheet) -> None:
    """Check grouped matmuls with an unused expert, first, in the middle and last."""
    E, width_in, width_out = 6, 64, 128
    ends = torch.tensor([0, 100, 100, 101, 230, 230], dtype=torch.int32)
    x, dy = (torch.randn(230, width).bfloat16() for width in (width_in, width_out))
    weight = (torch.randn(E, width_in, width_out) / width_in**0.5).bfloat16()
    starts = [0, *ends.tolist()]
    groups = [slice(a, b) for a, b in pairwise(starts)]
    want_rows = torch.cat([x[g].double() @ w.double() for g, w in zip(groups, weight, strict=True)])
    want_outer = torch.stack([dy[g].double().T @ x[g].double() for g in groups])
    there = [t.to(job.device) for t in (x, weight, dy, ends)]
    # Freed memory that is reused contains no zeros, so an unwritten group shows.
    torch.full((E, width_out, width_in), torch.nan, device=job.device, dtype=torch.bfloat16)
    rows = grouped_rows(there[0], there[1], there[3], matmul_mode="native")
    outer = grouped_outer(there[2], there[0], there[3], matmul_mode="native")
    sums = sum_by_expert(there[2], there[3])
    sheet.add("grouped rows", relative(rows, want_rows), bound=BFLOAT16)
    sheet.add("grouped outer", relative(outer, want_outer), bound=BFLOAT16)
    sheet.add("grouped outer, empty", float(outer[[0, 2, 5]].abs().max()), bound=0.0)
    want_sums = torch.stack([dy[g].double().sum(0) for g in groups])
    sheet.add("sums by expert", relative(sums, want_sums), bound=FLOAT32)


def wide_sums(job: Job, sheet: Sheet) -> None:
    """Check a weight's gradient over 32,768 tokens: bfloat16 partial sums would show."""
    N, M, few = job.pick(32_768, 512), job.pick(4096, 64), job.pick(64, 64)
    x, dy = (torch.randn(N, M, device=job.device).bfloat16() for _ in range(2))
    want = dy[:, :few].cpu().double().T @ x.cpu().double()
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
            error = relative((dy.T @ x)[:few], want)
            # A single rounding to bfloat16.
            sheet.add(f"dweight, reduced precision {'on' if allowed else 'off'}", error,
                      bound=None if allowed else 2.5e-3)  # fmt: skip
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


# --- around the model ---------------------------------------------------------------------------------------


def bit_sums(job: Job, sheet: Sheet) -> None:
    """Check the checksum over all bits that ranks compare, for sizes that no word divides."""
    for num_bytes in (1, 29, 40_003, 1 << 22):
        x = torch.randint(256, (num_bytes,), dtype=torch.uint8)
        got, want = bit_sum([x.to(job.device)]), grid_sum(x)
        if job.dry:
            got = grid_sum(x.clone())
        sheet.add(f"bit_sum of {num_bytes}", float(int(got) != int(want)), bound=0.0)


def unpacked(job: Job, sheet: Sheet) -> None:
    """Check a micro-batch built on the device from its compact form: a cut document, a complete one, padding; strided
    spans.
    """
    documents = PackedDocuments((0, 9, 10, 40))
    ends = torch.tensor([DocumentEnd.CUT, DocumentEnd.COMPLETE, DocumentEnd.PADDING], dtype=torch.uint8)
    for spans in ([[0, 40, 1, 0]], [[0, 7, 1, 0], [7, 3, 1, 8]], [[1, 10, 3, 0]]):
        tokens = sum(span[1] for span in spans)
        for dtype, most in ((torch.uint16, 65_535), (torch.int32, 200_000)):
            compact = CompactBatch(
                ids=torch.randint(most + 1, (64,)).to(dtype), spans=torch.tensor(spans), ends=ends,
                bounds=documents.cu_seqlens, documents=documents, shape=(1, tokens), num_targets=tokens,
                num_tokens=tokens,
            )  # fmt: skip
            source = compact if job.dry else compact.pinned()
            got, want = source.unpack_by_lookup(job.device), compact.copied()
            wrong = [name for name in want if not torch.equal(got[name].cpu(), want[name])]
            sheet.add(f"unpack {len(spans)} spans {dtype}", float(len(wrong)), bound=0.0, note=", ".join(wrong))


def copies(job: Job, sheet: Sheet) -> None:
    """Check copies to and from the host, one stream per direction, while their data is computed on."""
    device, wrong = torch.device(job.device), 0
    moving = AsyncCopies(device)
    leaving, tokens = InFlightTensors(moving), job.pick(1 << 24, 1 << 12)
    for number in range(8):
        x = torch.full((1, tokens), float(number), device=device) * 2
        host = HostTensor(moving, x.shape, x.dtype)
        leaving.hold(x, host.write(slice(0, tokens), x))
        wrong += int((host.whole().wait() != 2 * number).sum())
    sheet.add("copies", float(wrong), unit="values wrong", bound=0.0)


def stores(job: Job, sheet: Sheet) -> None:
    """Check a decoder that keeps its layers' activations on the device, the host and a disk, by whole layers and by
    chunks.
    """
    config = small_config(width=job.pick(256, 64), layers=3, head_dim=job.pick(64, 16), vocab_size=512)
    batch = packed_row(job.pick([700, 1, 323], [100, 1, 59]), config.vocab_size)
    want = loss_and_gradients(config, batch, device="cpu", dtype=torch.float64, rounded=torch.bfloat16)
    chunk = batch.tokens.shape[1] // 4
    ways = {
        "host": Execution(store="host"),
        "host, attention": Execution(keep="attention", store="host"),
        "chunks, device": Execution(keep="attention", chunk_tokens=chunk, head_groups=2),
        "chunks, host": Execution(keep="attention", store="host", chunk_tokens=chunk, head_groups=2),
        "chunks, disk": Execution(keep="attention", store="disk", store_path=str(job.scratch), chunk_tokens=chunk),
    }
    for way, execution in ways.items():
        with sheet.attempt(f"store {way}"):
            got = loss_and_gradients(config, batch, device=job.device, dtype=torch.bfloat16, execution=execution)
            error, part = worst_part(got[1], want[1])
            # Three layers of bfloat16: some ten roundings of 2e-3 each.
            sheet.add(f"store {way}", error, bound=4e-2, note=part)


def adamw(job: Job, sheet: Sheet) -> None:
    """Compare three updates by the fused optimizer with float64."""
    start, gradients = torch.randn(5000), [torch.randn(5000) for _ in range(3)]
    found = []
    for place, dtype, fused in ((job.device, torch.float32, True), ("cpu", torch.float64, False)):
        p = leaf(start, place, dtype)
        optimizer = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
        for gradient in gradients:
            p.grad = gradient.to(place, dtype)
            optimizer.step()
        found.append(p.detach().double().cpu() - start.double())
    # Three updates of 1e-2 on values of 1: float32 holds the values to 6e-8, so the change to 4e-6.
    sheet.add("fused AdamW", relative(*found), bound=3e-5)


def leaf(x: Tensor, place: str, dtype: torch.dtype) -> Tensor:
    """Return a copy on any device that collects a gradient."""
    return x.to(place, dtype, copy=True).requires_grad_()


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


BRANCHES: dict[str, Callable[[Job, Sheet], Any]] = {
    "kernels": kernels,
    "merges": merges,
    "losses": losses,
    "norms": norms,
    "experts": experts,
    "wide_sums": wide_sums,
    "bit_sums": bit_sums,
    "unpacked": unpacked,
    "copies": copies,
    "stores": stores,
    "adamw": adamw,
    "flex": flex,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
