"""Rows dealt out by their work (``data.balance``): the step that they are in is the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.loader import build_loader
from launcher.config.load_config import load_run_config
from launcher.metrics.throughput import training_flops
from longctx.config import PRESETS
from longctx.tokenizer import load_tokenizer
from tests.data_pipeline.lengths import write_lengths
from tests.helpers import run_distributed
from tests.launcher.runs import resolved
from tests.launcher.training.test_degrees import check_equal
from tests.launcher.workers import train_each

SAME: dict[str, Any] = {
    "train.steps": 2,
    "train.tokens_per_step": 256 * 12,
    "train.lr": 1e-3,
    "parallel.context": 1,
    "parallel.expert": 1,
    # What is random goes by the token, wherever it is computed.
    "model.residual_dropout": 0.1,
    "model.router_jitter": 0.1,
    "validation.rows": 0,
    "checkpoint.every_steps": 0,
}


@pytest.fixture(scope="module")
def uneven(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of very different lengths."""
    random = np.random.default_rng(0)
    lengths = [int(np.exp(random.normal(3.5, 1.5))) + 2 for _ in range(600)]
    return write_lengths(tmp_path_factory.mktemp("uneven") / "shards", load_tokenizer(shards), lengths).folder


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_losses_and_norms_are_those_of_one_process(ranks, uneven, tmp_path):
    alone = tmp_path / "alone"
    run_distributed(train_each, 1, uneven, {alone: SAME})
    ways = {
        "order": {**SAME, "data.balance": "false"},
        "work": SAME,
        "several rows": {**SAME, "train.micro_batch_rows": 2},
        # Stage 2 reduces in each micro-batch: rows of like work share one.
        "lockstep": {**SAME, "zero.stage": 2},
    }
    run_distributed(train_each, ranks, uneven, {tmp_path / name: changed for name, changed in ways.items()})
    for name in ways:
        check_equal(tmp_path / name, alone)


def test_ranks_have_as_much_work_and_the_rows_of_the_step(uneven: Path):
    model = PRESETS["llama-3.1-8b"]
    common: dict[str, Any] = {"seq_len": 512, "rows_per_step": 32, "data_degree": 4}

    def cost(lengths) -> int:
        # As at a length at which attention is most of the work.
        return training_flops(model, [1000 * n for n in lengths])

    def of_ranks(**options: Any) -> tuple[list[int], list[tuple[int, ...]]]:
        work, seen = [], []
        for rank in range(4):
            loader = build_loader(uneven, data_rank=rank, **common, **options)
            known = loader.next_documents()
            work.append(sum(cost(documents.lengths) for documents in known))
            for documents in known:
                batch = next(loader)
                assert batch.documents == documents
                seen.append(tuple(batch.tokens.flatten().tolist()))
        return work, seen

    in_order, balanced, in_lockstep = of_ranks(), of_ranks(cost=cost), of_ranks(cost=cost, sync_per_micro_batch=True)
    assert sorted(in_order[1]) == sorted(balanced[1]) == sorted(in_lockstep[1])
    factors = [4 * max(work) / sum(work) for work, _ in (in_order, balanced, in_lockstep)]
    assert factors[1] <= 1.005 <= factors[2] <= 1.05 < factors[0]


@pytest.mark.parametrize(
    ("flags", "waits"),
    [
        ({"zero.stage": 0}, False),
        ({"zero.stage": 1}, False),
        ({"zero.stage": 2}, True),
        ({"zero.stage": 3}, True),
        # Four neighbours hold the experts: two data ranks of two.
        ({"zero.stage": 1, "parallel.expert": 4, "parallel.context": 2}, True),
        ({"zero.stage": 1, "parallel.expert": 2, "parallel.context": 4}, False),
    ],
)
def test_data_ranks_meet_in_each_micro_batch_where_gradients_weights_or_experts_do(flags, waits):
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    assert resolved(load_run_config(["--config", "quickstart", *words])).sync_micro_batches == waits
