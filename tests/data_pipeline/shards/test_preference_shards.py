"""Shards of preferences and their references: read as written, and refused if damaged or of another folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.inspect import describe, find_problems
from data_pipeline.prepare.publish import pack_folder
from data_pipeline.prepare.shard_removal import remove_shards
from data_pipeline.shards.manifest import REFERENCES_FILE, Manifest
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.references import read_references, write_references
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from tests.bounded import refusal
from tests.data_pipeline.lengths import flip_bit
from tests.data_pipeline.preference_records import Sizes, ids_of, write_preferences
from tests.data_pipeline.shards.test_hostile_shards import seal

SIZES: list[Sizes] = [(1, 1, 1), (40, 3, 50), (7, 200, 9), (2, 2, 90), (500, 4, 4)]
SUMS_N2 = -np.arange(10.0).reshape(5, 2)


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    return write_preferences(tmp_path / "shards", tokenizer, SIZES, labels=[1, 0, 0, 1, 1]).folder


def test_a_folder_is_read_as_it_was_written(folder: Path, tokenizer: Tokenizer):
    shards = ShardSet.open(folder)
    manifest = shards.manifest
    assert (manifest.version, manifest.kind, manifest.has_labelled_replies) == (4, "preferences", True)
    assert not manifest.has_sources
    assert not shards.is_masked
    assert len(manifest.shards) > 1
    numbers = np.arange(len(SIZES))
    assert shards.lengths_of(numbers, "source").tolist() == [size[0] for size in SIZES]
    assert shards.second_starts(numbers[::-1]).tolist() == [size[1] for size in SIZES][::-1]
    assert [shards.label(n) for n in range(len(SIZES))] == [1, 0, 0, 1, 1]
    for number, sizes in enumerate(SIZES):
        prompt, first, second = ids_of(number, sizes, tokenizer.vocab_size)
        assert shards.slices([(number, 0, 1000)], "source")[0].tolist() == prompt.tolist()
        assert shards.document(number).tolist() == [*first, *second]
    assert find_problems(folder) == []


def test_plain_pyarrow_reads_the_columns(folder: Path):
    with pa.memory_map(str(folder / "00000.arrow")) as file:
        batch = pa.ipc.open_file(file).get_batch(0)
    assert batch.schema.field("second").type == pa.int64()
    assert batch.column("second").to_pylist() == [size[1] for size in SIZES[: len(batch)]]
    assert batch.column("label").type == pa.int32()


def test_a_flipped_bit_of_a_second_start_is_named(folder: Path):
    path = folder / "00000.arrow"
    seconds = np.array([size[1] for size in SIZES[: ShardSet.open(folder).manifest.shards[0].documents]], np.int64)
    flip_bit(path, path.read_bytes().rfind(seconds.tobytes()))
    with pytest.raises(DataError, match=r"00000\.arrow is damaged"):
        ShardSet.open(folder).second_starts(np.array([0]))
    assert find_problems(folder)


def test_starts_are_verified_by_their_own_blocks(tokenizer: Tokenizer, tmp_path: Path):
    """Far from the tokens' offsets, which are verified with them."""
    folder = write_preferences(tmp_path / "many", tokenizer, [(1, 1, 2)] * 20_000, shard_tokens=1 << 20).folder
    path = folder / "00000.arrow"
    flip_bit(path, path.read_bytes().rfind(np.ones(20_000, np.int64).tobytes()) + 8 * 10_000)
    with pytest.raises(DataError, match=r"00000\.arrow is damaged: bytes"):
        ShardSet.open(folder).second_starts(np.array([10_000]))


FORGED: dict[str, tuple[dict[str, pa.Array | None], str]] = {
    "behind its tokens": ({"second": pa.array([3], pa.int64())}, "is not within its tokens"),
    "an empty reply": ({"second": pa.array([0], pa.int64())}, "is not within its tokens"),
    "negative": ({"second": pa.array([-1], pa.int64())}, "is not within its tokens"),
    "another type": ({"second": pa.array([1], pa.int32())}, "its starts of second replies are int32"),
    "no starts": ({"second": None}, "contains images, which"),
    "no label": ({"label": None}, "contains preferences, which"),
    "no prompt": ({"source_tokens": None}, "with 2 source tokens"),
    "an empty prompt": ({"source_tokens": pa.array([[]], pa.large_list(pa.uint16()))}, "with 2 source tokens"),
    "another label": ({"label": pa.array([2], pa.int32())}, "label 2 in r0, which is neither 0 nor 1"),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_what_are_no_preferences_is_refused(tokenizer: Tokenizer, tmp_path: Path, forgery: str):
    changed, said = FORGED[forgery]
    shards = write_preferences(tmp_path / "shards", tokenizer, [(2, 1, 2)])
    path = shards.folder / "00000.arrow"
    batch = pa.ipc.open_file(pa.py_buffer(path.read_bytes())).get_batch(0)
    columns = {name: changed.get(name, column) for name, column in zip(batch.schema.names, batch, strict=True)}
    batch = pa.record_batch({name: column for name, column in columns.items() if column is not None})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as arrow:
        arrow.write_batch(batch)
    seal(shards.folder, shards.manifest)
    assert any(said in problem for problem in find_problems(shards.folder)), find_problems(shards.folder)
    if forgery != "another label":
        assert said in refusal(lambda: ShardSet.open(shards.folder).second_starts(np.array([0])))


def test_a_manifest_of_preferences_needs_prompts(folder: Path):
    manifest = Manifest.load(folder)
    entries = [dataclasses.replace(entry, source_tokens=0) for entry in manifest.shards]
    dataclasses.replace(manifest, shards=entries).save(folder)
    assert "cannot hold a prompt and two replies" in refusal(lambda: Manifest.load(folder))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(values=st.lists(st.tuples(*[st.floats(-1e300, 0, allow_subnormal=False)] * 2), min_size=5, max_size=5))
def test_references_come_back_bit_for_bit(folder: Path, values):
    write_references(folder, np.array(values), {"weights": "w", "step": 3})
    found = ShardSet.open(folder).references
    assert found is not None
    assert found.sums_N2.tolist() == [list(pair) for pair in values]
    assert found.origin == {"weights": "w", "step": 3}


def test_references_are_replaced_and_shown(folder: Path):
    assert ShardSet.open(folder).references is None
    manifest_hash = Manifest.load(folder).hash
    for origin in ({"weights": "first"}, {"weights": "second", "date": "2026-11-30"}):
        write_references(folder, SUMS_N2, origin)
        found = describe(folder).preferences
        assert found is not None
        assert found.reference == origin
    assert Manifest.load(folder).hash == manifest_hash
    assert find_problems(folder) == []
    assert sorted(path.name for path in folder.iterdir() if "reference" in path.name) == [REFERENCES_FILE]


def test_a_packed_folder_keeps_its_references(folder: Path, tmp_path: Path):
    write_references(folder, SUMS_N2, {"weights": "w"})
    pack_folder(folder, tmp_path / "packed", overwrite=False, say=lambda _: None)
    shards = ShardSet.open(tmp_path / "packed", cache=str(tmp_path / "cache"))
    assert shards.second_starts(np.arange(5)).tolist() == [size[1] for size in SIZES]
    assert shards.references is not None
    assert shards.references.sums_N2.tolist() == SUMS_N2.tolist()
    assert find_problems(tmp_path / "packed") == []


def test_references_of_other_shards_are_refused(folder: Path, tokenizer: Tokenizer, tmp_path: Path):
    write_references(folder, SUMS_N2, {})
    other = write_preferences(tmp_path / "other", tokenizer, SIZES[::-1])
    (other.folder / REFERENCES_FILE).write_bytes((folder / REFERENCES_FILE).read_bytes())
    with pytest.raises(DataError, match=f"belongs to other shards.*{other.manifest.hash}"):
        read_references(other.folder, other.manifest)
    remove_shards(folder, ["00000.arrow"])
    with pytest.raises(DataError, match="belongs to other shards"):
        _ = ShardSet.open(folder).references
    assert any("belongs to other shards" in problem for problem in find_problems(folder))


def test_damaged_references_are_refused(folder: Path):
    write_references(folder, SUMS_N2, {"weights": "w"})
    path = folder / REFERENCES_FILE
    content = path.read_bytes()
    flip_bit(path, content.find(SUMS_N2[:, 0].tobytes()) + 8)
    with pytest.raises(DataError, match="is damaged"):
        _ = ShardSet.open(folder).references
    path.write_bytes(content.replace(b'\\"weights\\"', b'\\"WEIGHTS\\"').replace(b'"weights"', b'"WEIGHTS"'))
    assert "is damaged" in refusal(lambda: ShardSet.open(folder).references)
    for cut in (0, 10, len(content) // 2):
        path.write_bytes(content[:cut])
        assert REFERENCES_FILE in refusal(lambda: ShardSet.open(folder).references)


def test_what_are_no_references_is_not_written(folder: Path, built: Path):
    for sums_N2, said in (
        (SUMS_N2[:3], "has 5 records"),
        (SUMS_N2[:, :1], "have shape"),
        (SUMS_N2 + np.inf, "record 0"),
    ):
        assert said in refusal(lambda sums_N2=sums_N2: write_references(folder, sums_N2, {}))
    assert "contains no preferences" in refusal(lambda: write_references(built, SUMS_N2, {}))
    assert not (folder / REFERENCES_FILE).exists()
