"""Step parity: a model on the GPU compared with float64 on the CPU: float32, bfloat16 by each kernel, compiled.

Four layers, 2,048 tokens in three documents, grouped keys. Compares the loss and gradients, and reports the model's
worst parameter. In float32 two correct programs differ by the order of their sums, 1e-6 to 1e-5; in bfloat16 four
layers round some twenty times, 3e-3 to 2e-2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from benchmarks.first_gpu.checks import Job, Sheet, run_step
from benchmarks.first_gpu.models import loss_and_gradients, packed_row, small_config, worst_part
from longctx.kernels.attention.kernel_interface import KernelRequest
from longctx.kernels.attention.kernel_selection import KERNELS
from longctx.kernels.regions import missing_for_compiling
from longctx.model.training_pass import Execution

_KERNELS = ("flash3", "flash2", "flash4", "cuda_flash", "cudnn")
_BOUNDS = {torch.float32: (1e-6, 1e-4), torch.bfloat16: (2e-3, 4e-2)}
"""Limits on the loss's error and on the worst parameter's gradient error."""


def run(job: Job, sheet: Sheet) -> None:
    """Compare each variant with its own reference, whose weights are rounded in the same way."""
    head_dim = job.pick(128, 16)
    config = small_config(width=job.pick(512, 64), layers=4, head_dim=head_dim)
    batch = packed_row(job.pick([1500, 37, 511], [150, 7, 99]), config.vocab_size)
    exact = {
        dtype: loss_and_gradients(config, batch, device="cpu", dtype=torch.float64, rounded=dtype) for dtype in _BOUNDS
    }
    for name, dtype, kernel, compiler in ways(job, sheet, head_dim):
        with sheet.attempt(name):
            execution = Execution(compiler=compiler)
            got = loss_and_gradients(
                config, batch, device=job.device, dtype=dtype, kernel=kernel, execution=execution
            )  # fmt: skip
            of_loss, of_gradient = _BOUNDS[dtype]
            want = exact[dtype]
            sheet.add(f"{name}, loss", abs(got[0] / want[0] - 1), bound=of_loss)
            error, part = worst_part(got[1], want[1])
            sheet.add(f"{name}, gradient", error, bound=of_gradient, note=part)


def ways(job: Job, sheet: Sheet, head_dim: int) -> list[tuple[str, torch.dtype, str, str | None]]:
    """Return name, dtype, kernel and compiler for each variant available on this machine."""
    found: list[tuple[str, torch.dtype, str, str | None]] = [("fp32 blockwise", torch.float32, "blockwise", None)]
    for kernel in job.pick(_KERNELS, ("cpu_flash", "blockwise")):
        refusal = KERNELS[kernel].supports(KernelRequest(job.device, torch.bfloat16, head_dim, 8, 2))
        if refusal is None:
            found.append((f"bf16 {kernel}", torch.bfloat16, kernel, None))
        else:
            sheet.add(f"bf16 {kernel}", skipped=refusal)
    missing = missing_for_compiling(job.device)
    if missing is None:
        # A dry run traces graphs without compiling them, which takes a C++ compiler a minute.
        compiler = job.pick("inductor", "aot_eager")
        found.append(("bf16 compiled", torch.bfloat16, "auto", compiler))
    else:
        sheet.add("compiled", skipped=missing)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
