"""Layers by chunks over ranks and ZeRO stages, against one plain process: loss, gradients, gradient norm."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from longctx.model.kept import Keep, Store
from longctx.model.training_pass import Execution
from tests.helpers import run_distributed
from tests.parallel.zero.test_kept import CONFIGS as KEPT
from tests.parallel.zero.test_kept import EXPERTS, alone, compare, together

# What an expert at its capacity drops depends on all chunks of all ranks.
CONFIGS = {**KEPT, "capacity": replace(EXPERTS, capacity_factor=1.0)}
WAYS: list[tuple[Keep, Store, int, int]] = list(
    itertools.product(("all", "attention", "inputs"), ("device", "host"), (11, 100), (1, 2))
)


def check(kind: str, stages: tuple[int, ...], dtypes: tuple[torch.dtype, ...], ways: list) -> None:
    wanted = alone(CONFIGS[kind])
    for stage, dtype, way in itertools.product(stages, dtypes, ways):
        keep, store, chunk_tokens, head_groups = way
        execution = Execution(keep, store, chunk_tokens=chunk_tokens, head_groups=head_groups)
        got = together(CONFIGS[kind], execution, stage, dtype)
        compare(got, wanted, dtype, f"{kind}, ZeRO {stage}, {dtype}, {way}")


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("sandwich", 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("dense", 0), ("capacity", 2), ("experts", 2), ("capacity", 3))
        ),
    ],
)
@pytest.mark.timeout(300)
def test_chunks_give_one_process_gradients(kind, stage):
    ways = [("attention", "host", 11, 2), ("inputs", "device", 7, 1)]
    run_distributed(check, 2, kind, (stage,), (torch.float32,), ways, timeout=250)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.timeout(900)
def test_in_more_stages_ways_and_in_bfloat16(kind):
    run_distributed(check, 2, kind, (1, 2, 3), (torch.float32, torch.bfloat16), WAYS, timeout=850)
