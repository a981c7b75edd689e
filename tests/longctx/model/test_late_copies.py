"""Stores whose copies run as late, or as early, as their events allow: the values and gradients of a plain run."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from longctx.model.decoder import Decoder
from longctx.model.kept import Keep, Store
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.late_copies import LATE_ORDERS, late_copies
from tests.longctx.samples import dense_config, gradients, packed_batch, randomize, step_loss, tiny_config

RANDOM = {"num_layers": 3, "residual_dropout": 0.2}
CONFIGS = {
    "dense": dense_config(**RANDOM),
    "experts": tiny_config(**RANDOM, capacity_factor=1.0),
    "experts, sandwich": tiny_config(**RANDOM, norm_order="sandwich"),
    "t5": dense_config(**RANDOM, position="t5"),
    "sinks": dense_config(**RANDOM, sinks=True),
    "linear": dense_config(**RANDOM, layers=("linear", "window", "full"), window=7),
}
BATCHES = {1: packed_batch([[9, 14, 21, 2]], padding=1), 2: packed_batch([[9, 14], [20, 3]], padding=1)}
KEEPS: tuple[Keep, ...] = ("all", "attention", "inputs")
WAYS: list[tuple[Store, int, int]] = [("host", 0, 1)]
"""Store, tokens of a chunk (0: whole layers), groups of heads."""
WAYS.extend((store, chunk, groups) for store in ("host", "disk") for chunk in (7, 100) for groups in (1, 2))
EVERY = [(way, keep, order) for way, keep, order in itertools.product(WAYS, KEEPS, LATE_ORDERS)]
FEW = EVERY[::13]
"""Every thirteenth: each way, each way to keep and each order is among them."""


def train(name: str, rows: int, execution: Execution) -> dict[str, torch.Tensor]:
    """Loss sums and gradients of one step, in float64."""
    lm = CausalLM(Decoder(CONFIGS[name], execution=execution))
    randomize(lm)
    lm.double()
    loss = lm.loss_sum(lm(BATCHES[rows], TrainingPass(seed=3)))
    step_loss(loss, 0.1).backward()
    return {**dict(enumerate(loss.tensors())), **gradients(lm)}


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize(
    ("name", "cases"),
    [("dense", FEW), *(pytest.param(name, EVERY, marks=pytest.mark.slow) for name in CONFIGS)],
    ids=lambda x: x if isinstance(x, str) else f"{len(x)} cases",
)
def test_what_is_read_has_arrived_and_what_is_freed_has_left(name: str, cases: list, rows: int, tmp_path: Path):
    wanted = train(name, rows, Execution())
    for (store, chunk_tokens, head_groups), keep, order in cases:
        execution = Execution(keep, store, chunk_tokens=chunk_tokens, head_groups=head_groups, store_path=str(tmp_path))
        with late_copies(*order):
            got = train(name, rows, execution)
        case = (store, chunk_tokens, head_groups, keep, order)
        # Chunks add in another order than whole rows: float64's rounding, a million times below what a NaN or a value
        # of another moment would make of it.
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10, msg=lambda text, case=case: f"{case}: {text}")
