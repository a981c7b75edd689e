"""What a step adds up to and says of its experts: by hand, over ranks, and what must be said aloud."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from launcher.config.config_sections import TrainSection
from launcher.config.load_config import load_run_config
from launcher.training.hooks.collapse import Collapse
from launcher.training.hooks.dead_experts import DeadExperts
from launcher.training.hooks.skip_bad_steps import rows_from
from launcher.training.learning_rate_schedule import learning_rate
from launcher.training.totals import StepSums, StepTotals
from launcher.training.train_step import expert_record
from longctx.config import ModelConfig
from longctx.model.experts.router import RouterDiagnostics
from longctx.objectives.task import LossSum
from tests.helpers import run_distributed

MODEL = ModelConfig(num_layers=4, num_experts=4, experts_per_token=2, dense_layers=(0, 2))


def totals(counts: list[list[int]], diagnostics: list[list[float]], **changed: float) -> StepTotals:
    sums = {"nll": 30.0, "objective": 31.0, "balance": 33.0, "router_z": 12.0, **changed}
    of_routers = RouterDiagnostics._make(torch.tensor(diagnostics, dtype=torch.float64).T)
    return StepTotals(counts_LE=torch.tensor(counts), diagnostics=of_routers, sums=sums, flops=1.0)


def test_expert_figures_by_hand():
    """Ten tokens, two choices each; in layer 3 expert 0 had no room for four of them."""
    diagnostics = [[40.0, 13.0, 0.0, 0.0], [2.5, 1.0, 4.0, 0.0]]
    record = expert_record(totals([[5, 5, 5, 5], [10, 10, 0, 0]], diagnostics), [1, 3], num_tokens=10)
    assert record == {
        "balance_loss": pytest.approx(33 / 10 / 2),
        "router_z_loss": pytest.approx(1.2),
        "expert_layers": [1, 3],
        "expert_load": [[5, 5, 5, 5], [10, 10, 0, 0]],
        "expert_max_violation": [0.0, 1.0],
        "expert_mean_violation": [0.0, 1.0],
        "expert_dropped_share": [0.0, pytest.approx(4 / 20)],
        "router_entropy": [pytest.approx(1.3), pytest.approx(0.1)],
        "router_logit_rms": [pytest.approx(2.0), pytest.approx(0.5)],
    }


def test_a_dense_model_has_empty_figures():
    empty = StepTotals(
        sums={"objective": 1.0, "nll": 1.0},
        flops=1.0,
        counts_LE=torch.zeros(0, 0).long(),
        diagnostics=RouterDiagnostics.none(torch.zeros(0), 0),
    )
    record = expert_record(empty, [], num_tokens=10)
    assert record.pop("balance_loss") is record.pop("router_z_loss") is None
    assert set(map(str, record.values())) == {"[]"}


def test_a_step_of_padding_alone_has_figures():
    record = expert_record(totals([[0, 0, 0, 0]], [[0.0] * 4], balance=0.0), [1], num_tokens=0)
    assert record["expert_dropped_share"] == record["router_logit_rms"] == [0.0]
    assert math.isnan(record["expert_max_violation"][0])


def test_logits_that_are_not_finite_are_named_by_layer():
    assert totals([[5, 5, 5, 5]], [[1.0, 1.0, 0.0, 0.0]]).non_finite_routers([1]) == []
    wrong = totals([[5, 5, 5, 5], [20, 0, 0, 0]], [[1.0, 1.0, 0.0, 0.0], [math.nan, math.nan, 0.0, 1234.0]])
    assert wrong.non_finite_routers([1, 3]) == ["model.layers.3 (1,234 tokens)"]


@pytest.mark.parametrize("part", ["nll", "objective", "balance", "router_z"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_each_part_of_the_loss_must_be_finite(part, value):
    assert totals([[1] * 4], [[0.0] * 4]).finite
    assert not totals([[1] * 4], [[0.0] * 4], **{part: value}).finite


def test_the_learning_rate_warms_up_and_falls_to_its_floor():
    train = TrainSection(steps=110, warmup_steps=10, lr=1.0, final_lr_ratio=0.1)
    rates = [learning_rate(step, train) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[59] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[9:]))
    flat = TrainSection(steps=10, warmup_steps=0, lr=1.0, final_lr_ratio=1.0)
    assert [learning_rate(step, flat) for step in (1, 5, 10)] == [1.0, 1.0, 1.0]


def test_the_learning_rate_falls_with_the_root_of_the_steps():
    train = TrainSection(steps=400, warmup_steps=10, lr=1.0, schedule="inverse_sqrt")
    rates = [learning_rate(step, train) for step in range(1, 401)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    # The article's formula: d^-½ · min(step^-½, step · warmup^-1.5), of which the peak is ours.
    assert rates == pytest.approx([10**0.5 * min(step**-0.5, step * 10**-1.5) for step in range(1, 401)])


def test_a_steps_rows_are_named_with_the_command_that_shows_them():
    flags = ["--data.train", "DATA", "--data.seq_len", "2048", "--train.tokens_per_step", "4096"]
    config = load_run_config([*flags, "--run.seed", "3"])
    order = {"epoch": 2, "epoch_row": 5012, "block": 4, "block_row": 12}
    assert rows_from(config, order) == (
        "2 rows of DATA from row 5012 of epoch 2 on "
        "(longctx data inspect DATA --seq-len 2048 --row 12 --block 4 --epoch 2 --seed 3)"
    )
    order = {"epoch": 0, "epoch_row": 12, "block": 0, "block_row": 12}
    assert rows_from(load_run_config(flags), order).endswith("(longctx data inspect DATA --seq-len 2048 --row 12)")


def loss_of(rank: int, micro_batch: int) -> LossSum:
    g = torch.Generator().manual_seed(10 * rank + micro_batch)

    def drawn() -> Tensor:
        return torch.rand((), generator=g, requires_grad=True)

    counts_LE = torch.randint(0, 2**40, (2, 4), generator=g)  # beyond what float32 holds
    diagnostics = RouterDiagnostics._make(torch.rand(4, 2, generator=g, dtype=torch.float64))
    sums = {"objective": drawn(), "nll": drawn(), "balance": drawn(), "router_z": drawn()}
    return LossSum(sums, counts_LE, diagnostics)


def add_up() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sums = StepSums()
    for micro_batch in range(3):
        sums.add(loss_of(rank, micro_batch))
    got = sums.over_ranks(0.5 + rank, {"more": lambda device: torch.tensor([1.0, rank], device=device)})
    everyone = [loss_of(r, m) for r in range(world_size) for m in range(3)]
    for name in everyone[0].sums:
        assert got.sums[name] == pytest.approx(sum(float(loss[name]) for loss in everyone), rel=1e-14)
    assert torch.equal(got.counts_LE, torch.stack([loss.counts_LE for loss in everyone]).sum(0))
    wanted = torch.stack([torch.stack(loss.diagnostics) for loss in everyone]).sum(0)
    torch.testing.assert_close(torch.stack(got.diagnostics), wanted, rtol=1e-14, atol=0)
    assert got.flops == sum(0.5 + r for r in range(world_size))
    assert got.summed["more"].tolist() == [world_size, sum(range(world_size))]


@pytest.mark.parametrize("world_size", [1, 3])
def test_micro_batches_and_ranks_add_up(world_size):
    run_distributed(add_up, world_size)


def counts(*idle: tuple[int, int]) -> Tensor:
    """Two layers of three experts with a token each, but for the idle ones."""
    counts_LE = torch.ones(2, 3, dtype=torch.int64)
    for row, expert in idle:
        counts_LE[row, expert] = 0
    return counts_LE


def test_a_dead_expert_is_named_once_after_a_whole_window():
    watch = DeadExperts(MODEL, [1, 3], 3, window=4)
    said = [watch.find(counts((1, 2)) if step >= 2 else counts()) for step in range(1, 12)]
    assert said == [[], [], [], [], ["model.layers.3.mlp.experts.2"], [], [], [], [], [], []]
    text = watch.warning(said[4], 5)
    for words in ("model.layers.3.mlp.experts.2 is a dead expert", "in steps 2 to 5", "model.selection_bias_rate"):
        assert words in text


def test_one_token_keeps_an_expert_alive():
    watch = DeadExperts(MODEL, [1, 3], 3, window=4)
    assert all(not watch.find(counts((0, 0)) if step % 4 else counts()) for step in range(40))


def test_a_collapsed_layer_is_named_once_after_a_whole_window():
    """Two of four experts have every token of layer 3, but for a step in which one goes elsewhere."""
    watch, even, collapsed = Collapse(MODEL, [1, 3], window=4), [5, 5, 5, 5], [10, 10, 0, 0]
    loads = [torch.tensor([even, even if step == 3 else collapsed]) for step in range(1, 12)]
    said = [watch.find(counts_LE) for counts_LE in loads]
    assert [step for step, layers in enumerate(said, 1) if layers] == [7]
    assert said[6] == [3]
    text = watch.warning(said[6], 7)
    for words in (
        "The experts in layer 3 have collapsed",
        "in steps 4 to 7",
        "train.optimizer=muon",
        "model.embedding_std=1",
    ):
        assert words in text


def test_a_load_far_from_even_is_no_collapse():
    watch = Collapse(MODEL, [1, 3], window=2)
    assert all(not watch.find(torch.tensor([[8, 6, 3, 3], [0, 0, 0, 0]])) for _ in range(9))
    # One that every token has, and others that share the rest evenly.
    assert all(not watch.find(torch.tensor([[10, 4, 3, 3], [10, 4, 3, 3]])) for _ in range(9))
