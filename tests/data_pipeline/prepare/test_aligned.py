"""Pairs that lie in texts: two files of lines, and catalogues."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from data_pipeline.prepare.sources import open_source
from longctx.errors import DataError


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_bytes(text.encode())
    return folder


def test_lines_of_one_number_are_pairs(tmp_path: Path):
    folder = write(tmp_path / "in", news_en="one\ntwo\r\n\nfour", news_de="eins\nzwei\n-\nvier\n", other_en="alone\n")
    source = open_source(folder, source_field="en", text_field="de")
    found = [(document.name, document.pair) for document in source]
    assert found == [("news.en:1", ("one", "eins")), ("news.en:2", ("two", "zwei")), ("news.en:4", ("four", "vier"))]
    assert source.skipped == {"a side is empty": 1, "no pairs": 1}
    before = source.fingerprint()
    assert open_source(folder, source_field="en", text_field="de").fingerprint() == before
    # The fingerprint is of both files.
    (folder / "news.de").write_bytes(b"eins\nzwoo\n-\nvier\n")
    assert open_source(folder, source_field="en", text_field="de").fingerprint() != before
    backwards = open_source(folder, source_field="de", text_field="en")
    assert next(iter(backwards)).pair == ("eins", "one")


def test_compressed_files_are_sides_too(tmp_path: Path):
    for name, text in (("a.en.gz", b"one\n"), ("a.de.gz", b"eins\n")):
        (tmp_path / name).write_bytes(gzip.compress(text))
    (document,) = open_source(tmp_path, source_field="en", text_field="de")
    assert document.pair == ("one", "eins")


def test_sides_of_other_lengths_are_no_pairs(tmp_path: Path):
    folder = write(tmp_path / "in", a_en="one\ntwo\n", a_de="eins\n", b_en="three\n", b_de="drei\n")
    source = open_source(folder, source_field="en", text_field="de")
    assert [document.pair for document in source] == [("three", "drei")]
    assert source.skipped == {"sides of other lengths": 1}
    with pytest.raises(DataError, match=r"a\.en has 2 lines, and a\.de 1"):
        open_source(folder, source_field="en", text_field="de", strict=True)


CATALOGUE = """
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

msgid "Open \\"%s\\""
msgstr ""
"%s "
"öffnen"

#, fuzzy
msgid "close"
msgstr "schließen?"

msgid "save"
msgstr ""

msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d Datei"
msgstr[1] "%d Dateien"

#~ msgid "old"
#~ msgstr "alt"
"""


def test_a_catalogue_is_read_in_either_direction(tmp_path: Path):
    pytest.importorskip("polib")
    (tmp_path / "de.po").write_text(CATALOGUE)
    source = open_source(tmp_path, source_field="msgid", text_field="msgstr")
    pairs = [document.pair for document in source]
    assert pairs == [('Open "%s"', "%s öffnen"), ("%d file", "%d Datei"), ("%d files", "%d Dateien")]
    assert source.skipped == {"a side is empty": 1, "fuzzy": 1, "obsolete": 1}
    backwards = open_source(tmp_path, source_field="msgstr", text_field="msgid")
    assert next(iter(backwards)).pair == ("%s öffnen", 'Open "%s"')


def test_a_catalogue_that_is_none_or_other_fields_are_said(tmp_path: Path):
    pytest.importorskip("polib")
    (tmp_path / "de.po").write_text("no catalogue at all")
    with pytest.raises(DataError, match="no catalogue of gettext"):
        list(open_source(tmp_path, source_field="msgid", text_field="msgstr"))
    (tmp_path / "de.po").write_text(CATALOGUE)
    with pytest.raises(DataError, match="no pairs in fields 'en'"):
        open_source(tmp_path, source_field="en", text_field="msgstr")
    # As a text it stays one.
    (document,) = open_source(tmp_path)
    assert document.text == CATALOGUE


def test_a_catalogue_that_spells_a_file_s_name_is_no_way_to_it(tmp_path: Path):
    pytest.importorskip("polib")
    (tmp_path / "elsewhere.txt").write_text(CATALOGUE)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for content in (str(tmp_path / "elsewhere.txt"), f"{tmp_path / 'elsewhere.txt'}\n"):
        (folder / "de.po").write_text(content)
        with pytest.raises(DataError, match="no catalogue of gettext") as refused:
            list(open_source(folder, source_field="msgid", text_field="msgstr"))
        assert "/tmp" not in str(refused.value).replace(str(folder), "")


def test_a_byte_order_mark_is_no_part_of_a_side(tmp_path: Path):
    for name, line in (("f.en", "the cat"), ("f.de", "die Katze")):
        (tmp_path / name).write_text(f"{line}\n", encoding="utf-8-sig")
    (document,) = open_source(tmp_path, source_field="en", text_field="de")
    assert document.pair == ("the cat", "die Katze")


def test_a_side_alone_names_the_other_one(tmp_path: Path):
    for name in ("f.en", "f.de", "g.en", "g.de"):
        (tmp_path / name).write_text("a line\n")
    source = open_source(tmp_path, source_field="en", text_field="de", include=["f.*", "g.en"])
    assert len(list(source)) == 1
    assert "plain text, and g.de is not read beside it" in str(source.left_out.examples)
