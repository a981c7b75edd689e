"""What ``data find_problems`` and every opening refuse: folders that were mixed up, and manifests that somebody made
up.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.inspect import find_problems
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from data_pipeline.shards.manifest import hash_json
from data_pipeline.shards.reader import ShardSet
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.lengths import read_all, strip_sums, write_lengths
from tests.data_pipeline.shards.test_shards import edit, flip_byte, write


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """Three shards of equal size."""
    return write_lengths(tmp_path / "shards", tokenizer, [500, 500, 500], shard_tokens=500).folder


def swap(folder: Path, suffix: str) -> None:
    one, other = folder / f"00000{suffix}", folder / f"00002{suffix}"
    one.rename(folder / "kept")
    other.rename(one)
    (folder / "kept").rename(other)


class TestMixedUpFolders:
    def test_swapped_shards(self, folder: Path):
        swap(folder, ".arrow")
        problems = find_problems(folder)
        assert ["00000.arrow is damaged" in problems[0], "00002.arrow is damaged" in problems[1]] == [True, True]
        with pytest.raises(DataError, match=r"00000\.arrow is damaged"):
            ShardSet.open(folder).document(0)

    def test_swapped_with_their_sums(self, folder: Path):
        swap(folder, ".arrow")
        swap(folder, ".sums")
        problems = find_problems(folder)
        assert len(problems) == 4
        assert "00000.sums is damaged" in problems[0]
        with pytest.raises(DataError, match=r"00000\.sums is damaged"):
            ShardSet.open(folder).document(0)

    def test_files_that_nobody_lists(self, folder: Path):
        shutil.copy(folder / "00000.arrow", folder / "00003.arrow")
        shutil.copy(folder / "00000.sums", folder / "00003.sums")
        assert find_problems(folder) == [
            f"{folder / name} is not listed in the manifest." for name in ("00003.arrow", "00003.sums")
        ]

    def test_another_tokenizer(self, folder: Path, source, tmp_path: Path):
        train_tokenizer(source, folder / "tokenizer.model", vocab_size=400)
        assert ["does not match these shards" in problem for problem in find_problems(folder)] == [True]
        with pytest.raises(DataError, match="does not match these shards"):
            ShardSet.open(folder).tokenizer()

    def test_damage_of_a_folder_without_sums(self, folder: Path):
        strip_sums(folder)
        flip_byte(folder / "00001.arrow", 900)
        assert ["00001.arrow is damaged: its checksum" in problem for problem in find_problems(folder)] == [True]

    def test_many_damaged_places_are_a_screen(self, tokenizer: Tokenizer, tmp_path: Path):
        folder = write_lengths(tmp_path / "long", tokenizer, [1_000_000]).folder
        for block in range(0, 30, 2):
            flip_byte(folder / "00000.arrow", block * 65_536 + 7)
        problems = find_problems(folder)
        assert len(problems) == 9
        assert problems[-1] == f"{folder / '00000.arrow'} is damaged in 7 more places."


class TestWrongContent:
    """As it was written, by somebody who wrote nonsense."""

    def test_padding_in_a_document(self, tokenizer: Tokenizer, tmp_path: Path):
        padding = tokenizer.special.padding
        assert padding is not None
        folder = tmp_path / "padded"
        write(folder, tokenizer, [[5, 6], [7, 8, padding, 9], [padding]])
        tokenizer.save(folder)
        assert find_problems(folder) == [
            f"{folder / '00000.arrow'} contains the padding id {padding} in document 1 (d1)."
        ]

    def test_a_source_that_is_not_there(self, tokenizer: Tokenizer, tmp_path: Path):
        folder = tmp_path / "strange"
        write(folder, tokenizer, [[5, 6]], source=3)
        tokenizer.save(folder)
        assert find_problems(folder) == [
            f"{folder / '00000.arrow'} has documents from source 3, but manifest.json lists 1."
        ]

    def test_lengths_that_are_not_those_of_the_manifest(self, folder: Path):
        edit(folder / "manifest.json", lambda body: body.update(length_histogram={"2^3": 3}), seal=True)
        assert find_problems(folder) == [f"{folder}: the document lengths do not match the histogram in manifest.json."]


def of_shard(**changed: Any) -> Callable[[dict], object]:
    return lambda body: body["shards"][1].update(changed)


def of_folder(**changed: Any) -> Callable[[dict], object]:
    return lambda body: body.update(changed)


FORGED: dict[str, tuple[Callable[[dict], object], str]] = {
    "above": (of_shard(file="../00001.arrow"), r"shards\[1\]\.file='../00001.arrow' is not a name of a shard"),
    "below": (of_shard(file="validation/00000.arrow"), r"is not a name of a shard in this folder"),
    "absolute": (of_shard(file="/etc/passwd.arrow"), r"is not a name of a shard in this folder"),
    "hidden": (of_shard(file=".00001.arrow"), "is not a name of a shard"),
    "a zero byte": (of_shard(file="00001\0.arrow"), "is not a name of a shard"),
    "a new line": (of_shard(file="00001.arrow\n"), "is not a name of a shard"),
    "of another kind": (of_shard(file="manifest.json"), "is not a name of a shard"),
    "listed twice": (of_shard(file="00000.arrow"), r"00000\.arrow is listed twice"),
    "a fraction of a document": (of_shard(documents=1.0), r"shards\[1\]\.documents=1\.0 is not an integer"),
    "true for a number": (of_shard(documents=True), r"documents=True is not an integer"),
    "no document": (of_shard(documents=0), r"00001\.arrow cannot hold 0 documents and 500 tokens"),
    "more than fit": (of_shard(tokens=10**15), r"00001\.arrow cannot hold 1 documents and 1000\d+ tokens"),
    "more documents than tokens": (of_shard(documents=501), r"00001\.arrow cannot hold 501 documents"),
    "no checksum": (of_shard(xxh3_128=""), r"xxh3_128='' is not a checksum of 32 hex digits"),
    "a field too many": (of_shard(size=3), r"shards\[1\] has the unknown key 'size'"),
    "shards that are none": (of_folder(shards=3), "shards=3 is not a list"),
    "a list for counts": (of_folder(skipped=[]), r"skipped=\[\] is not an object"),
    "a split of its own": (of_folder(split="test"), "split='test' is none of"),
    "a power without end": (of_folder(length_histogram={"2^99999999999": 1}), "is not a power of two"),
    "a length that is no power": (of_folder(length_histogram={"many": 1}), "is not a power of two"),
    "counts below zero": (of_folder(length_histogram={"2^3": -1}), "is not an integer"),
    "sources that are text": (of_folder(sources=["x"]), r"sources\[0\]='x' is not an object"),
    "a tokenizer of no name": (of_folder(tokenizer=""), "tokenizer='' is not a printable name"),
    "a tokenizer that paints": (of_folder(tokenizer="\x1b[31m"), "is not a printable name"),
    "tokens without end": (of_folder(tokens=10**30), "is not an integer"),
    "a list that is elsewhere": (of_folder(left_out="../../etc/passwd"), "is not a checksum of 32 hex digits"),
    "padding beyond the vocabulary": (of_folder(padding=700), r"padding=700 must be below vocab_size=700"),
    "a vocabulary without end": (of_folder(vocab_size=1 << 40), "vocab_size=1099511627776"),
    "half a character": (of_folder(split="\ud800"), "an unpaired surrogate"),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_a_sealed_manifest_that_cannot_be_right_is_refused(folder: Path, forgery: str):
    change, message = FORGED[forgery]
    body = json.loads((folder / "manifest.json").read_text())
    change(body)
    del body["hash"]
    try:
        body["hash"] = hash_json(body)
    except UnicodeEncodeError:
        body["hash"] = "0" * 32
    (folder / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(DataError, match=message) as caught:
        ShardSet.open(folder)
    assert str(folder / "manifest.json") in str(caught.value)
    assert len(str(caught.value)) < 500
    assert find_problems(folder) == [str(caught.value)]


@pytest.mark.parametrize("file", ["00001.arrow", "00001.sums"])
def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path, file: str):
    (folder / file).rename(tmp_path / "elsewhere")
    (folder / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=rf"{file} links outside of its folder"):
        read_all(ShardSet.open(folder))
    assert [f"{file} links outside of its folder" in problem for problem in find_problems(folder)] == [True]
    # A link within it is none of our business.
    (folder / file).unlink()
    (tmp_path / "elsewhere").rename(folder / "moved")
    (folder / file).symlink_to("moved")
    assert find_problems(folder) == []
    read_all(ShardSet.open(folder))
