"""The list of excluded shards: what it vouches for, what is never opened because of it, and what of it is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.inspect import describe, excluded_from, verify
from data_pipeline.loader import build_loader, build_validation_loader
from data_pipeline.prepare.publish import pack
from data_pipeline.shards.exclude import exclude, include
from data_pipeline.shards.exclusions import EXCLUSIONS_FILE, Exclusions
from data_pipeline.shards.manifest import Manifest, hash_json
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.verify import FolderCheck, open_verified
from data_pipeline.texts import read_texts
from longctx.errors import ConfigError, DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.lengths import lengths_of, strip_sums, write_lengths
from tests.data_pipeline.shards.test_sums import flip_bit

LENGTHS = [70_000, 3, 40_000, 1, 9, 30_000, 20, 50_000, 1, 1, 20_000, 5]
FLIPS = 200
BAD, GOOD = "00001.arrow", "00000.arrow"


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """Two shards of several blocks each."""
    return write_lengths(tmp_path / "shards", tokenizer, LENGTHS, shard_tokens=120_000).folder


def seal(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the list, and give it the hash that fits."""
    path = folder / EXCLUSIONS_FILE
    body = json.loads(path.read_text())
    del body["hash"]
    change(body)
    path.write_text(json.dumps({**body, "hash": hash_json(body)}))


class TestWhatIsExcluded:
    @pytest.mark.parametrize("state", ["whole", "damaged", "cut short", "missing", "a link out of the folder"])
    def test_is_never_opened_whatever_it_is(self, folder: Path, state: str, tmp_path: Path):
        shards = ShardSet.open(folder)
        first = shards.document(0).tolist()
        count, wanted = shards.manifest.shards[0].documents, lengths_of(shards)
        exclude(folder, [BAD], reason="a test")
        path = folder / BAD
        if state == "damaged":
            path.write_bytes(bytes(path.stat().st_size))
        elif state == "cut short":
            path.write_bytes(b"")
        elif state != "whole":
            path.unlink()
            path.with_suffix(".sums").unlink()
        if state.startswith("a link"):
            path.symlink_to("/dev/null")
        for verified in (ShardSet.open(folder), open_verified(folder, whole=True)):
            assert verified.excluded == (1,)
            assert (verified.num_documents, verified.exclusions.kept_documents) == (len(LENGTHS), count)
            assert list(verified.exclusions.document_numbers()) == list(range(count))
            assert verified.document(0).tolist() == first
            assert verified.num_tokens == sum(wanted[:count])
            # Rows that were planned before the exclusion need them.
            assert lengths_of(verified).tolist() == wanted.tolist()
            for read in (verified.document, verified.name, verified.shard_tokens):
                with pytest.raises(DataError, match=rf"{BAD} is excluded: none of its documents is read"):
                    read(1 if read == verified.shard_tokens else count)
            with pytest.raises(DataError, match=rf"{BAD} is excluded"):
                verified.check_files([0, count])
        assert len(list(read_texts(folder))) == count
        assert FolderCheck(folder, ShardSet.open(folder).exclusions, "start").shards == [shards.manifest.shards[0]]
        next(build_loader(folder, seq_len=4096, rows_per_step=1))
        assert build_validation_loader(folder, seq_len=4096).num_rows == -(-int(sum(wanted[:count])) // 4096)
        assert verify(folder) == []
        assert (verify(folder, every_shard=True) == []) == (state == "whole")

    def test_is_described_with_its_reason(self, folder: Path):
        exclude(folder, [BAD], reason="bad blocks")
        found = describe(folder, seq_len=4096).excluded
        assert [(shard["shard"], shard["reason"]) for shard in found] == [(BAD, "bad blocks")]
        assert [found.numbers for found in excluded_from([folder])] == [(1,)]

    def test_comes_back_as_it_was(self, folder: Path):
        before = sorted(path.name for path in folder.iterdir())
        exclude(folder, [BAD], reason="a test")
        assert not include(folder, [BAD]).shards
        assert sorted(path.name for path in folder.iterdir()) == before
        assert ShardSet.open(folder).excluded == ()

    def test_again_keeps_lengths_that_cannot_be_read_any_more(self, folder: Path):
        first = exclude(folder, [BAD], reason="bad blocks")
        (folder / BAD).unlink()
        again = exclude(folder, [BAD], reason="gone")
        assert [exclusion.lengths for exclusion in again.shards] == [exclusion.lengths for exclusion in first.shards]
        assert again.shards[0].reason == "gone"

    def test_of_a_folder_without_sums_lengths_are_kept_where_the_whole_file_is_right(self, folder: Path):
        strip_sums(folder)
        assert exclude(folder, [BAD], reason="a test").shards[0].lengths
        include(folder, [BAD])
        flip_bit(folder / BAD, 3000, 1)
        assert not exclude(folder, [BAD], reason="a test").shards[0].lengths

    def test_cannot_be_packed(self, folder: Path, tmp_path: Path):
        exclude(folder, [BAD], reason="a test")
        with pytest.raises(DataError, match="has excluded shards, and a packed folder has all"):
            pack(folder, tmp_path / "packed", overwrite=False, say=lambda _: None)


class TestWhatIsRefused:
    @pytest.mark.parametrize("name", ["00001", "1", "../00001.arrow", "/etc/passwd", "00001.sums", "", "x" * 5000])
    def test_what_is_no_shard(self, folder: Path, name: str):
        with pytest.raises(ConfigError, match=r"is no shard of .*Did you mean 0000[01]\.arrow\?"):
            exclude(folder, [name], reason="a test")
        assert not (folder / EXCLUSIONS_FILE).exists()

    @pytest.mark.parametrize("reason", ["", "  ", "two\nlines", "\x1b[31m", "x" * 301])
    def test_a_reason_that_no_log_can_show(self, folder: Path, reason: str):
        with pytest.raises(ConfigError, match="must be a line of 1 to 300 characters"):
            exclude(folder, [BAD], reason=reason)

    def test_all_shards(self, folder: Path):
        exclude(folder, [GOOD], reason="a test")
        with pytest.raises(ConfigError, match=r"without 00001\.arrow no document of .* would be left"):
            exclude(folder, [BAD], reason="a test")
        assert ShardSet.open(folder).excluded == (0,)

    def test_to_bring_back_what_is_not_excluded(self, folder: Path):
        with pytest.raises(ConfigError, match=r"'00001\.arrow' is not excluded from .*\. There is none\."):
            include(folder, [BAD])

    def test_a_list_of_other_data(self, folder: Path, tokenizer: Tokenizer, tmp_path: Path):
        other = write_lengths(tmp_path / "other", tokenizer, [5, 9_000, 7], shard_tokens=5000).folder
        exclude(other, [GOOD], reason="a test")
        shutil.copy(other / EXCLUSIONS_FILE, folder / EXCLUSIONS_FILE)
        with pytest.raises(DataError, match=r"exclusions\.json belongs to other data"):
            ShardSet.open(folder)
        assert "belongs to other data" in verify(folder)[0]

    @pytest.mark.parametrize(
        "change",
        [
            lambda body: body.update(shards=[]),
            lambda body: body.update(shards="all"),
            lambda body: body["shards"].append(body["shards"][0]),
            lambda body: body["shards"][0].update(shard="../x.arrow"),
            lambda body: body["shards"][0].update(shard=7),
            lambda body: body["shards"][0].update(reason="a\nb"),
            lambda body: body["shards"][0].update(lengths="abc"),
            lambda body: body["shards"][0].update(more="x"),
            lambda body: body["shards"][0].pop("time"),
            lambda body: body["shards"].insert(0, 5),
            lambda body: body.update(more=1),
            lambda body: body.update(version=2),
        ],
    )
    def test_a_list_that_somebody_made_up(self, folder: Path, change: Callable[[dict], object]):
        exclude(folder, [BAD], reason="a test")
        seal(folder, change)
        with pytest.raises(DataError, match=r"exclusions\.json.*\. Remove the file, which reads all shards again"):
            ShardSet.open(folder)
        assert str(folder / EXCLUSIONS_FILE) in verify(folder)[0]

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"format": "longctx-shards"}', b"[" * 99_999])
    def test_a_file_that_is_no_list(self, folder: Path, content: bytes):
        (folder / EXCLUSIONS_FILE).write_bytes(content)
        with pytest.raises(DataError, match=r"exclusions\.json"):
            ShardSet.open(folder)

    def test_a_folder_in_its_place(self, folder: Path):
        (folder / EXCLUSIONS_FILE).mkdir()
        with pytest.raises(DataError, match=r"exclusions\.json is damaged or cannot be read"):
            ShardSet.open(folder)


class TestOneFlippedBit:
    """At any place of the list or of what it vouches for: refused by the first read, and found by ``data verify``."""

    @pytest.mark.parametrize("file", [EXCLUSIONS_FILE, "00001.lengths"])
    def test_is_refused_and_found(self, folder: Path, file: str):
        exclude(folder, [BAD], reason="bad blocks on disk 3")
        path, draw, found = folder / file, random.Random(3), 0
        documents = np.arange(len(LENGTHS))
        for _ in range(FLIPS):
            offset, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
            flip_bit(path, offset, bit)
            with pytest.raises(DataError, match=str(path)):
                ShardSet.open(folder).lengths_of(documents)
            found += any(str(path) in problem for problem in verify(folder))
            flip_bit(path, offset, bit)
        assert found == FLIPS
        assert verify(folder) == []

    @pytest.mark.slow
    def test_of_an_excluded_shard_is_found_when_asked_and_spoils_no_length(self, folder: Path):
        """Its offsets are checked before their lengths are kept: damage of tokens is kept apart from damage of them."""
        wanted, draw = lengths_of(ShardSet.open(folder)).tolist(), random.Random(4)
        path, kept = folder / BAD, 0
        for _ in range(FLIPS):
            offset, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
            flip_bit(path, offset, bit)
            excluded = exclude(folder, [BAD], reason="a test")
            if excluded.shards[0].lengths:
                kept += 1
                assert lengths_of(ShardSet.open(folder)).tolist() == wanted
            assert verify(folder) == []
            assert any(str(path) in problem for problem in verify(folder, every_shard=True))
            include(folder, [BAD])
            flip_bit(path, offset, bit)
        # The offsets are in one of the shard's blocks, and the parts that Arrow reads in another.
        assert kept > FLIPS // 4


def test_a_list_that_cannot_be_written_leaves_the_one_before(folder: Path, monkeypatch: pytest.MonkeyPatch):
    exclude(folder, [BAD], reason="first")

    def refuse(*_: object, **__: object) -> None:
        raise DataError("no space")

    monkeypatch.setattr("data_pipeline.shards.exclude.write_atomically", refuse)
    with pytest.raises(DataError, match="no space"):
        exclude(folder, [BAD], reason="second")
    assert [exclusion.reason for exclusion in Exclusions.load(folder, Manifest.load(folder)).shards] == ["first"]
