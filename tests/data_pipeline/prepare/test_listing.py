"""Which files of a folder are read: links, patterns, names, and the same ones on every file system."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from data_pipeline.inspect import find_problems
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.sources import open_source
from data_pipeline.shards.reader import ShardSet
from longctx.errors import DataError

OUTSIDE = "outside"


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names(folder: Path, **options) -> list[str]:
    return [document.name for document in open_source(folder, **options)]


class TestLinks:
    def test_a_linked_folder_is_read_under_the_link(self, tmp_path: Path):
        write(tmp_path, "outside/a.txt", "outside/deep/b.txt", "corpus/c.txt")
        (tmp_path / "corpus" / "link").symlink_to(tmp_path / OUTSIDE)
        source = open_source(tmp_path / "corpus")
        assert [document.name for document in source] == ["c.txt", "link/a.txt", "link/deep/b.txt"]
        assert source.skipped == {}

    def test_cycles_and_duplicates_are_read_once_and_counted(self, tmp_path: Path):
        corpus = tmp_path / "corpus"
        write(tmp_path, "corpus/real/a.txt", "outside/b.txt", "outside/sub/c.txt")
        (corpus / "0_again").symlink_to(corpus / "real")  # sorts before the real folder
        (corpus / "real" / "up").symlink_to(corpus)
        (corpus / "x").symlink_to(tmp_path / OUTSIDE)
        (corpus / "y").symlink_to(tmp_path / OUTSIDE)
        (corpus / "z").symlink_to(tmp_path / OUTSIDE / "sub")
        (tmp_path / OUTSIDE / "back").symlink_to(corpus / "x")
        (corpus / "circle").symlink_to(corpus / "circle")
        source = open_source(corpus)
        assert [document.name for document in source] == ["real/a.txt", "x/b.txt", "x/sub/c.txt"]
        assert source.skipped == {"broken link": 1, "linked folder that is read already": 5}
        assert source.left_out.examples["linked folder that is read already"][0] == "0_again/"

    def test_links_behind_a_link_are_followed(self, tmp_path: Path):
        write(tmp_path, "one/a.txt", "two/b.txt")
        (tmp_path / "corpus").mkdir()
        (tmp_path / "corpus" / "link").symlink_to(tmp_path / "one")
        (tmp_path / "one" / "next").symlink_to(tmp_path / "two")
        assert names(tmp_path / "corpus") == ["link/a.txt", "link/next/b.txt"]

    def test_linked_files_are_read_as_ever(self, tmp_path: Path):
        write(tmp_path, "a.txt")
        (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
        assert names(tmp_path) == ["a.txt", "b.txt"]


class TestPatterns:
    def test_include_takes_what_matches_and_nothing_else(self, tmp_path: Path):
        write(tmp_path, "a.txt", "b/c.txt", "b/d.md", "e/f.md")
        source = open_source(tmp_path, include=["*.txt", "e"], exclude=["b/c*"])
        assert [document.name for document in source] == ["a.txt", "e/f.md"]
        assert source.skipped == {"excluded": 1, "not included": 1}
        with pytest.raises(DataError, match=r"4 not included: a\.txt, b/c\.txt, b/d\.md, …"):
            open_source(tmp_path, include=["*.jsonl"])

    def test_an_excluded_folder_is_not_walked_into(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        write(tmp_path, "good/a.txt", "secret/deep/b.txt")
        listed = []
        scandir = os.scandir
        monkeypatch.setattr(os, "scandir", lambda path: listed.append(Path(path).name) or scandir(path))
        source = open_source(tmp_path, exclude=["secret"])
        assert source.skipped == {"excluded": 1}
        assert "secret" not in listed
        assert "good" in listed

    def test_a_pattern_within_an_excluded_folder_is_no_typing_error(self, tmp_path: Path, caplog):
        write(tmp_path, "a.txt", "test/deep/b.txt")
        open_source(tmp_path, exclude=["test", "test/deep", "*/deep", "tset"], include=["*.txt", "nope"])
        assert "'nope', 'tset' matches no file" in caplog.text

    def test_patterns_belong_to_the_fingerprint_and_their_absence_does_not(self, tmp_path: Path):
        write(tmp_path, "a.txt")
        plain = open_source(tmp_path).fingerprint()
        assert set(plain) == {"kind", "text_field", "exclude", "files", "bytes", "files_xxh3_128"}
        assert open_source(tmp_path, include=["a*"]).fingerprint()["include"] == ["a*"]
        (tmp_path / "b.ndjson").write_text('{"text": "b"}')
        assert open_source(tmp_path).fingerprint()["formats"] == {".ndjson": 1}
        assert open_source(tmp_path, as_text=["b*"]).fingerprint()["as_text"] == ["b*"]


def test_the_order_of_the_file_system_changes_nothing(tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, *(f"corpus/{folder}/{file}.txt" for folder in "bca" for file in "213"), "outside/sub/d.txt")
    for link in ("n", "m"):
        (tmp_path / "corpus" / link).symlink_to(tmp_path / OUTSIDE)
    (tmp_path / "corpus" / "l").symlink_to(tmp_path / OUTSIDE / "sub")
    (tmp_path / "corpus" / "empty").touch()
    scandir = os.scandir

    class Sorted:
        def __init__(self, path, reverse: bool) -> None:
            with scandir(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=reverse)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *error) -> None:
            pass

    manifests = []
    for reverse in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", lambda path, reverse=reverse: Sorted(path, reverse))
            source = open_source(tmp_path / "corpus")
        output = tmp_path / f"out{reverse}"
        build_shards(source, tokenizer, output, validation_fraction=0)
        manifests.append(((output / "manifest.json").read_bytes(), (output / "left_out.jsonl").read_bytes()))
    assert manifests[0] == manifests[1]


def test_file_names_need_not_be_utf8(tmp_path: Path, tokenizer):
    folder = os.fsencode(tmp_path / "corpus")
    Path(os.fsdecode(folder + b"/sum\xe9")).mkdir(parents=True)
    for name, content in ((b"sum\xe9/\xff.txt", b"one"), (b"\xe9.jsonl", b'{"text": "two"}'), (b"b\xe9.txt", b"")):
        Path(os.fsdecode(folder + b"/" + name)).write_bytes(content)
    report = build_shards(open_source(tmp_path / "corpus"), tokenizer, tmp_path / "out", validation_fraction=0)
    shards = ShardSet.open(tmp_path / "out")
    assert [shards.name(i) for i in range(shards.num_documents)] == ["\\xe9.jsonl:1", "sum\\xe9/\\xff.txt"]
    assert report.left_out == {"empty": ["b\\xe9.txt"]}


def test_what_may_not_be_read_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The refusals are made up: the superuser, as whom tests may run, is never refused."""
    write(tmp_path, "a.txt", "b.txt", "c/d.txt")
    scandir, open_path = os.scandir, Path.open

    def refuse(name: str, path: Path) -> None:
        if Path(path).name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", lambda path: refuse("c", path) or scandir(path))
    monkeypatch.setattr(Path, "open", lambda path, *mode: refuse("b.txt", path) or open_path(path, *mode))
    source = open_source(tmp_path)
    assert [document.name for document in source] == ["a.txt"]
    assert source.left_out.examples == {"cannot be read": ["c/ (Permission denied)", "b.txt (Permission denied)"]}
    with pytest.raises(DataError, match=r"c/: cannot be read \(Permission denied"):
        open_source(tmp_path, strict=True)


def test_everything_that_was_left_out_is_listed_in_the_shard_folder(tmp_path: Path, tokenizer):
    write(tmp_path, "corpus/a.txt", *(f"corpus/.hidden{i}" for i in range(5)))
    (tmp_path / "corpus" / "b.jsonl").write_text('{"text": "b"}\n{"text": null}\n{}\n')
    output = tmp_path / "out"
    for up_to_date in (False, True):
        report = build_shards(open_source(tmp_path / "corpus"), tokenizer, output, validation_fraction=0)
        assert report.up_to_date == up_to_date
        assert report.skipped == {"hidden": 5, "no field 'text'": 1, "null": 1}
        assert report.left_out["hidden"] == [".hidden0", ".hidden1", ".hidden2"]
        assert report.left_out["no field 'text'"] == ["b.jsonl:3 (fields: none; with text: none)"]
        assert report.left_out_file == output / "left_out.jsonl"
    listed = [json.loads(line) for line in (output / "left_out.jsonl").read_bytes().splitlines()]
    assert [entry["name"] for entry in listed] == [*(f".hidden{i}" for i in range(5)), "b.jsonl:2", "b.jsonl:3"]
    assert listed[5] == {"name": "b.jsonl:2", "reason": "null"}
    assert find_problems(output) == []
    (output / "left_out.jsonl").write_bytes(b"")
    assert find_problems(output) == [f"{output / 'left_out.jsonl'} was changed after it was written."]
    clean = build_shards(
        open_source(tmp_path / "corpus" / "a.txt"), tokenizer, tmp_path / "clean", validation_fraction=0
    )
    assert clean.left_out_file is None
    assert not (tmp_path / "clean" / "left_out.jsonl").exists()
    assert "left_out" not in json.loads((tmp_path / "clean" / "manifest.json").read_bytes())


def test_the_reading_says_how_far_it_has_come(tmp_path: Path):
    write(tmp_path, "a.txt", "b.txt")
    (tmp_path / "c.jsonl").write_text('{"text": "c"}\n' * 3)
    source = open_source(tmp_path)
    seen = [source.bytes_read for _ in source]
    assert seen == sorted(seen)
    assert seen[0] == 5
    assert source.bytes_read == source.num_bytes
