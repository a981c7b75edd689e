"""Step attention: each kernel's forward and backward at 8K, 32K and 128K tokens, as a fraction of the matmul rate.

bfloat16, causal, 32 query and 8 key heads of 128; four documents at 8K, otherwise one. FLOPs exclude masked pairs;
backward counts 2.5 times forward. ``sdpa`` is PyTorch's own call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from benchmarks import gpu
from benchmarks.first_gpu.checks import Job, Sheet, run_step
from benchmarks.gpu_attention import Setting, full_setting, measure_block, tiny_setting
from longctx.kernels.attention.slices import AttentionSlice, slice_table

_LENGTHS = {"8K": (1 << 13, 4), "32K": (1 << 15, 1), "128K": (1 << 17, 1)}
"""Tokens per document, and documents."""
_DRY_LENGTHS = {"8K": (64, 4), "32K": (96, 1), "128K": (128, 1)}
_DIRECTIONS = ("forward", "backward")


def run(job: Job, sheet: Sheet) -> None:
    """Measure length by length, so that a step that hits its time limit has all kernels for some lengths."""
    setting = job.pick(full_setting, lambda: tiny_setting("cpu"))()
    for length, (tokens, documents) in job.pick(_LENGTHS, _DRY_LENGTHS).items():
        # A call at 128K takes a second.
        setting = replace(setting, rounds=job.pick(1 if length == "128K" else 3, 1))
        for name, found in rates(setting, tokens, documents, sheet):
            for direction in _DIRECTIONS:
                add_rate(job, sheet, f"{name} {length} {direction}", found, direction)


def rates(setting: Setting, tokens: int, documents: int, sheet: Sheet) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Return the rate of each kernel available on this machine, and of PyTorch's call."""
    slices = slice_table(AttentionSlice(n * tokens, (n + 1) * tokens, n * tokens, (n + 1) * tokens, 0)
                         for n in range(documents))  # fmt: skip
    for name, kernel in setting.kernels(window=False).items():
        with sheet.attempt(f"{name} {tokens}"):
            yield name, measure_block(setting, kernel, slices)
    with sheet.attempt(f"sdpa {tokens}"):
        yield "sdpa", measure_sdpa(setting, tokens, documents)


def measure_sdpa(setting: Setting, tokens: int, documents: int) -> dict[str, float | None]:
    """Return TFLOP/s for ``scaled_dot_product_attention``, with documents as batch rows."""
    q, k, v, dout = (x.unflatten(1, (documents, tokens)).squeeze(0).transpose(1, 2)
                     for x in setting.tensors(documents * tokens))  # fmt: skip
    for x in (q, k, v):
        x.requires_grad_()

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    out = forward()

    def backward() -> Any:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    pairs = documents * tokens * (tokens + 1) / 2
    work = 4.0 * setting.num_heads * setting.head_dim * pairs / 1e12
    return {
        "forward_tflops": work / gpu.seconds(forward, setting),
        "backward_tflops": 2.5 * work / gpu.seconds(backward, setting),
    }


def add_rate(job: Job, sheet: Sheet, name: str, found: dict[str, float | None], direction: str) -> None:
    """Add a rate, its fraction of the matmul rate if that was measured, and the call's allocation."""
    tflops, mib = found[f"{direction}_tflops"], found.get(f"{direction}_mib")
    matmul = job.figure_of("machine", "matmul") or job.figure_of("machine2", "matmul")
    notes = []
    if matmul and tflops:
        notes.append(f"{tflops / matmul:.2f} of the matrix rate")
    if mib is not None:
        notes.append(f"{mib / 1024:.2f} GiB")
    sheet.add(name, tflops, unit="TFLOP/s", note=", ".join(notes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
