"""An epoch in blocks: every document in one of them, each planned by itself, and little else in memory."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.rows import epoch_blocks
from data_pipeline.rows.epoch_blocks import BlockAssignment, BlockPlanner, PackReport
from data_pipeline.rows.pack import RowPlan, plan_parts
from data_pipeline.shards.reader import ShardSet
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.lengths import lengths_of, plan_rows, write_lengths

DEALS = st.builds(BlockAssignment, st.integers(1, 9), st.sampled_from([1, 1, 2, 5]))


@pytest.fixture(scope="module")
def shards(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """Some two hundred documents of 1 to 90 tokens in 13 shards."""
    lengths = [1 + (number * number * 37) % 90 for number in range(211)]
    return write_lengths(tmp_path_factory.mktemp("blocks") / "data", tokenizer, lengths, shard_tokens=800)


def rows(plan: RowPlan) -> list[list[tuple[int, int, int]]]:
    return [plan.row(index) for index in range(plan.num_rows)]


def planner(shards: ShardSet, num_blocks: int, seq_len: int = 64, **options) -> BlockPlanner:
    return BlockPlanner(shards, seq_len, assignment=BlockAssignment(num_blocks), **options)


class TestOrder:
    @settings(max_examples=40)
    @given(DEALS, st.integers(1, 100), st.integers(0, 2**64), st.integers(0, 3), st.booleans())
    def test_every_token_stands_in_one_row_of_an_epoch(self, shards, deal, seq_len, seed, epoch, shuffle):
        planned = BlockPlanner(shards, seq_len, assignment=deal, seed=seed, shuffle=shuffle)
        pieces = [piece for b in range(deal.num_blocks) for row in rows(planned.plan(epoch, b)) for piece in row]
        found = sorted((document, token) for document, start, stop in pieces for token in range(start, stop))
        lengths = lengths_of(shards)
        assert found == [(document, token) for document, length in enumerate(lengths) for token in range(length)]
        # What fits a row is not cut.
        assert all(start % seq_len == 0 and stop == min(start + seq_len, lengths[d]) for d, start, stop in pieces)

    @settings(max_examples=40)
    @given(DEALS, st.integers(0, 9), st.integers(0, 3), st.booleans())
    def test_blocks_are_alike_and_ascend(self, shards, deal, seed, epoch, shuffle):
        planned = BlockPlanner(shards, 64, assignment=deal, seed=seed, shuffle=shuffle)
        parts = [planned.documents(epoch, block) for block in range(deal.num_blocks)]
        assert sorted(np.concatenate(parts).tolist()) == list(range(shards.num_documents))
        sizes = [len(part) for part in parts]
        # One run more or less, and the last run may be shorter.
        assert max(sizes) - min(sizes) <= 2 * deal.run_documents
        assert all((np.diff(part) > 0).all() for part in parts)

    @settings(max_examples=20)
    @given(st.integers(1, 9), st.integers(0, 9), st.permutations(range(5)))
    def test_a_block_depends_on_no_other(self, shards, seed, epoch, order):
        expected = [rows(planner(shards, 5, seed=seed).plan(epoch, block)) for block in range(5)]
        again = planner(shards, 5, seed=seed)
        assert {block: rows(again.plan(epoch, block)) for block in order} == dict(enumerate(expected))

    def test_neighbours_of_a_run_come_to_one_block_and_mix_there(self, shards: ShardSet):
        planned = BlockPlanner(shards, 64, assignment=BlockAssignment(4, 8), seed=1)
        documents = planned.documents(0, 0)
        assert np.array_equal(np.unique(documents // 8, return_counts=True)[1], np.full(len(documents) // 8, 8))
        placed = list(dict.fromkeys(piece[0] for row in rows(planned.plan(0, 0)) for piece in row))
        assert sum(b - a == 1 for a, b in itertools.pairwise(placed)) < len(placed) / 4

    def test_without_shuffle_blocks_follow_the_documents(self, shards: ShardSet):
        planned = planner(shards, 4, shuffle=False)
        assert [planned.documents(7, block).tolist() for block in range(4)] == [
            list(range(start, stop)) for start, stop in ((0, 52), (52, 105), (105, 158), (158, 211))
        ]

    def test_one_block_is_ordered_as_version_1_ordered_everything(self):
        """Checkpoints of small corpora go on. The digests are of version 1."""
        lengths = 1 + (np.arange(3000) ** 2 * 7919) % 5003
        cases = [(1024, {"seed": 0}), (1024, {"seed": 5}), (1024, {"shuffle": False}), (20_000, {"seed": 3})]
        digests = []
        for seq_len, options in cases:
            digest = xxhash.xxh3_64()
            for epoch in (0, 1, 7):
                plan = plan_rows(lengths, seq_len, epoch=epoch, **options)
                for part in (plan.pieces.documents, plan.pieces.starts, plan.pieces.ends, plan.row_offsets):
                    digest.update(part.astype(np.int64).tobytes())
            digests.append(digest.hexdigest())
        assert digests == ["b3e3678c9f54b5e0", "1e2fda06699f1fd0", "373ad09d3afe87df", "f304ab695c9715a5"]

    def test_the_order_of_blocks_never_changes(self, shards: ShardSet):
        """A loader state refers to rows of this order."""
        planned = BlockPlanner(shards, 64, assignment=BlockAssignment(4, 3), seed=9)
        digest = xxhash.xxh3_64()
        for epoch, block in ((0, 0), (0, 3), (2, 1)):
            plan = planned.plan(epoch, block)
            for part in (plan.pieces.documents, plan.pieces.starts, plan.pieces.ends, plan.row_offsets):
                digest.update(part.astype(np.int64).tobytes())
        assert digest.hexdigest() == "8fd50ee398a58615"


class TestDeal:
    @pytest.mark.parametrize(
        ("documents", "tokens", "shards", "seq_len", "expected"),
        [
            (1, 5, 1, 4096, BlockAssignment(1)),
            (131_071, 10**9, 9, 4096, BlockAssignment(1)),  # not twice 65,536 documents
            (131_072, 10**9, 9, 4096, BlockAssignment(2)),
            (10**6, 10**9, 16, 1 << 20, BlockAssignment(3)),  # 256 rows each
            (10**6, 10**8, 16, 10**7, BlockAssignment(1)),  # ten rows in all
            (10**8, 10**9, 16, 10**7, BlockAssignment(96)),  # a million documents each
            (40_000, 40_000 * 10**6, 700, 4096, BlockAssignment(10)),  # a million rows each
            (3, 3 * 10**12, 3, 4096, BlockAssignment(3)),  # no block without a document
            (10**9, 10**12, 16_000, 131_072, BlockAssignment(15_258, 64)),
            (10**7, 10**12, 16_000, 131_072, BlockAssignment(152, 64)),
            (10**6, 10**12, 1025, 131_072, BlockAssignment(15, 65)),
            (10**6, 10**12, 1024, 131_072, BlockAssignment(15)),
            (2000, 10**12, 2000, 131_072, BlockAssignment(8)),  # a shard a document
        ],
    )
    def test_of_a_corpus(self, documents: int, tokens: int, shards: int, seq_len: int, expected: BlockAssignment):
        assert BlockAssignment.of(documents, tokens, shards, seq_len) == expected

    @given(st.integers(1, 10**10), st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 10**8))
    def test_every_block_has_something_and_none_too_much(self, documents, mean, shards, seq_len):
        deal = BlockAssignment.of(documents, documents * mean, shards, seq_len)
        assert 1 <= deal.num_blocks <= documents
        assert documents / deal.num_blocks <= epoch_blocks.MAX_DOCUMENTS
        # A block's documents come from no more shards than they have runs.
        if shards > epoch_blocks.MAX_FILES:
            runs = -(-documents // deal.run_documents)
            assert -(-runs // deal.num_blocks) <= 2 * epoch_blocks.MAX_FILES + 2
        else:
            assert deal.run_documents == 1


class TestMemory:
    def test_two_blocks_are_held(self, shards: ShardSet, monkeypatch: pytest.MonkeyPatch):
        planned: list[int] = []

        def counted(*arguments, block: int, **options) -> RowPlan:
            planned.append(block)
            return plan_parts(*arguments, block=block, **options)

        monkeypatch.setattr(epoch_blocks, "plan_parts", counted)
        held = planner(shards, 5)
        for block in (3, 4, 3, 4, 3):
            held.plan(0, block)
        assert planned == [3, 4]
        for block in (0, 3, 4):
            held.plan(0, block)
        assert planned == [3, 4, 0, 4]

    def test_threads_plan_a_block_once(self, shards: ShardSet, monkeypatch: pytest.MonkeyPatch):
        begun, go_on, planned = threading.Event(), threading.Event(), []

        def slow(*arguments, **options) -> RowPlan:
            begun.set()
            assert go_on.wait(20)
            planned.append(options["block"])
            return plan_parts(*arguments, **options)

        monkeypatch.setattr(epoch_blocks, "plan_parts", slow)
        shared = planner(shards, 5)
        shared.prepare(0, 1)
        assert begun.wait(20)
        waiting = threading.Thread(target=shared.plan, args=(0, 1))
        waiting.start()
        go_on.set()
        waiting.join(20)
        assert rows(shared.plan(0, 1)) == rows(planner(shards, 5).plan(0, 1))
        assert planned[0] == 1
        assert planned.count(1) == 2  # once by each planner

    def test_an_error_of_the_thread_is_raised_where_the_block_is_needed(self, tokenizer: Tokenizer, tmp_path: Path):
        shards = write_lengths(tmp_path / "data", tokenizer, [5, 6, 7, 8], shard_tokens=10)
        planned = BlockPlanner(
            ShardSet.open(shards.folder, verify=False), 8, assignment=BlockAssignment(2), shuffle=False
        )
        last = shards.folder / shards.manifest.shards[-1].file
        content = last.read_bytes()
        last.unlink()
        planned.prepare(0, 1)
        with pytest.raises(DataError, match="is missing"):
            planned.plan(0, 1)
        # It may have been the network: the next one who asks tries again.
        last.write_bytes(content)
        assert planned.plan(0, 1).num_documents == 2


class TestReport:
    def test_of_all_blocks_it_is_exact(self, shards: ShardSet):
        planned = planner(shards, 4)
        report = planned.report(1, documents=shards.num_documents)
        assert report == PackReport.of([planned.plan(1, block) for block in range(4)], 64)
        lengths = lengths_of(shards)
        assert (report.exact, report.planned_documents, report.tokens) == (True, len(lengths), lengths.sum())
        assert report.documents_cut == (lengths > 64).sum()
        assert report.truncated_tokens == 0
        assert planner(shards, 1).report().exact

    def test_of_some_blocks_it_is_an_estimate_that_says_so(self, shards: ShardSet):
        planned = planner(shards, 4)
        exact = planned.report(documents=shards.num_documents)
        report = planned.report()
        assert (report.exact, report.planned_documents) == (False, 52)
        assert report.tokens == exact.tokens
        assert report.rows == pytest.approx(exact.rows, rel=0.05)
        assert report.documents_cut == pytest.approx(exact.documents_cut, rel=0.4)
        assert report.padding_tokens == report.rows * 64 - report.tokens
        assert planned.report(documents=53).planned_documents == 105
