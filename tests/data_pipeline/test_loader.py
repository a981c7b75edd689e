from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.loader import build_loader, build_validation_loader
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.sources import open_source
from data_pipeline.rows.pack import Row
from data_pipeline.rows.row_batches import build_batch
from data_pipeline.shards.reader import ShardSet
from longctx.batch import PADDING_DOCUMENT, Batch
from longctx.errors import ConfigError, DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.lengths import global_rows, lengths_of, plan_rows

SEQ_LEN = 256


def loaders(folder: Path, *, degree: int, micro: int = 1, rows_per_step: int = 8, seq_len: int = SEQ_LEN, **options):
    return [
        build_loader(
            folder,
            seq_len=seq_len,
            rows_per_step=rows_per_step,
            micro_batch_rows=micro,
            data_rank=rank,
            data_degree=degree,
            **options,
        )
        for rank in range(degree)
    ]


def check_contract(batch: Batch, shape: tuple[int, int]) -> None:
    rows, seq_len = shape
    for tensor in (batch.tokens, batch.targets, batch.positions, batch.document_ids):
        assert tensor.shape == shape
        assert tensor.dtype == torch.int64
    bounds = batch.cu_seqlens.tolist()
    assert batch.cu_seqlens.dtype == torch.int64
    assert bounds == sorted(set(bounds))
    assert (bounds[0], bounds[-1]) == (0, rows * seq_len)
    assert set(range(0, rows * seq_len + 1, seq_len)) <= set(bounds)
    flat = batch.flatten_rows()
    for segment, (start, stop) in enumerate(itertools.pairwise(bounds)):
        assert flat.positions[0, start:stop].tolist() == list(range(stop - start))
        assert set(flat.document_ids[0, start:stop].tolist()) in ({segment}, {PADDING_DOCUMENT})


class TestBatches:
    @pytest.mark.parametrize(("seq_len", "micro"), [(SEQ_LEN, 1), (SEQ_LEN, 2), (1000, 4), (100_000, 1), (1, 3)])
    def test_follow_the_contract(self, built: Path, seq_len: int, micro: int):
        (loader,) = loaders(built, degree=1, micro=micro, rows_per_step=micro, seq_len=seq_len)
        for batch in itertools.islice(loader, 5):
            check_contract(batch, (micro, seq_len))

    @pytest.mark.parametrize("seq_len", [37, 5000])
    def test_are_the_rows_of_the_plan(self, built: Path, seq_len: int):
        shards = ShardSet.open(built)
        loader = build_loader(built, seq_len=seq_len, rows_per_step=3, micro_batch_rows=3)
        plan = plan_rows(lengths_of(shards), seq_len)
        for first in range(0, min(plan.num_rows, 30) - 2, 3):
            rows = [Row.of(plan.row(index)) for index in range(first, first + 3)]
            batch, wanted = next(loader), build_batch(shards, rows, seq_len).unpack()
            for name in ("tokens", "targets", "positions", "document_ids"):
                assert torch.equal(getattr(batch, name), getattr(wanted, name))


class TestOrder:
    def test_a_state_in_the_middle_of_a_step_is_that_of_its_beginning(self, built: Path):
        loader = build_loader(built, seq_len=SEQ_LEN, rows_per_step=4)
        for _ in range(4):
            next(loader)
        state = loader.state_dict()
        ahead = next(loader)
        assert loader.state_dict() == state
        loader.load_state_dict(state)
        assert next(loader).tokens.tolist() == ahead.tokens.tolist()

    @pytest.mark.parametrize("change", [{"seed": 1}, {"seq_len": 512}, {"shuffle": False}])
    def test_a_state_of_another_order_is_refused(self, built: Path, change: dict):
        options = {"seq_len": SEQ_LEN, "rows_per_step": 2}
        state = build_loader(built, **{**options, **change}).state_dict()
        with pytest.raises(DataError, match=f"{next(iter(change))}="):
            build_loader(built, **options).load_state_dict(state)

    def test_a_state_of_other_data_or_no_state_is_refused(self, built: Path):
        loader = build_loader(built, seq_len=SEQ_LEN, rows_per_step=2)
        other = build_loader(built / "validation", seq_len=SEQ_LEN, rows_per_step=2)
        with pytest.raises(DataError, match="manifest_hash="):
            loader.load_state_dict(other.state_dict())
        with pytest.raises(DataError, match="not a loader state"):
            loader.load_state_dict({})
        for name, value in (("epoch_row", 10**9), ("rows_consumed", -1), ("epoch", "1"), ("tokens_consumed", 1.5)):
            with pytest.raises(DataError, match="state is damaged"):
                loader.load_state_dict({**loader.state_dict(), name: value})


class TestSmallData:
    @pytest.fixture
    def tiny(self, tokenizer: Tokenizer, tmp_path: Path) -> Path:
        (tmp_path / "a.txt").write_text("a very short text")
        build_shards(open_source(tmp_path / "a.txt"), tokenizer, tmp_path / "out", validation_fraction=0)
        return tmp_path / "out"

    def test_less_than_one_row_repeats_epoch_by_epoch(self, tiny: Path):
        ranks = loaders(tiny, degree=2, micro=2, rows_per_step=8, seq_len=4096)
        assert ranks[0].pack_report().rows == 1
        batches = [next(ranks[0]) for _ in range(4)]
        for batch in batches:
            check_contract(batch, (2, 4096))
            assert batch.tokens.tolist() == batches[0].tokens.tolist()
        assert (ranks[0].epoch, ranks[0].rows_consumed) == (16, 16)
        resumed = loaders(tiny, degree=1, rows_per_step=8, seq_len=4096)[0]
        resumed.load_state_dict(ranks[0].state_dict())
        assert resumed.tokens_consumed == 16 * resumed.shards.num_tokens


class TestUnevenMicroBatches:
    """A step's rows that micro-batches do not divide: some have one row less, and nothing else changes."""

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(degree=st.integers(1, 3), micro=st.integers(1, 9), rows=st.integers(1, 7))
    def test_the_rows_are_those_of_one_rank_in_their_order(self, built: Path, degree: int, micro: int, rows: int):
        rows_per_step = rows * degree
        ranks = loaders(built, degree=degree, micro=micro, rows_per_step=rows_per_step)
        (alone,) = loaders(built, degree=1, micro=1, rows_per_step=rows_per_step)
        assert torch.equal(global_rows(ranks, 3), global_rows([alone], 3))
        assert ranks[0].state_dict() == ranks[-1].state_dict() == alone.state_dict()

    def test_a_step_is_known_before_it_is_read(self, built: Path):
        ranks = loaders(built, degree=2, micro=3, rows_per_step=10)
        for loader in ranks:
            for _ in range(2):
                known = loader.next_documents()
                assert known == [next(loader).documents for _ in range(loader.micro_batches_per_step)]


class TestValidation:
    @pytest.mark.parametrize(("degree", "micro", "sizes"), [(1, 3, (3, 2, 2)), (2, 3, (2, 2)), (3, 9, (3,))])
    def test_even_ones_hold_hardly_any_padding(self, built: Path, degree: int, micro: int, sizes: tuple[int, ...]):
        options: dict = {"seq_len": SEQ_LEN, "max_rows": 7}
        expected = [batch.tokens[0].tolist() for batch in build_validation_loader(built, **options)]
        options |= {"micro_batch_rows": micro, "data_degree": degree, "even": True}
        batches = [list(build_validation_loader(built, data_rank=rank, **options)) for rank in range(degree)]
        assert [tuple(len(b.tokens) for b in of_rank) for of_rank in batches] == [sizes] * degree
        rows = [row for group in zip(*batches, strict=True) for batch in group for row in batch.tokens.tolist()]
        assert rows[:7] == expected
        assert len(rows) - 7 < degree

    @pytest.mark.few(6)
    @pytest.mark.parametrize(("degree", "micro"), [(1, 1), (2, 1), (3, 2), (4, 4)])
    @pytest.mark.parametrize("max_rows", [None, 1, 5, 10**6])
    def test_every_row_once_and_ranks_in_step(self, built: Path, degree: int, micro: int, max_rows: int | None):
        options = {"seq_len": SEQ_LEN, "max_rows": max_rows}
        expected = [batch.tokens[0].tolist() for batch in build_validation_loader(built, **options)]
        ranks = [
            build_validation_loader(built, **options, micro_batch_rows=micro, data_rank=rank, data_degree=degree)
            for rank in range(degree)
        ]
        batches = [list(rank) for rank in ranks]
        assert len({len(b) for b in batches} | {len(rank) for rank in ranks}) == 1
        rows = [row for group in zip(*batches, strict=True) for batch in group for row in batch.tokens.tolist()]
        assert rows[: len(expected)] == expected
        assert ranks[0].num_rows == len(expected)
        padding = ranks[0].shards.manifest.padding
        assert all(set(row) == {padding} for row in rows[len(expected) :])
        for batch in batches[-1]:
            check_contract(batch, (micro, SEQ_LEN))

    def test_iterating_again_gives_the_same(self, built: Path):
        loader = build_validation_loader(built / "validation", seq_len=SEQ_LEN, max_rows=3)
        first, again = ([batch.tokens.tolist() for batch in loader] for _ in range(2))
        assert first == again
        assert len(first) == 3


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"rows_per_step": 10, "data_degree": 4, "micro_batch_rows": 1}, "Try rows_per_step=8 or 12"),
            ({"rows_per_step": 3, "data_degree": 4}, "Try rows_per_step=4"),
            ({"rows_per_step": 0}, "Try rows_per_step=1"),
            ({"rows_per_step": 4, "data_degree": 2, "data_rank": 2}, "data_rank=2 must be"),
            ({"rows_per_step": 4, "seq_len": 0}, "seq_len=0 must be"),
            ({"rows_per_step": 4, "micro_batch_rows": 0}, "micro_batch_rows=0 must be"),
        ],
    )
    def test_sizes_that_do_not_fit(self, built: Path, options: dict, message: str):
        with pytest.raises(ConfigError, match=message):
            build_loader(built, **{"seq_len": SEQ_LEN, **options})

    def test_max_rows_must_be_positive(self, built: Path):
        with pytest.raises(ConfigError, match="max_rows=0"):
            build_validation_loader(built, seq_len=SEQ_LEN, max_rows=0)
