"""Files of a directory as one document."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.inspect import find_problems
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.joining import Join, cut_directories, join_pieces
from data_pipeline.prepare.parts import source_parts
from data_pipeline.prepare.readers import records
from data_pipeline.prepare.source_items import File, FilePiece, Format, full_piece
from data_pipeline.prepare.sources import open_source
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.prepare.parts.conftest import content


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Directories in one another, and of everything that gives no text something."""
    folder = tmp_path / "tree"
    files = {
        "readme.txt": b"top",
        "a/x.py": b"x = 1\n",
        "a/y.py": b"y = 2",
        "a/b/deep.py": b"deep",
        "a/z.py.gz": gzip.compress(b"z = 3\n"),
        "a/empty.py": b"",
        "a/image.bin": b"\0\1",
        "a/latin.txt": "Grüße".encode("latin-1"),
        "a/rows.jsonl": json.dumps({"text": "a row"}).encode(),
        "only_binary/image.bin": b"\0",
    }
    for name, raw in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    return folder


def read(folder: Path, **options) -> dict[str, str]:
    return {document.name: document.text for document in open_source(folder, join=Join(**options))}


def test_the_files_of_a_directory_are_one_document_in_the_order_of_their_names(tree: Path):
    assert read(tree) == {
        "a/b/": "deep",
        "a/": "x = 1\ny = 2z = 3\n",
        "a/rows.jsonl:1": "a row",
        "./": "top",
    }


def test_a_header_begins_a_line_and_names_its_file(tree: Path):
    found = read(tree, header="# {path} in {directory}: {name} {{}}\n")
    assert found["a/"] == (
        "# a/x.py in a: x.py {}\nx = 1\n# a/y.py in a: y.py {}\ny = 2\n# a/z.py.gz in a: z.py.gz {}\nz = 3\n"
    )
    assert found["./"] == "# readme.txt in : readme.txt {}\ntop"
    assert found["a/rows.jsonl:1"] == "a row"


def test_a_depth_joins_all_below(tree: Path):
    assert read(tree, depth=1)["a/"] == "deepx = 1\ny = 2z = 3\n"
    assert read(tree, depth=2) == read(tree)


def test_what_gives_no_text_is_listed_as_ever(tree: Path):
    joined, plain = open_source(tree, join=Join()), open_source(tree)
    assert list(joined)
    assert list(plain)
    assert joined.skipped == plain.skipped == {"binary": 2, "empty": 1, "not UTF-8": 1}


def test_files_that_grow_do_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "FREE_BYTES", 1000)
    monkeypatch.setattr(records, "MAX_GROWTH", 10)
    for number in range(4):
        (tmp_path / f"{number}.txt.gz").write_bytes(gzip.compress(str(number).encode() * 900))
    source = open_source(tmp_path, join=Join())
    assert [len(document.text) for document in source] == [1800]
    assert source.skipped == {"damaged": 2}
    assert "the files before it become" in source.left_out.examples["damaged"][0]


def test_a_large_directory_is_cut_between_files_and_that_is_said(tree: Path, tokenizer: Tokenizer, tmp_path: Path):
    said: list[str] = []
    source = open_source(tree, join=Join(most_bytes=8))
    report = build_shards(source, tokenizer, tmp_path / "out", validation_fraction=0, say=said.append)
    assert [name for name in read(tree, most_bytes=8) if name.startswith("a/:")] == ["a/:x.py", "a/:y.py", "a/:z.py.gz"]
    assert report.cut_directories["a/"] > 1
    assert "a/" in said[0]
    assert "--join-bytes" in said[0]
    assert find_problems(tmp_path / "out") == []


@pytest.mark.parametrize("workers", [1, 2])
def test_the_bytes_do_not_depend_on_workers(
    tree: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
):
    monkeypatch.setattr(source_parts, "PART_BYTES", 20)
    source = open_source(tree, join=Join(header="# {path}\n"))
    options = {"validation_fraction": 0.0, "shard_tokens": 1}
    report = build_shards(source, tokenizer, tmp_path / "out", workers=workers, **options)
    assert report.parts > 2
    build_shards(source, tokenizer, tmp_path / "again", workers=3 - workers, **options)
    assert content(tmp_path / "out") == content(tmp_path / "again")


def test_another_way_of_joining_is_another_source(tree: Path, tokenizer: Tokenizer, tmp_path: Path):
    prints = [
        open_source(tree, join=join).fingerprint() for join in (None, Join(), Join(depth=1), Join(header="{path}"))
    ]
    assert len({json.dumps(found) for found in prints}) == 4
    # Folders built before files could be joined are still up to date.
    assert "join" not in prints[0]
    build_shards(open_source(tree), tokenizer, tmp_path / "out", validation_fraction=0)
    with pytest.raises(DataError, match="built from another source"):
        build_shards(open_source(tree, join=Join()), tokenizer, tmp_path / "out", validation_fraction=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"header": "# file\n"}, r"needs \{path\}"),
        ({"header": "# {path"}, "is not a valid template"),
        ({"header": "# {file}"}, r"an invalid field \{file\}"),
        ({"header": "# {}"}, r"an invalid field \{\}"),
        ({"header": "{path!r}"}, "an invalid field"),
        ({"header": "{path:>1000000000000}"}, "an invalid field"),
        ({"header": "{path.__class__}"}, "an invalid field"),
        ({"header": "{directory}"}, r"needs \{path\}"),
        ({"most_bytes": 0}, "join_bytes=0"),
        ({"depth": -1}, "join_depth=-1"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict, words: str):
    with pytest.raises(DataError, match=words):
        Join(**options)


FILES = st.lists(
    st.tuples(st.lists(st.sampled_from("ab"), max_size=3), st.sampled_from("xyz"), st.integers(0, 9), st.booleans()),
    max_size=30,
    unique_by=lambda drawn: "/".join([*drawn[0], drawn[1]]),
)


@given(FILES, st.integers(0, 3), st.integers(1, 20))
def test_every_file_is_in_one_document_of_its_directory(drawn, depth: int, most_bytes: int):
    files = sorted(
        (
            File(Path(), "/".join([*folders, name]), size, Format("text" if is_text else "lines"))
            for folders, name, size, is_text in drawn
        ),
        key=lambda file: file.name,
    )
    join = Join(depth=depth, most_bytes=most_bytes)
    pieces = list(join_pieces(map(full_piece, files), join))
    joined = [piece.joined for piece in pieces if piece.joined is not None]
    assert sorted(file.name for group in joined for file in group.files) == [
        file.name for file in files if file.format.kind == "text"
    ]
    assert [piece.file for piece in pieces if piece.joined is None] == [
        file for file in files if file.format.kind == "lines"
    ]
    assert len({group.name for group in joined}) == len(joined)
    for piece in pieces:
        assert isinstance(piece, FilePiece)
        if piece.joined is None:
            continue
        names = [file.name for file in piece.joined.files]
        assert names == sorted(names)
        assert len({join.directory_of(name) for name in names}) == 1
        assert piece.size == sum(file.size for file in piece.joined.files)
        assert piece.size <= most_bytes or len(names) == 1
    directories = [join.directory_of(group.files[0].name) for group in joined]
    for directory, count in cut_directories(pieces, join).items():
        assert directories.count(directory) == count > 1
