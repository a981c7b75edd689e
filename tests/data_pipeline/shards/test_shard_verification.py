"""Which shards are read again: stamps, what makes one invalid, and how files are dealt out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from data_pipeline.shards.file_states import (
    _mount_of,
    cache_folder,
    cheapest_state,
    file_state,
    open_file_state,
    place_of,
)
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_verification import FolderCheck, assign_shards, open_validated
from longctx.errors import DataError
from longctx.files import hash_file
from tests.data_pipeline.lengths import flip_bit, strip_sums

YEAR_2001 = 10**18


@pytest.fixture
def settled(damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shard folder whose files seem to have changed long ago, and an empty cache."""
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("data_pipeline.shards.shard_verification._MIN_AGE_NANOSECONDS", -(10**12))
    return damaged


def check(folder: Path, verify: str = "start") -> FolderCheck:
    return FolderCheck(folder, Manifest.load(folder), verify)  # type: ignore[arg-type]


def pending(folder: Path, verify: str = "start") -> list[str]:
    return [entry.file for entry in check(folder, verify).pending]


def files(folder: Path) -> list[str]:
    return [entry.file for entry in Manifest.load(folder).shards]


def test_a_file_is_read_once_and_again_when_asked(settled: Path):
    assert len(files(settled)) > 1
    assert pending(settled) == files(settled)
    check(settled).save_file_states()
    assert pending(settled) == []
    assert pending(settled, "off") == []


def test_what_is_checked_as_it_is_read_is_not_read_before(settled: Path):
    assert pending(settled, "read") == []
    assert not check(settled, "read").missing_checksum
    strip_sums(settled)
    assert check(settled, "read").missing_checksum
    assert pending(settled, "read") == files(settled)
    check(settled, "read").save_file_states()
    assert pending(settled, "read") == pending(settled, "start") == []
    assert pending(settled, "off") == []


def test_the_sums_of_a_shard_are_read_with_it(settled: Path):
    (settled / "00001.sums").write_bytes(b"")
    problems = [check(settled).problem(entry) for entry in check(settled).pending]
    assert [problem is None for problem in problems] == [True, False, *[True] * (len(problems) - 2)]
    assert "00001.sums is damaged" in str(problems[1])


def test_a_read_only_folder_stays_as_it_is(settled: Path):
    before = sorted(path.name for path in settled.rglob("*"))
    check(settled).save_file_states()
    assert sorted(path.name for path in settled.rglob("*")) == before
    stamps = list((cache_folder() / "shards").iterdir())
    assert [json.loads(path.read_text())["folder"] for path in stamps] == [str(settled.resolve())]


class TestStampsGoStale:
    def test_other_bytes_of_the_same_size(self, settled: Path):
        check(settled).save_file_states()
        flip_bit(settled / "00001.arrow", 5000)
        os.utime(settled / "00001.arrow", ns=(YEAR_2001, YEAR_2001 + 1))
        assert pending(settled) == ["00001.arrow"]
        assert [check(settled).problem(entry) is None for entry in check(settled).pending] == [False]

    def test_other_bytes_under_the_old_modification_time(self, settled: Path):
        path = settled / "00001.arrow"
        os.utime(path, ns=(YEAR_2001, YEAR_2001))
        check(settled).save_file_states()
        flip_bit(path, 5000)
        os.utime(path, ns=(YEAR_2001, YEAR_2001))
        assert path.stat().st_mtime_ns == YEAR_2001
        assert pending(settled) == ["00001.arrow"]

    def test_a_file_put_in_its_place(self, settled: Path):
        path = settled / "00000.arrow"
        check(settled).save_file_states()
        content = path.read_bytes()
        path.rename(settled / "old")
        path.write_bytes(content)
        assert pending(settled) == ["00000.arrow"]

    def test_damaged_stamps_are_none(self, settled: Path):
        check(settled).save_file_states()
        path = next((cache_folder() / "shards").iterdir())
        whole = path.read_text()
        for content in ("", "[]", "{}", whole[:50], whole.replace("stamps-1", "stamps-2"), '{"format": 1, "files": 3}'):
            path.write_text(content)
            assert pending(settled) == files(settled)

    def test_a_change_of_this_second_gets_no_stamp(self, settled: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("data_pipeline.shards.shard_verification._MIN_AGE_NANOSECONDS", 3600 * 10**9)
        check(settled).save_file_states()
        assert pending(settled) == files(settled)


def test_a_missing_file_is_named(settled: Path):
    (settled / "00001.arrow").unlink()
    with pytest.raises(DataError, match=r"00001\.arrow cannot be read \(No such file"):
        check(settled)


def test_a_cache_that_cannot_be_written_is_named(settled: Path):
    cache_folder().write_text("a file stands there")
    with pytest.raises(DataError, match="could not be written"):
        check(settled).save_file_states()


def test_a_process_on_its_own_reads_a_file_once(settled: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    monkeypatch.setattr(
        "data_pipeline.shards.shard_verification.hash_file", lambda path: read.append(path.name) or hash_file(path)
    )
    assert open_validated(settled).verifies_reads
    assert read == [], "nothing, where reads are checked"
    open_validated(settled, whole=True)
    assert read == files(settled)
    open_validated(settled, whole=True)
    assert read == files(settled)
    read.clear()
    strip_sums(settled)
    assert open_validated(settled).document(0).tolist() == ShardSet.open(settled).document(0).tolist()
    assert read == files(settled)
    open_validated(settled)
    assert read == files(settled)
    flip_bit(settled / "00001.arrow", 5000)
    with pytest.raises(DataError, match=r"00001\.arrow is damaged"):
        open_validated(settled)
    assert read == [*files(settled), "00001.arrow"]


def test_views_tell_copies_and_what_is_left_apart(settled: Path, tmp_path: Path):
    import shutil

    same = check(settled).view
    assert check(settled).view == same
    copy = Path(shutil.copytree(settled, tmp_path / "copy"))
    assert check(copy).view != same
    check(settled).save_file_states()
    assert check(settled).view != same


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("ext4", file_state),
        ("tmpfs", file_state),
        ("nfs4", open_file_state),
        ("overlay", open_file_state),
        (None, open_file_state),
    ],
)
def test_a_file_is_opened_unless_its_own_machine_has_it(tmp_path: Path, monkeypatch, kind: str | None, way):
    """And hosts that see one network file system name its bytes alike."""
    device = tmp_path.stat().st_dev
    lines = ["1 2 0:0 / /elsewhere rw - nfs server:/data rw"]
    if kind is not None:
        lines.append(f"1 2 {os.major(device)}:{os.minor(device)} / {tmp_path} rw shared:1 - {kind} server:/data rw")
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a: "\n".join(lines) if path.name == "mountinfo" else read(path, *a)
    )
    _mount_of.cache_clear()
    try:
        assert cheapest_state(tmp_path) is way
        place = place_of(tmp_path)
    finally:
        _mount_of.cache_clear()
    assert place == "nfs4 server:/data" if kind == "nfs4" else f"device {device}" in place
    (tmp_path / "file").write_bytes(b"some")
    assert file_state(tmp_path / "file") == open_file_state(tmp_path / "file")


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_files_are_dealt_out_once_and_evenly(parts: int):
    sizes = [7, 7, 7, 1, 30, 2, 2, 5, 0, 11]
    shares = assign_shards(sizes, parts)
    assert sorted(number for share in shares for number in share) == list(range(len(sizes)))
    loads = [sum(sizes[n] for n in share) for share in shares]
    # Largest first: nobody has more than the mean and one item.
    assert max(loads) <= sum(sizes) / parts + max(sizes)
    assert assign_shards([], parts) == [[]] * parts
