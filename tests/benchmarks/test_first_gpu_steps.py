"""The GPU programme's steps on a CPU: each branch of the first contact fails its check when its result is wrong."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.first_gpu import contact, models
from benchmarks.first_gpu.checks import Job, Sheet
from benchmarks.first_gpu.commands import Command, run
from benchmarks.first_gpu.ranks import run_ranks
from benchmarks.first_gpu.report import FAIL, OK, judge
from benchmarks.first_gpu.steps import PARTS
from longctx.kernels.attention.blockwise import BlockwiseKernel
from longctx.kernels.cross_entropy import loss_sums
from longctx.kernels.grouped import grouped_outer
from longctx.kernels.rms_norm import rms_norm
from longctx.model.activation_offload import AsyncCopies

CONTACT = next(step for step in PARTS["1"] if step.name == "contact")


def verdict_of(branch: str, folder: Path) -> str:
    sheet = Sheet(folder / "contact.json")
    contact.run(Job(device="cpu", scratch=folder, name="contact", which=(branch,)), sheet)
    return judge(CONTACT, sheet.checks, seconds=1.0).verdict


@pytest.mark.few(4)
@pytest.mark.parametrize("branch", sorted(contact.BRANCHES.keys() - {"losses", "stores"}))
def test_a_branch_is_right_on_a_cpu(branch, tmp_path):
    assert verdict_of(branch, tmp_path) == OK


def written_nowhere(dy, x, ends, *, products):
    found = grouped_outer(dy, x, ends, matmul_mode=products)
    found[0] = torch.nan
    return found


def without_its_last_chunk(hidden, weight, targets, **options):
    if hidden.dtype == torch.float64:
        return loss_sums(hidden, weight, targets, **options)
    cut = torch.cat([hidden[:256], hidden[256:].detach()])
    return loss_sums(cut, weight, targets, **options)


class WithoutSlices(BlockwiseKernel):
    def backward(self, dout, q, k, v, out, lse, slices, *, scores):
        return super().backward(dout, q, k, v, out, lse, slices[:-1], scores=scores)


class TooEarly(AsyncCopies):
    def to_host(self, x):
        return torch.zeros_like(x)


@pytest.mark.parametrize(
    ("branch", "name", "wrong"),
    [
        ("merges", "merge_", lambda *tensors: None),
        ("norms", "rms_norm", lambda x, weight, eps: rms_norm(x, weight, eps) * 1.02),
        ("experts", "grouped_outer", written_nowhere),
        ("losses", "loss_sums", without_its_last_chunk),
        ("flex", "KERNELS", {"blockwise": WithoutSlices()}),
        ("copies", "AsyncCopies", TooEarly),
        ("bit_sums", "grid_sum", lambda x: torch.tensor(x.data_ptr())),
    ],
)
def test_a_wrong_result_fails_its_check(branch, name, wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(contact, name, wrong)
    assert verdict_of(branch, tmp_path) == FAIL


def test_a_part_of_the_model_with_a_wrong_or_missing_gradient_is_told():
    want = {"model.layers.0.mlp.up_proj.weight": torch.ones(4), "model.norm.weight": torch.ones(4)}
    assert models.worst_part(want, want)[0] == 0
    wrong = want | {"model.norm.weight": torch.full((4,), 1.5)}
    assert models.worst_part(wrong, want) == (0.5, "norm")
    nan = want | {"model.norm.weight": torch.full((4,), torch.nan)}
    assert models.worst_part(nan, want) == (float("inf"), "norm")
    del wrong["model.layers.0.mlp.up_proj.weight"]
    assert models.worst_part(wrong, want) == (float("inf"), "layer 0, FFN")


@pytest.mark.slow
def test_a_command_that_fails_or_hangs_says_so():
    python = [sys.executable, "-c"]
    assert run([*python, "print('fine')"], seconds=60) == "fine\n"
    with pytest.raises(RuntimeError, match=r"exit code 3: ValueError: no driver"):
        run([*python, "print('ValueError: no driver'); print('bye'); raise SystemExit(3)"], seconds=60)
    begun = time.monotonic()
    child = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', 'import time; time.sleep(60)'])"
    hanging = Command([*python, f"print('x', flush=True); {child}"], seconds=3)
    assert hanging.problem() == "it did not end in time; last: x"
    assert time.monotonic() - begun < 40


def test_the_first_problem_of_any_rank_is_told():
    script = "import os; rank = os.environ['RANK']; print('I am', rank, os.environ['LOCAL_RANK'])\n"
    assert run_ranks(2, ["-c", script], seconds=60) == "I am 0 0\n"
    with pytest.raises(RuntimeError, match=r"rank 1: exit code 4: KeyError: what"):
        run_ranks(2, ["-c", f"{script}if rank == '1': print('KeyError: what'); raise SystemExit(4)"], seconds=60)
