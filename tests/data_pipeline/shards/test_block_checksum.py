"""Sums of blocks: what they are, that a read checks what it touches and nothing more, that no flipped bit passes."""

from __future__ import annotations

import platform
import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.inspect import find_problems
from data_pipeline.loader import build_loader
from data_pipeline.shards.block_checksum import (
    BLOCK_BYTES,
    RECOVERY_HINT,
    ChecksumBlocks,
    checksum_blocks,
    mismatched_ranges,
)
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_verification import FolderCheck, open_validated
from data_pipeline.shards.shard_writer import EncodedDocument, ShardWriter
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.lengths import flip_bit, read_all, strip_sums, write_lengths
from tests.data_pipeline.shards.test_shards import edit, mapped

LENGTHS = [70_000, 3, 40_000, 1, 9, 30_000, 20, 50_000, 1, 1, 20_000, 5]
FLIPS = 200


@pytest.fixture(scope="module")
def wide(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of several blocks each. Read-only: damage a copy."""
    folder = tmp_path_factory.mktemp("wide") / "shards"
    write_lengths(folder, tokenizer, LENGTHS, shard_tokens=120_000)
    return folder


@pytest.fixture
def copied(wide: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(wide, tmp_path / "copied"))


def touched(shards: ShardSet, number: int) -> list[int]:
    """The blocks of a shard that were found right."""
    return [block for block, seen in enumerate(shards._mapped[number]._blocks.seen) if seen]


class TestFormat:
    def test_a_checksum_for_each_64_kib(self, wide: Path):
        manifest = Manifest.load(wide)
        assert len(manifest.shards) > 1
        for entry in manifest.shards:
            content = (wide / entry.file).read_bytes()
            blocks = [content[start : start + 65_536] for start in range(0, len(content), 65_536)]
            assert len(blocks) > 2
            written = (wide / entry.file).with_suffix(".sums").read_bytes()
            assert np.frombuffer(written, "<u8").tolist() == [xxhash.xxh3_64_intdigest(block) for block in blocks]
            assert entry.sums == xxhash.xxh3_128_hexdigest(written)

    @given(size=st.sampled_from([0, 1, 65_535, 65_536, 65_537, 64 * 65_536, 64 * 65_536 + 1, 9_000_000]))
    def test_of_files_of_odd_sizes(self, size: int, tmp_path_factory: pytest.TempPathFactory):
        path = tmp_path_factory.mktemp("odd") / "file"
        content = np.random.default_rng(size).bytes(size)
        path.write_bytes(content)
        whole, sums = checksum_blocks(path)
        assert whole == xxhash.xxh3_128_hexdigest(content)
        wanted = [xxhash.xxh3_64_intdigest(content[at : at + BLOCK_BYTES]) for at in range(0, size, BLOCK_BYTES)]
        assert sums.tolist() == wanted

    def test_neighbouring_damage_is_one_range(self):
        found, listed = np.array([1, 2, 3, 4, 5]), np.array([1, 0, 0, 4, 0])
        assert mismatched_ranges(found, listed, 4 * 65_536 + 10) == [(65_536, 196_608), (262_144, 262_154)]
        assert mismatched_ranges(found, found, 10) == []


class TestOlderFolders:
    def test_they_keep_their_hash_and_open(self, copied: Path, wide: Path):
        strip_sums(copied)
        manifest = Manifest.load(copied)
        assert not manifest.has_block_checksum
        assert all("sums" not in entry for entry in manifest.to_json()["shards"])
        shards = ShardSet.open(copied)
        assert not shards.verifies_reads
        assert read_all(shards) == read_all(ShardSet.open(wide))
        assert find_problems(copied) == []

    def test_they_are_read_whole_where_nobody_else_does(self, copied: Path, tmp_path: Path, monkeypatch):
        monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
        strip_sums(copied)
        assert build_loader(copied, seq_len=64, rows_per_step=1).shards.num_documents == len(LENGTHS)
        flip_bit(copied / "00001.arrow", 70_000, 3)
        for opened in (open_validated, lambda folder: build_loader(folder, seq_len=64, rows_per_step=1)):
            with pytest.raises(DataError, match=r"00001\.arrow is damaged"):
                opened(copied)

    def test_sums_of_some_shards_are_refused(self, copied: Path):
        edit(copied / "manifest.json", lambda body: body["shards"][0].pop("sums"), seal=True)
        with pytest.raises(DataError, match=r"00001\.arrow has block checksums, but other shards do not"):
            Manifest.load(copied)


class TestNothingMoreIsTouched:
    def test_a_start_reads_the_manifest_alone(self, copied: Path):
        opened: list[str] = []
        is_on = True

        def watch(event: str, arguments: tuple) -> None:
            if is_on and event == "open" and str(copied) in str(arguments[0]):
                opened.append(Path(arguments[0]).name)

        # There is no way to take such a hook away.
        sys.addaudithook(watch)
        shards = ShardSet.open(copied)
        check = FolderCheck(copied, shards.manifest, "read")
        loader = build_loader(shards, seq_len=64, rows_per_step=1)
        assert (opened, mapped(copied), check.pending) == (["manifest.json"], 0, [])
        # The first plan then needs lengths of all shards of so small a corpus, and sums to check them by.
        next(loader)
        is_on = False
        assert {"00000.sums", "00001.sums"} <= set(opened)

    def test_a_slice_checks_its_own_blocks(self, wide: Path):
        shards = ShardSet.open(wide)
        shards.slice(0, 0, 0)
        last = len(shards._mapped[0]._blocks.seen) - 1
        # What Arrow reads, and the ends of the offsets.
        assert touched(shards, 0) == [0, last]
        shards.slice(0, 33_000, 33_001)
        assert touched(shards, 0) == [0, 1, last]
        shards.slice(0, 65_000, 10**9)
        assert touched(shards, 0) == [0, 1, 2, last]
        assert list(shards._mapped) == [0]

    def test_lengths_check_offsets_alone(self, tokenizer: Tokenizer, tmp_path: Path):
        shards = write_lengths(tmp_path / "short", tokenizer, [2] * 30_000)
        assert shards.lengths_of(np.array([5, 12_000])).tolist() == [2, 2]
        blocks = len(shards._mapped[0]._blocks.seen)
        assert touched(shards, 0) == [0, 1, 3, blocks - 1], "the first, those asked for, the end of the offsets, footer"
        assert shards.longest_document() == 2
        assert touched(shards, 0) == [0, 1, 2, 3, blocks - 1]

    def test_a_name_checks_its_own_blocks(self, tokenizer: Tokenizer, tmp_path: Path):
        writer = ShardWriter(tmp_path, vocab_size=tokenizer.vocab_size)
        names = [f"{number:03}" + "é" * 500 for number in range(300)]
        for number, name in enumerate(names):
            writer.add(EncodedDocument(tokens=np.array([5]), hash=number, name=name, text_bytes=1))
        writer.finish(split="training", tokenizer=tokenizer, sources=[], options={}, skipped={})
        shards = ShardSet.open(tmp_path)
        assert [shards.name(number) for number in range(300)] == names
        path = tmp_path / "00000.arrow"
        flip_bit(path, path.read_bytes().index(b"150"), 0)
        shards = ShardSet.open(tmp_path)
        assert (shards.name(0), shards.name(299)) == (names[0], names[299])
        with pytest.raises(DataError, match=r"00000\.arrow is damaged: bytes 131,072 to 196,608"):
            shards.name(150)

    @given(
        size=st.integers(1, 6 * BLOCK_BYTES),
        damaged=st.sets(st.integers(0, 5)),
        ranges=st.lists(st.tuples(st.integers(0, 6 * BLOCK_BYTES), st.integers(1, 3 * BLOCK_BYTES)), max_size=12),
    )
    def test_a_range_is_refused_where_it_touches_damage(self, size: int, damaged: set[int], ranges: list):
        content = np.random.default_rng(size).bytes(size)
        sums = [xxhash.xxh3_64_intdigest(content[at : at + BLOCK_BYTES]) for at in range(0, size, BLOCK_BYTES)]
        wrong = np.array([value ^ (number in damaged) for number, value in enumerate(sums)], np.uint64)
        blocks = ChecksumBlocks(pa.py_buffer(content), wrong, Path("00000.arrow"))
        for start, length in ranges:
            start = min(start, size - 1)
            stop = min(start + length, size)
            of_range = {block for block in range(len(sums)) if block * BLOCK_BYTES < stop and start < stop}
            of_range = {block for block in of_range if start < (block + 1) * BLOCK_BYTES}
            expected = nullcontext()
            if of_range & damaged:
                expected = pytest.raises(DataError, match=r"00000\.arrow is damaged")
            with expected:
                blocks.check(start, stop)
            with expected:
                blocks.check_items(np.array([start]), stop - start)
            assert blocks.all_seen == all(blocks.seen)

    def test_what_was_seen_is_not_read_again(self, copied: Path):
        shards = ShardSet.open(copied)
        before = shards.document(0).copy()
        # Beneath a set that is not told to look at the file again.
        flip_bit(copied / "00000.arrow", 70_000, 0)
        assert (shards.document(0) != before).sum() == 1
        shards.check_files([0])
        with pytest.raises(DataError, match=r"00000\.arrow is damaged: bytes 65,536 to 131,072 do not have"):
            shards.document(0)

    def test_a_column_that_nobody_reads_is_left_to_verify(self, tokenizer: Tokenizer, tmp_path: Path):
        shards = write_lengths(tmp_path / "short", tokenizer, [2] * 30_000)
        entry = shards.manifest.shards[0]
        path = shards.folder / entry.file
        column = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0).column("hash").buffers()[1]
        at = path.read_bytes().index(column.to_pybytes()) + 100_000
        flip_bit(path, at, 4)
        assert [len(shards.document(number)) for number in (0, 29_999)] == [2, 2]
        assert shards.name(29_999) == "d29999"
        begin = at // 65_536 * 65_536
        assert find_problems(shards.folder) == [
            f"{path} is damaged: bytes {begin:,} to {begin + 65_536:,} do not have the checksum that 00000.sums lists. "
            + RECOVERY_HINT
        ]


def compare(shards: ShardSet, right: ShardSet, order: list[int]) -> None:
    """Read documents in this order; each must be the right one."""
    for number in order:
        assert shards.name(number) == right.name(number)
        assert np.array_equal(shards.document(number), right.document(number))


class TestOneFlippedBit:
    """At any place of a file: refused by the first read that touches it, and found by ``data verify``."""

    def places(self, path: Path, seed: int) -> list[tuple[int, int]]:
        draw = random.Random(seed)
        return [(draw.randrange(path.stat().st_size), draw.randrange(8)) for _ in range(FLIPS)]

    @pytest.mark.few(1)
    @pytest.mark.parametrize("file", ["00000.arrow", "00001.sums", "manifest.json"])
    def test_is_refused_and_found(self, copied: Path, file: str):
        path = copied / file
        found = 0
        for offset, bit in self.places(path, seed=1):
            flip_bit(path, offset, bit)
            with pytest.raises(DataError, match=rf"{path} |not a shard manifest|has format version"):
                read_all(ShardSet.open(copied))
            found += any(str(path) in problem for problem in find_problems(copied))
            flip_bit(path, offset, bit)
        assert found == FLIPS
        assert find_problems(copied) == []

    def test_comes_before_what_it_would_have_changed(self, copied: Path, wide: Path):
        """Read in any order, everything that is returned before the error is right."""
        right, path = ShardSet.open(wide), copied / "00001.arrow"
        for offset, bit in self.places(path, seed=2):
            flip_bit(path, offset, bit)
            shards = ShardSet.open(copied)
            order = list(range(len(LENGTHS)))
            random.Random(offset).shuffle(order)
            with pytest.raises(DataError, match=rf"{path} is damaged: bytes "):
                compare(shards, right, order)
            flip_bit(path, offset, bit)

    @pytest.mark.parametrize("offset", [0, 5, 8, 12, 40, 200, 700, -1, -8, -10, -100, -400])
    def test_of_what_arrow_reads_is_found_before_arrow_reads_it(self, copied: Path, offset: int, monkeypatch):
        path = copied / "00000.arrow"
        flip_bit(path, offset % path.stat().st_size, 6)

        def refuse(*_: object) -> None:
            raise AssertionError("Arrow was given a damaged file")

        monkeypatch.setattr(pa.ipc, "open_file", refuse)
        with pytest.raises(DataError, match=r"00000\.arrow is damaged: bytes"):
            ShardSet.open(copied).document(0)

    def test_is_not_looked_for_where_that_is_not_wanted(self, copied: Path, wide: Path):
        flip_bit(copied / "00000.arrow", 70_000, 0)
        changed = ShardSet.open(copied, verify=False).document(0) != ShardSet.open(wide).document(0)
        assert changed.sum() == 1


def test_missing_or_other_sums_are_named(copied: Path):
    (copied / "00000.sums").rename(copied / "kept")
    with pytest.raises(DataError, match=r"00000\.sums is missing, though manifest\.json lists its checksum"):
        ShardSet.open(copied).document(0)
    shutil.copy(copied / "00001.sums", copied / "00000.sums")
    with pytest.raises(DataError, match=r"00000\.sums is damaged"):
        ShardSet.open(copied).document(0)
    # Sealed by somebody, and yet not the sums of this file.
    (copied / "00000.sums").write_bytes(b"12345678")
    sums = xxhash.xxh3_128_hexdigest(b"12345678")
    edit(copied / "manifest.json", lambda body: body["shards"][0].update(sums=sums), seal=True)
    with pytest.raises(DataError, match=r"00000\.sums has 8 bytes, which do not match a shard of"):
        ShardSet.open(copied).document(0)


def test_threads_share_a_set(copied: Path):
    wanted = [ShardSet.open(copied).document(number).tolist() for number in range(len(LENGTHS))]

    def read(shards: ShardSet, seed: int) -> list[list[int]]:
        order = list(range(len(LENGTHS)))
        random.Random(seed).shuffle(order)
        found = {number: shards.document(number).tolist() for number in order}
        return [found[number] for number in range(len(LENGTHS))]

    with ThreadPoolExecutor(8) as pool:
        for max_mapped in (1, 4096):
            shards = ShardSet.open(copied, max_mapped=max_mapped)
            assert all(found == wanted for found in pool.map(lambda seed: read(shards, seed), range(16)))  # noqa: B023
        flip_bit(copied / "00001.arrow", 100, 0)
        shards = ShardSet.open(copied)
        errors = [pool.submit(read, shards, seed).exception() for seed in range(16)]
    assert all("00001.arrow is damaged" in str(error) for error in errors)


KNOWS_POPULATE = tuple(int(part) for part in platform.release().split(".")[:2]) >= (5, 14)


@pytest.mark.skipif(not KNOWS_POPULATE, reason="reads of a block that is gone end the process on this kernel")
def test_a_block_that_cannot_be_read_is_named(copied: Path):
    """Between the question whether the file is as it was and the first read of it, too."""
    shards = ShardSet.open(copied)
    shards.slice(0, 0, 1)
    with (copied / "00000.arrow").open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(DataError, match=r"00000\.arrow cannot be read from byte 65,536 to 131,072"):
        shards.slice(0, 65_000, 65_001)
