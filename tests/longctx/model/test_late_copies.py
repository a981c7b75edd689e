"""Stores whose copies run as late, or as early, as their events allow: the values and gradients of a plain run."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from longctx.model.activation_offload import Keep, Store
from longctx.model.training_pass import Execution
from tests.late_copies import LATE_ORDERS, late_copies
from tests.longctx.model.test_chunks import CONFIGS, train
from tests.longctx.samples import packed_batch

BATCHES = {1: packed_batch([[9, 14, 21, 2]], padding=1), 2: packed_batch([[9, 14], [20, 3]], padding=1)}
KINDS = ("dense", "experts, capacity", "experts, sandwich", "t5, sinks", "sinks", "linear")
KEEPS: tuple[Keep, ...] = ("all", "attention", "inputs")
WAYS: list[tuple[Store, int, int]] = [("host", 0, 1)]
"""Store, tokens of a chunk (0: whole layers), groups of heads."""
WAYS.extend((store, chunk, groups) for store in ("host", "disk") for chunk in (7, 100) for groups in (1, 2))
EVERY = [(way, keep, order) for way, keep, order in itertools.product(WAYS, KEEPS, LATE_ORDERS)]
FEW = EVERY[::13]
"""Every thirteenth: each way, each way to keep and each order is among them."""


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize(
    ("name", "cases"),
    [("dense", FEW), *(pytest.param(name, EVERY, marks=pytest.mark.slow) for name in KINDS)],
    ids=lambda x: x if isinstance(x, str) else f"{len(x)} cases",
)
def test_what_is_read_has_arrived_and_what_is_freed_has_left(name: str, cases: list, rows: int, tmp_path: Path):
    config, batch = CONFIGS[name], BATCHES[rows]
    wanted = train(config, Execution(), torch.float64, batch)
    for (store, chunk_tokens, head_groups), keep, order in cases:
        execution = Execution(keep, store, chunk_tokens=chunk_tokens, head_groups=head_groups, store_path=str(tmp_path))
        with late_copies(*order):
            got = train(config, execution, torch.float64, batch)
        case = (store, chunk_tokens, head_groups, keep, order)
        # Chunks add in another order than whole rows: float64's rounding, a million times below what a NaN or a value
        # of another moment would make of it.
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10, msg=lambda text, case=case: f"{case}: {text}")
