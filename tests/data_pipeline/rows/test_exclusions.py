"""Shards that are excluded, and brought back, at any row: every other token once an epoch, in an order that resumes."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.loader import build_loader, open_order
from data_pipeline.rows import blocks
from data_pipeline.rows.blocks import BlockPlanner
from data_pipeline.rows.order import FolderOrder
from data_pipeline.rows.position import Position
from data_pipeline.rows.stream import Stream
from data_pipeline.shards.exclude import exclude, include
from data_pipeline.shards.exclusions import EXCLUSIONS_FILE, lengths_file
from data_pipeline.shards.reader import ShardSet
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.lengths import write_lengths

SEQ_LEN = 128
LENGTHS = [1 + (number * number * 53) % 290 for number in range(240)]
SHARD_TOKENS = 5000
NUM_SHARDS = 7


@pytest.fixture(scope="module")
def whole(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven shards. Read-only: exclude from a copy."""
    folder = tmp_path_factory.mktemp("whole") / "shards"
    shards = write_lengths(folder, tokenizer, LENGTHS, shard_tokens=SHARD_TOKENS)
    assert len(shards.manifest.shards) == NUM_SHARDS
    return folder


@pytest.fixture(scope="module")
def copied(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose list each example sets."""
    return Path(shutil.copytree(whole, tmp_path_factory.mktemp("copied") / "shards"))


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MIN_DOCUMENTS", 60)
    monkeypatch.setattr(blocks, "MIN_ROWS", 4)


def name(number: int) -> str:
    return f"{number:05}.arrow"


def set_list(folder: Path, shards: frozenset[int] | set[int]) -> None:
    """Exclude exactly these."""
    there = set(ShardSet.open(folder).excluded)
    if there - shards:
        include(folder, [name(number) for number in sorted(there - shards)])
    if shards - there:
        exclude(folder, [name(number) for number in sorted(shards - there)], reason="a test")


def order_of(folder: Path, **options: Any) -> FolderOrder:
    order = open_order(folder, SEQ_LEN, **options)[1]
    assert isinstance(order, FolderOrder)
    return order


def take(order: FolderOrder, at: Position, epoch: int) -> tuple[list, Position]:
    """The next row, or none where the epoch ends: its last blocks may be empty."""
    rows, _, stream = Stream(order.planner).take(at.stream, 1, SEQ_LEN, epochs=epoch + 1)
    tokens = sum(stop - start for row in rows for _, start, stop in row)
    return rows, Position(at.rows_consumed + len(rows), at.tokens_consumed + tokens, stream)


def tokens_in(rows: list) -> Counter:
    return Counter((document, token) for row in rows for document, start, stop in row for token in range(start, stop))


def tokens_of(shards: ShardSet, numbers: set[int]) -> Counter:
    """All tokens of these shards, each once."""
    documents = np.arange(len(LENGTHS))
    inside = documents[shards.exclusions.are_in(documents, numbers)]
    return Counter((int(d), token) for d in inside for token in range(LENGTHS[d]))


SETS = st.frozensets(st.integers(0, NUM_SHARDS - 1), max_size=NUM_SHARDS - 1)


class TestFromTheBeginning:
    @settings(max_examples=20)
    @given(excluded=SETS, seed=st.integers(0, 9), shuffle=st.booleans())
    def test_every_token_of_the_others_once_an_epoch(self, copied: Path, excluded: frozenset, seed: int, shuffle: bool):
        set_list(copied, excluded)
        order = order_of(copied, seed=seed, shuffle=shuffle)
        at, epochs = order.start(), [[], []]
        while at.epoch < 2:
            epoch = at.epoch
            rows, at = take(order, at, epoch)
            epochs[epoch] += rows
        wanted = tokens_of(ShardSet.open(copied), set(range(NUM_SHARDS)) - excluded)
        assert [tokens_in(rows) for rows in epochs] == [wanted, wanted]

    def test_others_keep_their_numbers_and_blocks(self, copied: Path, whole: Path):
        set_list(copied, {0, 3})
        shards = ShardSet.open(copied)
        planner, plain = BlockPlanner(shards, SEQ_LEN), BlockPlanner(ShardSet.open(whole), SEQ_LEN)
        assert planner.num_blocks == plain.num_blocks > 1
        for block in range(planner.num_blocks):
            documents = plain.plan(1, block).pieces.documents
            kept = documents[~shards.exclusions.are_in(documents, [0, 3])]
            assert set(planner.plan(1, block).pieces.documents) == set(kept)

    def test_without_a_list_nothing_changes(self, copied: Path, whole: Path):
        set_list(copied, frozenset())
        order, plain = order_of(copied), order_of(whole)
        assert order.rows(order.start(), 300)[0] == plain.rows(plain.start(), 300)[0]
        assert order.state(order.start()) == plain.state(plain.start())
        assert not {"excluded", "before"} & order.state(order.start()).keys()
        assert not list(copied.glob("*.lengths"))


def run_through(
    folder: Path, changes: list[tuple[int, frozenset[int]]], seed: int, options: dict[str, Any]
) -> tuple[list[tuple[frozenset[int], list]], FolderOrder]:
    """The rows of epoch 0, each part under its list: a list holds until so many more rows were taken."""
    parts, state = [], None
    order = None
    for rows_until, excluded in [*changes, (-1, changes[-1][1])]:
        set_list(folder, excluded)
        order = order_of(folder, seed=seed, **options)
        at = order.start()
        if state is not None:
            # As a checkpoint has it.
            at = order.read(json.loads(json.dumps(state)), when_changed="go_on")
        rows: list = []
        while at.epoch == 0 and len(rows) != rows_until:
            more, at = take(order, at, 0)
            rows += more
        parts.append((excluded, rows))
        state = order.state(at)
        assert len(json.dumps(state)) < 1024
        if at.epoch:
            break
    assert order is not None
    return parts, order


class TestInMidEpoch:
    @pytest.mark.slow
    @settings(max_examples=40, deadline=None)
    @given(
        changes=st.lists(st.tuples(st.integers(0, 60), SETS), min_size=1, max_size=4),
        seed=st.integers(0, 3),
        shuffle=st.booleans(),
    )
    def test_no_token_of_others_is_lost_or_repeated(self, copied: Path, changes: list, seed: int, shuffle: bool):
        """Lists come and go at any row: what was never on one stands in the epoch once, nothing stands there twice."""
        parts, _ = run_through(copied, changes, seed, {"shuffle": shuffle})
        shards = ShardSet.open(copied)
        found = Counter()
        for excluded, rows in parts:
            taken = tokens_in(rows)
            assert not shards.exclusions.are_in(np.array([d for d, _ in taken], np.int64), sorted(excluded)).any()
            found += taken
        assert max(found.values()) == 1
        never = set(range(NUM_SHARDS)) - set().union(*(excluded for excluded, _ in parts))
        for token in tokens_of(shards, never):
            assert found[token] == 1

    @pytest.mark.slow
    @settings(max_examples=20, deadline=None)
    @given(first=st.integers(0, 150), excluded=SETS, more=st.integers(0, 20))
    def test_what_is_brought_back_within_its_block_is_not_lost(self, copied, first, excluded, more):
        set_list(copied, frozenset())
        order = order_of(copied)
        _, at = order.rows(order.start(), first)
        begun = at.stream
        parts, _ = run_through(copied, [(first, frozenset()), (more, excluded), (-1, frozenset())], 0, {})
        before = sum(len(rows) for _, rows in parts[:2])
        set_list(copied, frozenset())
        # Only where the exclusion was undone before the next block began.
        order = order_of(copied)
        left = order.planner.plan(begun.epoch, begun.block).num_rows - begun.block_row
        if begun.epoch == 0 and before == first + more and more < left * (1 - len(excluded) / NUM_SHARDS) / 2:
            found = tokens_in([row for _, rows in parts for row in rows])
            assert found == tokens_of(ShardSet.open(copied), set(range(NUM_SHARDS)))

    def test_a_run_that_stops_again_and_again_goes_on_as_one_that_does_not(self, copied: Path):
        set_list(copied, frozenset())
        order = order_of(copied)
        _, at = order.rows(order.start(), 30)
        state = order.state(at)
        set_list(copied, {1, 4})
        order = order_of(copied)
        at = order.read(state, when_changed="go_on")
        rows, _ = order.rows(at, 300)
        again: list = []
        for _ in range(60):
            # The list is the state's now: nothing has to be allowed.
            at = order_of(copied).read(json.loads(json.dumps(order.state(at))))
            more, at = order_of(copied).rows(at, 5)
            again += more
        assert again == rows

    @pytest.mark.parametrize("damage", ["tokens", "gone"])
    def test_a_shard_that_dies_in_mid_epoch(self, copied: Path, damage: str):
        """Its tokens cannot be read any more, or nothing of it once it is on the list."""
        set_list(copied, frozenset())
        loader = build_loader(copied, seq_len=SEQ_LEN, rows_per_step=2)
        for _ in range(15):
            next(loader)
        state = loader.state_dict()
        path = copied / name(2)
        content = path.read_bytes()
        try:
            set_list(copied, {2})
            if damage == "tokens":
                path.write_bytes(content[:-1000])
            else:
                path.unlink()
                path.with_suffix(".sums").rename(copied / "kept")
            loader = build_loader(copied, seq_len=SEQ_LEN, rows_per_step=2)
            with pytest.raises(DataError, match=rf"{name(2)} came onto the list of excluded shards .*\n.*=go_on"):
                loader.load_state_dict(state)
            loader.load_state_dict(state, when_changed="go_on")
            while not loader.epoch:
                next(loader)
        finally:
            path.write_bytes(content)
            if (copied / "kept").exists():
                (copied / "kept").rename(path.with_suffix(".sums"))


class TestWithoutLengths:
    """Where nobody could read the lengths of an excluded shard any more."""

    @pytest.fixture
    def lost(self, whole: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
        folder = Path(shutil.copytree(whole, tmp_path / "lost"))
        order = order_of(folder)
        _, at = order.rows(order.start(), 70)
        assert at.stream.block > 0 < at.stream.block_row
        (folder / name(5)).unlink()
        exclude(folder, [name(5)], reason="gone")
        assert not (folder / lengths_file(name(5))).exists()
        return folder, order.state(at)

    def test_the_block_under_way_cannot_go_on(self, lost: tuple[Path, dict[str, Any]]):
        folder, state = lost
        with pytest.raises(DataError, match=r"00005\.arrow is excluded, and its documents' .*\n.*=next_block"):
            order_of(folder).read(state, when_changed="go_on")

    def test_the_next_one_does(self, lost: tuple[Path, dict[str, Any]]):
        folder, state = lost
        order = order_of(folder)
        at = order.read(state, when_changed="next_block")
        assert (at.stream.block, at.stream.block_row, at.stream.epoch_row) == (state["block"] + 1, 0, 70)
        assert (at.rows_consumed, at.tokens_consumed) == (70, state["tokens_consumed"])
        rows = []
        while not at.epoch:
            more, at = take(order, at, 0)
            rows += more
        left = {
            int(d)
            for block in range(state["block"] + 1, order.planner.num_blocks)
            for d in order.planner.documents(0, block)
        }
        shards = ShardSet.open(folder)
        wanted = tokens_of(shards, set(range(NUM_SHARDS)) - {5})
        assert tokens_in(rows) == Counter({key: 1 for key in wanted if key[0] in left})

    def test_a_new_run_needs_none(self, lost: tuple[Path, dict[str, Any]]):
        order = order_of(lost[0])
        rows, _ = order.rows(order.start(), 50)
        assert len(rows) == 50


class TestStates:
    @pytest.fixture
    def state(self, copied: Path) -> dict[str, Any]:
        set_list(copied, frozenset())
        order = order_of(copied)
        state = order.state(order.rows(order.start(), 20)[1])
        set_list(copied, {1})
        order = order_of(copied)
        return order.state(order.rows(order.read(state, when_changed="go_on"), 3)[1])

    def test_says_what_was_taken_under_which_list(self, state: dict[str, Any]):
        assert state["excluded"] == [1]
        assert state["before"] == [[SEQ_LEN, 20]]
        assert (state["block_row"], state["epoch_row"]) == (3, 23)

    def test_a_list_that_was_removed_is_refused(self, state: dict[str, Any], copied: Path):
        (copied / EXCLUSIONS_FILE).unlink()
        with pytest.raises(DataError, match=r"00001\.arrow went from the list of excluded shards since"):
            order_of(copied).read(state)

    @pytest.mark.parametrize(
        "damage",
        [
            lambda state: state.update(excluded=[NUM_SHARDS]),
            lambda state: state.update(excluded=[1, 1]),
            lambda state: state.update(excluded=[True]),
            lambda state: state.update(excluded="1"),
            lambda state: state.update(before=[[SEQ_LEN]]),
            lambda state: state.update(before=[[SEQ_LEN, 20, [99]]]),
            lambda state: state.update(before=[[SEQ_LEN, 0]]),
            lambda state: state.update(before=[[SEQ_LEN, 5000]], epoch_row=5003),
            lambda state: state.update(before=[]),
        ],
    )
    def test_a_damaged_one_is_refused(self, state: dict[str, Any], copied: Path, damage: Callable):
        damage(state)
        with pytest.raises(DataError, match="damaged"):
            order_of(copied).read(state)


MIXTURE = """
[[sources]]
name = "one"
path = "one"
epochs = 1
[[sources]]
name = "two"
path = "two"
weight = 2
epochs = 1
upsample = [{ min_tokens = 200, factor = 2 }]
[[stages]]
from_tokens = 3000
row_tokens = 64
"""


class TestMixtures:
    @pytest.fixture(scope="class")
    def mixture(self, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("mixture")
        for source in ("one", "two"):
            shutil.copytree(whole, folder / source)
        (folder / "mixture.toml").write_text(
            MIXTURE.replace('[[sources]]\nname = "one"', '[[sources]]\nweight = 1\nname = "one"')
        )
        return folder / "mixture.toml"

    @pytest.mark.slow
    @settings(max_examples=25, deadline=None)
    @given(row=st.integers(0, 250), one=SETS, two=SETS, again=st.integers(0, 60))
    def test_no_token_of_others_is_lost_or_repeated(self, mixture: Path, row: int, one, two, again: int):
        folder = mixture.parent
        lists = [(frozenset(), frozenset()), (one, two), (two, one)]
        rows, state = [], None
        for number, (first, second) in enumerate(lists):
            set_list(folder / "one", first)
            set_list(folder / "two", second)
            order = open_order(mixture, SEQ_LEN)[1]
            at = order.start()
            if state is not None:
                at = order.read(json.loads(json.dumps(state)), when_changed="go_on")
            count = [row, again, 10**6][number]
            with contextlib.suppress(DataError):  # used up
                for _ in range(count):
                    more, at = order.rows(at, 1)
                    rows += more
            state = order.state(at)
        found = tokens_in(rows)
        shards = ShardSet.open(folder / "one")
        never = set(range(NUM_SHARDS)) - one - two
        for (document, token), times in tokens_of(shards, never).items():
            assert found[document, token] == times
            twice = 1 + (LENGTHS[document] >= 200)
            assert found[len(LENGTHS) + document, token] == twice
        assert all(
            times <= 1 + (d >= len(LENGTHS) and LENGTHS[d - len(LENGTHS)] >= 200) for (d, _), times in found.items()
        )

    def test_a_source_of_another_list_is_refused_by_name(self, mixture: Path):
        folder = mixture.parent
        for source in ("one", "two"):
            set_list(folder / source, frozenset())
        order = open_order(mixture, SEQ_LEN)[1]
        state = order.state(order.rows(order.start(), 10)[1])
        set_list(folder / "two", {6})
        with pytest.raises(DataError, match=r"two: 00006\.arrow came onto the list of excluded shards"):
            open_order(mixture, SEQ_LEN)[1].read(state)
