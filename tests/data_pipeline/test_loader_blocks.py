"""Loaders of a corpus in several blocks: one stream of rows, whatever reads it and wherever it begins."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.loader import Loader, ValidationLoader, build_loader
from data_pipeline.rows import epoch_blocks
from data_pipeline.rows.epoch_blocks import BlockAssignment, BlockPlanner, FirstRows
from data_pipeline.rows.order import FolderOrder
from data_pipeline.rows.pack import Packing, plan_parts
from data_pipeline.shards.reader import ShardSet
from launcher.training.step_prefetch import StepPrefetcher
from longctx.batch import IGNORED_TARGET
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.lengths import global_rows, write_lengths
from tests.launcher.training.test_step_prefetch import all_of_it

SEQ_LEN = 128


@pytest.fixture(scope="module")
def shards(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """Three hundred documents of 1 to 190 tokens, some 220 rows."""
    lengths = [1 + (number * number * 53) % 190 for number in range(300)]
    return write_lengths(tmp_path_factory.mktemp("loader") / "data", tokenizer, lengths, shard_tokens=3000)


def loaders(shards: ShardSet, *, degree: int = 1, micro: int = 1, rows_per_step: int = 24, num_blocks: int = 5):
    return [
        Loader(
            (shards,),
            FolderOrder(shards, SEQ_LEN, seed=4, assignment=BlockAssignment(num_blocks, 2)),
            seq_len=SEQ_LEN,
            rows_per_step=rows_per_step,
            micro_batch_rows=micro,
            data_rank=rank,
            data_degree=degree,
        )
        for rank in range(degree)
    ]


@pytest.fixture(scope="module")
def stream(shards: ShardSet) -> torch.Tensor:
    """The rows of 40 steps, several epochs, as one rank reads them."""
    return global_rows(loaders(shards), 40)


@pytest.mark.few(2)
@pytest.mark.parametrize(("degree", "micro"), [(1, 4), (2, 3), (3, 1), (4, 2), (8, 3)])
def test_the_stream_is_bit_equal_for_every_data_degree(shards: ShardSet, stream: torch.Tensor, degree, micro):
    ranks = loaders(shards, degree=degree, micro=micro)
    assert torch.equal(global_rows(ranks, 40), stream)
    states = [rank.state_dict() for rank in ranks]
    assert all(state == states[0] for state in states)
    assert states[0]["epoch"] > 2


@settings(max_examples=30)
@given(
    st.sampled_from([(1, 1), (2, 4), (3, 8), (4, 1), (8, 3)]),
    st.sampled_from([(1, 2), (2, 2), (3, 1), (8, 1)]),
    st.integers(0, 37),
    st.sampled_from([1, 2, 3]),
)
def test_resuming_at_any_step_with_any_degree_goes_on(shards, stream, before, after, stop_at, shorter):
    # Any rank: their states are equal.
    first = loaders(shards, degree=before[0], micro=before[1])[-1]
    for _ in range(stop_at * first.micro_batches_per_step):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    # Another number of rows a step, too: 24, 48 or 72.
    second = loaders(shards, degree=after[0], micro=after[1], rows_per_step=24 * shorter)
    for rank in second:
        rank.load_state_dict(state)
        assert rank.state_dict() == state
    begin = 24 * stop_at
    assert torch.equal(global_rows(second, 1), stream[begin : begin + 24 * shorter])


def test_every_token_once_in_each_of_several_epochs(shards: ShardSet):
    (loader,) = loaders(shards, rows_per_step=1)
    expected = np.sort(np.concatenate([shards.document(number)[1:] for number in range(shards.num_documents)]))
    orders = []
    for epoch in range(3):
        targets = []
        while loader.epoch == epoch:
            batch = next(loader)
            targets.append(batch.targets[batch.targets != IGNORED_TARGET].numpy())
        assert np.array_equal(np.sort(np.concatenate(targets)), expected)
        assert loader.tokens_consumed == (epoch + 1) * shards.num_tokens
        orders.append(np.concatenate(targets))
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[1], orders[2])


def test_the_state_is_small_and_says_where_it_is(shards: ShardSet):
    (loader,) = loaders(shards, rows_per_step=1)
    planner = BlockPlanner(shards, SEQ_LEN, seed=4, assignment=BlockAssignment(5, 2))
    for epoch in range(2):
        epoch_row = 0
        for block in range(5):
            for row in range(planner.plan(epoch, block).num_rows):
                state = loader.state_dict()
                found = [state[name] for name in ("epoch", "block", "block_row", "epoch_row")]
                assert found == [epoch, block, row, epoch_row]
                assert len(json.dumps(state)) < 1000
                next(loader)
                epoch_row += 1


@pytest.mark.parametrize("packing", [Packing("concatenate"), Packing("one_document"), Packing(min_rest_tokens=SEQ_LEN)])
def test_every_packing_goes_on_where_it_stopped_and_refuses_the_state_of_another(shards: ShardSet, packing: Packing):
    first, again = (build_loader(shards, seq_len=SEQ_LEN, rows_per_step=4, packing=packing) for _ in range(2))
    plain = build_loader(shards, seq_len=SEQ_LEN, rows_per_step=4)
    batches = [next(first).tokens for _ in range(12)]
    assert not all(torch.equal(next(plain).tokens, batch) for batch in batches)
    state = json.loads(json.dumps(first.state_dict()))
    again.load_state_dict(state)
    assert torch.equal(next(again).tokens, next(first).tokens)
    with pytest.raises(DataError, match="packing="):
        plain.load_state_dict(state)


def test_a_state_of_a_release_that_packed_in_one_way_is_best_fit(shards: ShardSet):
    first, again = (loaders(shards)[0] for _ in range(2))
    for _ in range(24):
        next(first)
    state = first.state_dict()
    assert state.pop("packing") == "best_fit"
    again.load_state_dict(state)
    assert torch.equal(next(again).tokens, next(first).tokens)


def test_a_start_in_the_middle_of_an_epoch_plans_one_block(shards: ShardSet, monkeypatch: pytest.MonkeyPatch):
    (loader,) = loaders(shards, rows_per_step=1)
    while loader.state_dict()["block"] < 3:
        next(loader)
    state, ahead = loader.state_dict(), next(loader)
    planned: list[int] = []

    def counted(*arguments, **options):
        planned.append(options["block"])
        return plan_parts(*arguments, **options)

    monkeypatch.setattr(epoch_blocks, "plan_parts", counted)
    (resumed,) = loaders(shards, rows_per_step=1)
    resumed.load_state_dict(state)
    assert torch.equal(next(resumed).tokens, ahead.tokens)
    assert planned == [3]


def test_the_next_block_is_planned_before_it_is_needed(shards: ShardSet, monkeypatch: pytest.MonkeyPatch):
    import threading

    threads: dict[int, str] = {}

    def noted(*arguments, **options):
        threads[options["block"]] = threading.current_thread().name
        return plan_parts(*arguments, **options)

    monkeypatch.setattr(epoch_blocks, "plan_parts", noted)
    (loader,) = loaders(shards, rows_per_step=1)
    while loader.state_dict()["block"] < 2:
        next(loader)
    next(loader)  # waits for block 2
    main = threading.current_thread().name
    assert threads[0] == main
    assert [threads[block] for block in (1, 2)] == ["longctx-plan"] * 2


@pytest.mark.few(5)
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("workers", "prefetch_steps"), [(1, 0), (1, 1), (4, 3)])
def test_feeds_give_one_stream_whoever_reads_it(shards: ShardSet, stream, degree, workers, prefetch_steps):
    ranks = loaders(shards, degree=degree)
    options = {"workers": workers, "prefetch_steps": prefetch_steps, "num_steps": 12, "device": torch.device("cpu")}
    feeds = [StepPrefetcher(rank, all_of_it, **options) for rank in ranks]
    try:
        for step in range(12):
            given = [feed.next_step()[0] for feed in feeds]
            found = []
            for micro_batch in range(len(given[0].shards)):
                for data in given:
                    batch = data.shards[micro_batch].unpack()
                    columns = torch.stack([batch.tokens, batch.targets, batch.positions], dim=1)
                    found.append(columns.view(3, -1, SEQ_LEN).transpose(0, 1))
            assert torch.equal(torch.cat(found), stream[24 * step : 24 * step + 24])
            assert all(data.after == given[0].after for data in given)
    finally:
        for feed in feeds:
            feed.close()
    assert feeds[0].state_dict() == ranks[0].state_dict()


class TestStates:
    def test_a_state_of_other_blocks_is_refused(self, shards: ShardSet):
        (five,), (six,) = loaders(shards, num_blocks=5), loaders(shards, num_blocks=6)
        with pytest.raises(DataError, match="num_blocks=6, but this run has 5"):
            five.load_state_dict(six.state_dict())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"block": 5}, "block 5 of epoch 0 has no row 0"),
            ({"block_row": 10**6, "epoch_row": 10**6}, "block 0 of epoch 0 has no row 1000000"),
            ({"block": 1, "block_row": 3, "epoch_row": 2}, "row 3 of block 1 is not row 2 of its epoch"),
            ({"block_row": 3, "epoch_row": 4}, "row 3 of block 0 is not row 4 of its epoch"),
        ],
    )
    def test_a_row_that_is_not_there_is_named(self, shards: ShardSet, change: dict, message: str):
        (loader,) = loaders(shards)
        with pytest.raises(DataError, match=message):
            loader.load_state_dict({**loader.state_dict(), **change})

    def test_of_version_1_goes_on_where_there_is_one_block(self, built: Path):
        options = {"seq_len": 256, "rows_per_step": 4}
        loader = build_loader(built, **options)
        for _ in range(4 * 5):
            next(loader)
        state = loader.state_dict()
        assert (state["num_blocks"], state["block_row"]) == (1, 20)
        old = {name: state[name] for name in state if name not in ("num_blocks", "block", "block_row")}
        resumed = build_loader(built, **options)
        resumed.load_state_dict({**old, "plan_version": 1})
        assert resumed.state_dict() == state
        assert torch.equal(next(resumed).tokens, next(loader).tokens)
        with pytest.raises(DataError, match="not a loader state"):
            resumed.load_state_dict({"plan_version": 1, "seed": 0})

    def test_of_version_1_is_refused_where_the_order_is_another(self, shards: ShardSet):
        (loader,) = loaders(shards)
        state = loader.state_dict()
        old = {name: state[name] for name in state if name not in ("num_blocks", "block", "block_row")}
        with pytest.raises(DataError, match=r"plan version 1.*in 5 blocks") as caught:
            loader.load_state_dict({**old, "plan_version": 1})
        assert "run.start_from" in str(caught.value)
        assert len(str(caught.value).splitlines()) < 5


class TestValidation:
    def validation(self, shards: ShardSet, max_rows: int | None, **ranks: int) -> ValidationLoader:
        options = {"micro_batch_rows": 2, "data_rank": 0, "data_degree": 1, **ranks}
        rows = FirstRows(shards, SEQ_LEN, max_rows=max_rows, assignment=BlockAssignment(5))
        return ValidationLoader((shards,), rows, seq_len=SEQ_LEN, **options)

    def test_rows_follow_the_blocks(self, shards: ShardSet):
        planner = BlockPlanner(shards, SEQ_LEN, shuffle=False, assignment=BlockAssignment(5))
        plans = [planner.plan(0, block) for block in range(5)]
        loader = self.validation(shards, None)
        assert loader.num_rows == sum(plan.num_rows for plan in plans)
        found = torch.cat([batch.tokens for batch in loader])
        expected = [plan.row(row) for plan in plans for row in range(plan.num_rows)]
        for tokens, pieces in zip(found, expected, strict=False):
            ids = np.concatenate([shards.slice(*piece) for piece in pieces])
            assert tokens[: len(ids)].tolist() == ids.tolist()
        assert len(found) - len(expected) in (0, 1)

    def test_no_more_is_planned_than_is_read(self, shards: ShardSet, monkeypatch: pytest.MonkeyPatch):
        planned: list[int] = []

        def counted(*arguments, **options):
            planned.append(options["block"])
            return plan_parts(*arguments, **options)

        monkeypatch.setattr(epoch_blocks, "plan_parts", counted)
        loader = self.validation(shards, 10)
        assert (loader.num_rows, planned) == (10, [0])
        assert len(list(itertools.chain(loader, loader))) == 10
        assert planned == [0]
