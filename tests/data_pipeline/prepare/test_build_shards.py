"""Builds in one part: the same folder again, other recipes, and texts that do not come back."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.inspect import find_problems
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.encode_texts import find_mismatches
from data_pipeline.prepare.sources import TextSource, open_source
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from data_pipeline.shards.reader import ShardSet
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.tokenizer_base import Chunk
from tests.data_pipeline.growth import run_measured
from tests.longctx.conversion.tiny_tokenizer import train_tokenizer as lossy_tokenizer


def texts(folder: Path) -> dict[str, str]:
    shards = ShardSet.open(folder)
    tokenizer = shards.tokenizer()
    return {shards.name(i): tokenizer.decode(shards.document(i)) for i in range(shards.num_documents)}


def test_a_document_keeps_its_side_when_others_come_and_go(
    built: Path, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
):
    part = tmp_path / "part"
    part.mkdir()
    for path in sorted(corpus.iterdir())[::2]:
        shutil.copy(path, part / f"renamed_{path.name}")
    build_shards(open_source(part), tokenizer, tmp_path / "out", validation_fraction=0.2)
    held_out = set(texts(built / "validation").values())
    assert set(texts(tmp_path / "out" / "validation").values()) <= held_out
    assert not set(texts(tmp_path / "out").values()) & held_out


def test_the_fraction_is_about_right():
    from data_pipeline.shuffle import falls_below

    values = np.random.default_rng(0).integers(0, 2**63, 4000).tolist()
    assert 0.08 < np.mean([falls_below(value, 0.1, 7) for value in values]) < 0.12
    assert not any(falls_below(value, 0.0, 7) for value in values)


class TestExistingOutput:
    def test_the_same_recipe_is_up_to_date(self, built: Path, source: TextSource, tokenizer: Tokenizer):
        before = (built / "manifest.json").stat().st_mtime_ns
        report = build_shards(source, tokenizer, built, validation_fraction=0.2, shard_tokens=20_000)
        assert report.up_to_date
        assert report.validation
        assert (built / "manifest.json").stat().st_mtime_ns == before

    def test_another_recipe_is_an_error_that_says_what_differs(
        self, damaged: Path, corpus: Path, source: TextSource, tokenizer: Tokenizer, tmp_path: Path
    ):
        with pytest.raises(DataError, match="built from another options"):
            build_shards(source, tokenizer, damaged, validation_fraction=0.1)
        other = open_source(corpus, exclude=["a*"])
        with pytest.raises(DataError, match="another source and options"):
            build_shards(other, tokenizer, damaged)
        fewer = train_tokenizer(source, tmp_path / "fewer.model", vocab_size=500)
        with pytest.raises(DataError, match=r"another tokenizer.\n.*overwrite"):
            build_shards(source, fewer, damaged, validation_fraction=0.2, shard_tokens=20_000)
        report = build_shards(source, fewer, damaged, overwrite=True)
        assert not report.up_to_date
        assert ShardSet.open(damaged).manifest.vocab_size == 500
        assert find_problems(damaged) == []

    def test_a_damaged_folder_is_not_up_to_date(self, damaged: Path, source: TextSource, tokenizer: Tokenizer):
        (damaged / "validation" / "00000.arrow").unlink()
        with pytest.raises(DataError, match=r"00000.arrow is missing"):
            build_shards(source, tokenizer, damaged, validation_fraction=0.2, shard_tokens=20_000)

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_folder_of_other_things_is_never_touched(
        self, source: TextSource, tokenizer: Tokenizer, tmp_path: Path, overwrite: bool
    ):
        (tmp_path / "thesis.txt").write_text("precious")
        with pytest.raises(DataError, match="not a shard folder"):
            build_shards(source, tokenizer, tmp_path, overwrite=overwrite)
        assert (tmp_path / "thesis.txt").read_text() == "precious"

    def test_an_empty_folder_may_be_used(self, source: TextSource, tokenizer: Tokenizer, tmp_path: Path):
        (tmp_path / "out").mkdir()
        assert build_shards(source, tokenizer, tmp_path / "out").training.documents


def test_one_document_needs_no_validation(tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "a.txt").write_text("one document " * 30)
    source = open_source(tmp_path / "a.txt")
    report = build_shards(source, tokenizer, tmp_path / "none", validation_fraction=0)
    assert report.validation is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert build_shards(source, tokenizer, tmp_path / "out", validation_fraction=1e-9).validation is None
    assert "the validation split is empty" in caplog.text
    assert not (tmp_path / "out" / "validation").exists()
    with pytest.raises(DataError, match="Try validation_fraction=0"):
        build_shards(source, tokenizer, tmp_path / "all", validation_fraction=0.999999999)
    with pytest.raises(DataError, match="validation_fraction=1 must be"):
        build_shards(source, tokenizer, tmp_path / "all", validation_fraction=1)


def test_texts_that_do_not_come_back_are_counted_and_refused_when_asked(source: TextSource, tmp_path: Path):
    """A model trained elsewhere, with SentencePiece's usual clean-up of spaces, would change the text."""
    path = lossy_tokenizer(tmp_path / "lossy.model", add_dummy_prefix=True, remove_extra_whitespaces=True)
    tokenizer = load_tokenizer(path)
    with pytest.raises(DataError, match=r"character [\d,]+ .* became (?s:.*)does not round-trip exactly"):
        build_shards(source, tokenizer, tmp_path / "out", exact=True)
    assert [p.name for p in tmp_path.iterdir()] == ["lossy.model"]
    report = build_shards(source, tokenizer, tmp_path / "out")
    assert report.inexact == 41
    assert len(report.differences) == 3
    assert report.differences[0].before != report.differences[0].after
    # What was built says so when it is built again.
    assert build_shards(source, tokenizer, tmp_path / "out").inexact == 41
    with pytest.raises(DataError, match="41 documents that do not round-trip"):
        build_shards(source, tokenizer, tmp_path / "out", exact=True)


BUILD = """
import sys
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.sources import open_source
from longctx.tokenizer import load_tokenizer
source, model, output = sys.argv[1:]
tokenizer = load_tokenizer(model)
begin()
build_shards(open_source(source), tokenizer, output, validation_fraction=0)
print(growth())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with Linux's /proc")
def test_memory_beside_one_document_is_bounded(corpus: Path, tokenizer: Tokenizer, tmp_path: Path):
    """A document took 44 bytes a byte. It takes its text, its ids, and a constant."""
    text = "".join(path.read_text() for path in sorted(corpus.iterdir()))
    grown: list[int] = []
    # Both are longer than the group that is encoded at once, whose memory is the constant.
    for megabytes in (8, 24):
        (tmp_path / "large.txt").write_text((text * (megabytes * 10**6 // len(text) + 1))[: megabytes * 10**6])
        output = tmp_path / f"out {megabytes}"
        grown.append(int(run_measured(BUILD, tmp_path / "large.txt", tokenizer.path, output)))
    assert (grown[1] - grown[0]) / 16e6 < 8


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_standard_library_comes_back(tmp_path: Path):
    source = open_source("stdlib")
    tokenizer = train_tokenizer(source, tmp_path / "a.model", vocab_size=4096)
    build_shards(source, tokenizer, tmp_path / "out")
    found = texts(tmp_path / "out") | texts(tmp_path / "out" / "validation")
    assert found == {document.name: document.text for document in source}
    assert find_problems(tmp_path / "out") == []


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(lossy_tokenizer(tmp_path_factory.mktemp("own") / "a.model"))


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("lossy")
    return load_tokenizer(lossy_tokenizer(folder / "a.model", add_dummy_prefix=True, remove_extra_whitespaces=True))


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), max_size=6))
def test_only_what_differs_is_found(own: Tokenizer, lossy: Tokenizer, texts: list[str]):
    chunks = [Chunk(text, True) for text in texts]
    assert find_mismatches(own.encode_chunks(chunks), chunks, own) == {}
    swapped = own.encode_chunks([Chunk(f"{text}!", True) for text in texts])
    assert find_mismatches(swapped, chunks, own) == {number: f"{text}!" for number, text in enumerate(texts)}
    assert lossy.byte_table is None
    ids = lossy.encode_chunks(chunks)
    decoded = [lossy.decode(part) for part in ids]
    expected = {number: text for number, text in enumerate(decoded) if text != texts[number]}
    assert find_mismatches(ids, chunks, lossy) == expected
