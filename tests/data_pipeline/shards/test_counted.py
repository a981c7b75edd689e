"""Shards that say which tokens count: read as written, and refused if somebody made up the runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.inspect import describe, find_problems
from data_pipeline.prepare.shard_removal import remove_shards
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_writer import runs_of
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from tests.bounded import refusal
from tests.data_pipeline.lengths import flip_bit, write_lengths
from tests.data_pipeline.shards.test_hostile_shards import forge, seal

LENGTHS = [1, 40, 500, 3, 77, 200]


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    return write_lengths(tmp_path / "shards", tokenizer, LENGTHS, shard_tokens=500, masked=True).folder


@given(st.lists(st.booleans(), max_size=60))
def test_runs_are_where_the_mask_changes(mask):
    bounds = runs_of(np.array(mask, bool))
    found = np.zeros(len(mask), bool)
    for start, stop in bounds.reshape(-1, 2):
        assert start < stop
        found[start:stop] = True
    assert found.tolist() == mask
    assert (np.diff(bounds) > 0).all(), "runs that touch are one"


def test_a_folder_is_read_as_it_was_written(folder: Path):
    shards = ShardSet.open(folder)
    total = 0
    for number, length in enumerate(LENGTHS):
        bounds = shards.target_runs(number)
        assert bounds is not None
        assert (np.diff(bounds) > 0).all()
        assert bounds.max(initial=0) <= length
        total += int(bounds[1::2].sum() - bounds[::2].sum())
    assert total == shards.manifest.num_targets == describe(folder).counted_tokens
    assert 0 < total < sum(LENGTHS)
    assert find_problems(folder) == []


def test_plain_pyarrow_reads_the_runs(folder: Path):
    with pa.memory_map(str(folder / "00000.arrow")) as file:
        column = pa.ipc.open_file(file).get_batch(0).column("counted")
    assert column.type == pa.large_list(pa.int64())
    bounds = ShardSet.open(folder).target_runs(0)
    assert bounds is not None
    assert column[0].as_py() == bounds.tolist()


def test_such_a_folder_is_of_version_2_and_others_stay_of_version_1(folder: Path, tokenizer: Tokenizer, tmp_path: Path):
    others = write_lengths(tmp_path / "texts", tokenizer, LENGTHS)
    assert (Manifest.load(folder).version, others.manifest.version) == (2, 1)
    assert not others.is_masked
    assert others.target_runs(0) is None
    assert "counted" not in (tmp_path / "texts" / "manifest.json").read_text()


def test_shards_that_stay_keep_their_counts(folder: Path):
    shards = ShardSet.open(folder)
    before = shards.target_runs(shards.manifest.shards[0].documents)
    left = remove_shards(folder, ["00000.arrow"])
    after = ShardSet.open(folder).target_runs(0)
    assert before is not None
    assert after is not None
    assert before.tolist() == after.tolist()
    assert left.manifest.num_targets == sum(entry.counted for entry in left.manifest.shards)
    assert find_problems(folder) == []


def test_a_flipped_bit_of_the_runs_is_named(folder: Path):
    path = folder / "00002.arrow"
    # All tokens of the fourth document count.
    bounds = ShardSet.open(folder).target_runs(3)
    assert bounds is not None
    assert bounds.tolist() == [0, LENGTHS[3]]
    flip_bit(path, path.read_bytes().rfind(bounds.tobytes()))
    shards = ShardSet.open(folder)
    with pytest.raises(DataError, match=r"00002\.arrow is damaged"):
        shards.target_runs(3)


RUNS: dict[str, tuple[pa.Array, str]] = {
    "an odd number of bounds": (pa.array([[0, 1, 2]], pa.large_list(pa.int64())), "are not valid spans"),
    "descending": (pa.array([[2, 1]], pa.large_list(pa.int64())), "are not valid spans"),
    "empty runs": (pa.array([[1, 1]], pa.large_list(pa.int64())), "are not valid spans"),
    "before the document": (pa.array([[-1, 2]], pa.large_list(pa.int64())), "are not valid spans"),
    "behind the document": (pa.array([[0, 4]], pa.large_list(pa.int64())), "are not valid spans"),
    "far behind": (pa.array([[0, 2**62]], pa.large_list(pa.int64())), "are not valid spans"),
    "of another type": (pa.array([[0, 1]], pa.large_list(pa.int32())), "its counted tokens are"),
    "no list": (pa.array([1], pa.int64()), "its counted tokens are int64"),
    "a missing value": (pa.array([None], pa.large_list(pa.int64())), "a value is missing"),
    "a missing bound": (pa.array([[0, None]], pa.large_list(pa.int64())), "cannot be read"),
}


@pytest.mark.parametrize("forgery", RUNS)
def test_what_are_no_runs_is_refused(tokenizer: Tokenizer, tmp_path: Path, forgery: str):
    column, said = RUNS[forgery]
    folder = forge(tmp_path / "f", tokenizer, {"counted": column})
    assert said in refusal(lambda: ShardSet.open(folder).target_runs(0))
    problems = find_problems(folder)
    assert problems
    assert said in problems[0]


def test_a_manifest_that_counts_otherwise_is_found(tokenizer: Tokenizer, tmp_path: Path):
    folder = forge(tmp_path / "f", tokenizer, {"counted": pa.array([[0, 2]], pa.large_list(pa.int64()))})
    manifest = Manifest.load(folder)

    def sealed(counted: int) -> None:
        entry: Any = dataclasses.replace(manifest.shards[0], counted=counted)
        seal(folder, dataclasses.replace(manifest, shards=[entry]))

    assert "has 2 counted tokens, but manifest.json lists 0" in find_problems(folder)[0]
    sealed(2)
    assert find_problems(folder) == []
    sealed(3)
    assert "has 2 counted tokens, but manifest.json lists 3" in find_problems(folder)[0]
    sealed(4)
    assert "counted=4 exceeds its 3 tokens" in refusal(lambda: ShardSet.open(folder))


def test_a_manifest_of_a_mask_beside_shards_without_one_is_refused(tokenizer: Tokenizer, tmp_path: Path):
    folder = forge(tmp_path / "f", tokenizer)
    manifest = Manifest.load(folder)
    seal(folder, dataclasses.replace(manifest, shards=[dataclasses.replace(manifest.shards[0], counted=1)]))
    assert "has no counted tokens" in refusal(lambda: ShardSet.open(folder).document(0))
