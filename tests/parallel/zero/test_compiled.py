"""Compiled regions under ZeRO: the oracle's losses, gradient norms and weights, and no more graphs than one step's."""

from __future__ import annotations

import pytest
import torch

from longctx.kernels.regions import compile_count, missing_for_compiling
from longctx.model.kept import Keep
from tests.helpers import run_distributed
from tests.parallel.zero.test_zero import BOUNDS, FEW, check_parity


def check_compiled(
    kind: str, context: int, stages: tuple[int, ...], keep: Keep, backend: str, steps: int = FEW, expert: int = 1
) -> None:
    for stage in stages:
        torch.compiler.reset()
        before = compile_count().graphs
        how = {"keep": keep, "compiler": backend, "expert": expert}
        check_parity(kind, context, BOUNDS[kind], steps, (stage,), **how)
        # Before and after the core: all layers and all batches share two graphs.
        assert compile_count().graphs - before == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world_size", "context", "stages", "keep"),
    [
        ("dense", 2, 1, (0, 1, 2, 3), "all"),
        ("dense", 2, 2, (0, 1, 2, 3), "attention"),
        ("moe", 2, 2, (0, 1, 2, 3), "all"),
        ("dense", 4, 4, (1, 3), "all"),
    ],
)
@pytest.mark.timeout(600)
def test_compiled_regions_train_like_one_process(kind, world_size, context, stages, keep):
    run_distributed(check_compiled, world_size, kind, context, stages, keep, "aot_eager", timeout=550)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["all", "attention"])
@pytest.mark.timeout(600)
def test_so_they_do_with_experts_across_ranks(keep):
    run_distributed(check_compiled, 2, "moe", 2, (0, 1, 2, 3), keep, "aot_eager", FEW, 2, timeout=550)


@pytest.mark.slow
@pytest.mark.skipif(missing_for_compiling("cpu") is not None, reason=f"cannot compile: {missing_for_compiling('cpu')}")
@pytest.mark.timeout(600)
def test_so_do_kernels_of_inductor():
    run_distributed(check_compiled, 2, "moe", 2, (1, 3), "attention", "inductor", timeout=550)
