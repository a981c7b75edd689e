"""CUDA kernels on fake CUDA tensors, in a process of their own."""

from __future__ import annotations

import pytest

from tests.cuda_builds import cuda_builds
from tests.fake_cuda.flash4 import CASES
from tests.fake_cuda.kernels import HEADS
from tests.fake_cuda.process import run_on_fake_cuda

FLASH4_PYTHON = "LONGCTX_FLASH4_PYTHON"
"""Names Pythons with flash-attn 4 and a PyTorch for CUDA."""


@pytest.mark.timeout(300)
def test_pytorchs_own_kernels_grouped_products_and_batches(cuda_python):
    said = run_on_fake_cuda("tests.fake_cuda.kernels", python=cuda_python).splitlines()
    ran = {kernel: sum(line.startswith(f"ran {kernel} ") for line in said) for kernel in ("cuda_flash", "cudnn")}
    assert ran == {"cuda_flash": 6 * 2 * len(HEADS), "cudnn": 5 * 2 * len(HEADS)}
    assert {line for line in said if line.startswith("refused")} == {"refused cudnn 256 256"}
    products = ["aten.zeros_like.default float32", *["longctx.add_upcast_matmul_.default float32"] * 3]
    assert [line for line in said if line.startswith("loss")] == [f"loss {line}" for line in products]
    assert [line for line in said if line.startswith("unpacked")] == [f"unpacked {n}" for n in (30, 30, 10, 10, 10, 10)]
    assert [line for line in said if line.startswith("grouped")] == [
        *(f"grouped {n}" for n in (0, 1, 3, 8, 129)),
        *(f"grouped torch.{dtype}" for dtype in ("float32", "bfloat16", "float64")),
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.parametrize("python", cuda_builds(FLASH4_PYTHON))
def test_flash4_compiles_our_calls(python, architecture, case):
    """Its own Python and its own compiler, up to the launch: arguments, shapes, head sizes and windows are its own."""
    said = run_on_fake_cuda(
        "tests.fake_cuda.flash4",
        architecture,
        case,
        python=python,
        timeout=500,
        FLASH_ATTENTION_ARCH=architecture,
        CUTE_DSL_ARCH=f"{architecture}a",
        FLASH_ATTENTION_NUM_SMS="132",
    )
    assert said.splitlines()[-1] == f"compiled {architecture} {case}"
