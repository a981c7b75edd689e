"""What CUDA runs in one kernel: RMSNorm in PyTorch's, merging in ours, which Triton's interpreter runs here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import longctx.kernels.merge as merge
from longctx.kernels.rms_norm import _has_fused_kernel, rms_norm
from tests.longctx.kernels.broken_rows import check_broken_rows
from tests.rounding import UNIT

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fused(monkeypatch) -> list[tuple]:
    """The dtypes that PyTorch's fused norm is called with."""
    calls = []

    def record(x, shape, weight, eps):
        calls.append((x.dtype, weight.dtype, tuple(shape), eps))
        return torch.empty_like(x)

    monkeypatch.setattr(functional, "rms_norm", record)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_normalises_in_pytorchs_kernel_where_dtypes_and_factor_allow(fused, dtype):
    with FakeTensorMode():
        x, weight = torch.empty(2, 5, 64, device="cuda", dtype=dtype), torch.empty(64, device="cuda", dtype=dtype)
        assert rms_norm(x, weight, 1e-6).dtype == dtype
    assert fused == [(dtype, dtype, (64,), 1e-6)]


@pytest.mark.parametrize(
    ("device", "of_weight", "offset"),
    [("cuda", torch.bfloat16, True), ("cuda", torch.float32, False), ("cpu", torch.bfloat16, False)],
)
def test_other_norms_stay_with_the_definition(device, of_weight, offset):
    # On CUDA the kernel refuses two dtypes, and has no 1 + weight; a CPU has no such kernel.
    with FakeTensorMode():
        x, weight = torch.empty(5, 64, device=device, dtype=torch.bfloat16), torch.empty(64, device=device)
        assert not _has_fused_kernel(x, weight.to(of_weight), offset)


def test_pytorchs_norm_rounds_once_like_ours():
    x, weight = (torch.randn(64, 256) * 30).bfloat16(), torch.randn(256).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    for out in (functional.rms_norm(x, (256,), weight, 1e-6), rms_norm(x, weight, 1e-6)):
        assert out.dtype == torch.bfloat16
        # half a unit in the last place, and 1e-6 of what float32 makes of it
        assert ((out.double() - exact).abs() <= exact.abs() * (UNIT + 1e-6)).all()


def test_a_cpu_and_strided_tensors_merge_in_pytorchs_operators(monkeypatch):
    monkeypatch.setattr(merge, "has_triton", lambda: True)
    asked = []
    monkeypatch.setattr(torch.ops.longctx, "merge_", type("Op", (), {"default": lambda *x: asked.append(x)}))
    out, lse = torch.zeros(1, 6, 2, 8), torch.full((1, 6, 2), -torch.inf, dtype=torch.float64)
    block, block_lse = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2).double()
    merge.merge_(out, lse, block, block_lse)
    torch.testing.assert_close(out, block)
    assert asked == []
    with FakeTensorMode():
        parts = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in (out, lse, block, block_lse)]
        merge.merge_(*parts)
        assert len(asked) == 1
        assert not merge.are_contiguous(torch.empty(2, 6, 2, 8)[:, 1:3])
        assert merge.are_contiguous(torch.empty(1, 6, 2, 8)[:, 1:3])


def test_a_broken_log_sum_exp_stays_one():
    check_broken_rows(merge.merge_eager_)


def test_the_operator_is_that_kernel_on_cuda(monkeypatch):
    asked = []
    kernel = SimpleNamespace(launch_merge=lambda *tensors: asked.append(tensors))
    monkeypatch.setitem(sys.modules, "longctx.kernels.merge_triton", kernel)
    on_cuda = torch.library.get_kernel("longctx::merge_", "CUDA")
    parts = [torch.zeros(2) for _ in range(4)]
    on_cuda.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *parts)
    assert len(asked) == 1


# Where Triton is installed


def run_with_triton(python: str, *arguments: str, **environment: str) -> None:
    """Run the cases in a Python that has Triton: PyTorch's builds for CUDA bring it."""
    command = [python, "-W", "ignore", "-m", "tests.longctx.kernels.merge_cases", *arguments]
    variables = os.environ | environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=400, check=False)
    assert ended.stdout.endswith("as expected\n"), ended.stdout + ended.stderr


@pytest.mark.timeout(420)
def test_the_interpreted_kernel_merges_like_the_definition(cuda_python):
    run_with_triton(cuda_python, "values", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("capability", ["90", "100"])
def test_the_kernel_compiles_for_gpus_without_one(capability, tmp_path, cuda_python):
    run_with_triton(cuda_python, "compile", capability, TRITON_CACHE_DIR=str(tmp_path))
