"""In TSV a quote is a character; in CSV it may join lines to one row, which is said."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.prepare.source_items import Skip
from data_pipeline.prepare.sources import open_source
from longctx.errors import DataError

SPANS = "used, with rows of several lines"


def read(content: bytes, name: str) -> tuple[list[str], dict[str, list[str]]]:
    """Texts of a file, and what is left out."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(content)
        (Path(folder) / "z.txt").write_text("good")
        source = open_source(folder)
        texts = [document.text for document in source if document.name != "z.txt"]
    return texts, source.left_out.examples


def test_a_quote_in_tsv_is_a_character():
    merge = b'id\ttext\n1\t"Quiet, she said.\n2\tA second line.\n3\tHe left the house"\n4\tA fourth line.\n'
    expected = ['"Quiet, she said.', "A second line.", 'He left the house"', "A fourth line."]
    assert read(merge, "a.tsv") == (expected, {})
    lost = b'id\ttext\n1\tplain\n2\t"never closed\n' + b"".join(b"%d\tline %d\n" % (n, n) for n in range(3, 300))
    texts, left_out = read(lost, "a.tsv")
    assert (len(texts), left_out) == (299, {})
    assert texts[1] == '"never closed'


CELL = st.text(st.sampled_from("ab\" '\r,é\u2028"), max_size=6)


@given(rows=st.lists(st.tuples(CELL, CELL), max_size=12), end=st.sampled_from(["\n", "\r\n"]), last=st.booleans())
def test_tsv_is_what_plain_splitting_gives(rows: list[tuple[str, str]], end: str, last: bool):
    content = end.join(["id\ttext", *("\t".join(row) for row in rows)]) + end * last
    lines = [line.removesuffix("\r") for line in content.split("\n")[1:]]
    texts, left_out = read(content.encode(), "a.tsv")
    assert texts == [cell for line in lines if line for cell in line.split("\t")[1:] if cell]
    assert set(left_out) <= {"empty"}


def test_rows_of_csv_that_span_lines_are_said():
    content = (
        b'id,text\n1,"Quiet, she said.\n2,A second line.\n3,He left the house"\n4,A fourth line.\n5,"a ""word"""\n'
    )
    texts, left_out = read(content, "a.csv")
    assert len(texts) == 3
    assert left_out == {SPANS: ["a.csv (1 of 3 rows span 3 lines; the longest is lines 2 to 4)"]}
    texts, left_out = read(content.replace(b'house"', b"house").replace(b"text\n", b"text\n0,before\n"), "a.csv")
    assert texts == ["before"]
    assert "a.csv:1 (5 lines, 3 to 7: " in left_out["not CSV"][0]


@given(lines=st.lists(st.text(st.sampled_from('ab",'), min_size=1, max_size=5), min_size=1, max_size=10))
def test_no_line_of_csv_vanishes_without_a_word(lines: list[str]):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        # A file of which the first records are all wrong is left out as a whole.
        path.write_text("text\ngood\n" + "".join(f"{line}\n" for line in lines))
        (Path(folder) / "z.txt").write_text("good")
        skips: list[Skip] = []
        rows = sum(1 for _ in open_source(folder).read(skips.append)) - 2
    counted = 0
    for skip in skips:
        numbers = [int(number) for number in re.findall(r"\d+", skip.detail)]
        if skip.reason == SPANS:
            # Their lines beside the one that each row has of its own.
            counted += numbers[2] - numbers[0]
        elif " lines, " in skip.detail:
            counted += numbers[0]
        else:
            rows += 1
    assert rows + counted == len(lines)


def test_shards_of_tsv_that_was_read_as_csv_are_not_up_to_date(tokenizer, tmp_path: Path):
    (tmp_path / "a.tsv").write_text("text\none\n")
    assert open_source(tmp_path).fingerprint()["tsv"] == "a line is a row"
    (tmp_path / "a.tsv").rename(tmp_path / "a.csv")
    assert "tsv" not in open_source(tmp_path).fingerprint()


def test_strict_names_the_lines_of_a_quote_that_is_never_closed(tmp_path: Path):
    (tmp_path / "a.csv").write_text('text\na\n"never\nclosed\n')
    with pytest.raises(DataError, match=r"a.csv:1: not CSV \(2 lines, 3 to 4: unexpected end of data\)"):
        list(open_source(tmp_path, strict=True))
