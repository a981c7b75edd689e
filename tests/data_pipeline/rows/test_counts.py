"""What is said of pairs, and of examples that are made of texts: tokens, estimates, lengths, and that nothing fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.inspect import decode_rows, describe, show_row
from data_pipeline.loader import Loader, build_loader, build_validation_loader
from data_pipeline.mixture.description import describe_mixture
from data_pipeline.prepare.sources import TextSource
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from data_pipeline.rows import epoch_blocks
from data_pipeline.rows.epoch_blocks import BlockAssignment, BlockPlanner
from data_pipeline.rows.micro_batches import MicroBatches
from data_pipeline.rows.order import FolderOrder
from data_pipeline.rows.pack import Packing
from data_pipeline.rows.row_preview import preview_rows
from data_pipeline.rows.row_reader import RowReader, documents_in, reader_options_for
from data_pipeline.rows.span_corruption import SpanRule
from data_pipeline.rows.text_segments import SegmentRule
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_writer import EncodedDocument, ShardWriter
from longctx.errors import ConfigError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.lengths import write_lengths

SEQ_LEN, SOURCE_SEQ_LEN = 64, 96
SPANS, SEGMENTS = Packing(examples=SpanRule()), Packing(examples=SegmentRule("nsp"))
OPTIONS: dict[str, dict[str, Any]] = {
    "pairs": {"seq_len": SEQ_LEN, "source_seq_len": SOURCE_SEQ_LEN},
    "spans": {"seq_len": SEQ_LEN, "source_seq_len": SOURCE_SEQ_LEN, "packing": SPANS},
    "segments": {"seq_len": SEQ_LEN, "packing": SEGMENTS},
}
KINDS = list(OPTIONS)


def write_pairs(folder: Path, tokenizer: Tokenizer, sizes: list[tuple[int, int]]) -> ShardSet:
    """A shard folder of pairs, whose targets and sources have these lengths."""
    folder.mkdir()
    writer = ShardWriter(folder, vocab_size=tokenizer.vocab_size, pairs=True)
    for number, (target, source) in enumerate(sizes):
        tokens, source_tokens = ((np.arange(n) * 7 + number * 13) % tokenizer.vocab_size for n in (target, source))
        pair = {"hash": number, "name": f"p{number}", "text_bytes": target}
        writer.add(EncodedDocument(tokens=tokens, source_tokens=source_tokens, **pair))
    writer.finish(split="training", tokenizer=tokenizer, sources=[], options={}, skipped={})
    tokenizer.save(folder)
    return ShardSet.open(folder)


@pytest.fixture(scope="module")
def wordpiece(source: TextSource, tmp_path_factory) -> Tokenizer:
    return train_tokenizer(source, tmp_path_factory.mktemp("counts") / "t.json", vocab_size=400, kind="wordpiece")


@pytest.fixture(scope="module")
def folders(source: TextSource, tokenizer: Tokenizer, wordpiece: Tokenizer, tmp_path_factory) -> dict[str, Path]:
    """A folder for each kind, of long and short documents; 1 in 20 pairs is too long."""
    place, rng = tmp_path_factory.mktemp("counts"), np.random.default_rng(0)
    marked = train_tokenizer(source, place / "t.model", vocab_size=400, sentinels=20)
    lengths = np.minimum(np.exp(rng.normal(4, 1.2, 600)).astype(int) + 3, 2000).tolist()
    sizes = [(int(n), int(n * factor) + 1) for n, factor in zip(rng.integers(3, 68, 600), rng.random(600), strict=True)]
    return {
        "pairs": write_pairs(place / "pairs", tokenizer, sizes).folder,
        "spans": write_lengths(place / "spans", marked, lengths).folder,
        "segments": write_lengths(place / "segments", wordpiece, lengths).folder,
    }


def loader_of(folders: dict[str, Path], kind: str, **options) -> Loader:
    return build_loader(folders[kind], rows_per_step=1, **(OPTIONS[kind] | options))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_run_are_those_of_its_rows(folders, kind):
    loader, read = loader_of(folders, kind), 0
    planner = BlockPlanner(ShardSet.open(folders[kind]), **OPTIONS[kind])
    of_rows = planner.plan(0, 0).row_tokens.tolist()
    assert sum(of_rows) == planner.plan(0, 0).taken == loader.pack_report().tokens
    for row in range(12):
        found = int((next(loader).document_ids >= 0).sum())
        read += found
        assert of_rows[row] == found
        assert loader.tokens_consumed == loader.state_dict()["tokens_consumed"] == read


@pytest.mark.parametrize("kind", KINDS)
def test_an_estimate_is_within_a_tenth_of_what_there_is(folders, kind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(epoch_blocks, "MIN_DOCUMENTS", 150)
    monkeypatch.setattr(epoch_blocks, "MIN_ROWS", 20)
    planner = BlockPlanner(ShardSet.open(folders[kind]), **OPTIONS[kind])
    assert planner.num_blocks == 4
    exact, report = planner.report(documents=600), planner.report()
    assert (exact.exact, report.exact) == (True, False)
    for name in ("rows", "tokens", "padding_share"):
        assert getattr(report, name) == pytest.approx(getattr(exact, name), rel=0.1), name
    assert report.padding_tokens == report.rows * SEQ_LEN - report.tokens
    assert report.documents_cut == pytest.approx(exact.documents_cut, rel=0.4)
    if kind == "pairs":
        left_out = sum(planner.plan(0, block).num_cut for block in range(4))
        assert exact.pairs_left_out == exact.documents_cut == left_out
        assert 10 < left_out < 60
        assert report.pairs_left_out == pytest.approx(left_out, rel=0.4)
    else:
        assert report.pairs_left_out is exact.pairs_left_out is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_survey_has_the_lengths_that_a_loader_reads(folders, kind):
    asked: list[tuple[tuple[int, ...], ...]] = []

    def cost(*lengths: tuple[int, ...]) -> int:
        asked.append(lengths)
        return 1

    options = {"source_seq_len": 0, "packing": Packing()} | OPTIONS[kind]
    shards, lengths = ShardSet.open(folders[kind]), (SEQ_LEN, options["source_seq_len"])
    of_sides = reader_options_for([shards], options["packing"], *lengths, seed=0)
    sides = RowReader(documents_in([shards]), SEQ_LEN, source_seq_len=lengths[1], **of_sides)
    dealt = MicroBatches.assign(1, most_rows=1)
    preview_rows(FolderOrder(shards, **options), sides, dealt, cost, documents=1, steps=5)
    loader = loader_of(folders, kind)
    for found in asked:
        batch = next(loader)
        wanted = [batch.documents.lengths]
        if batch.source is not None:
            wanted.append(batch.source.documents.lengths)
        assert list(found) == wanted
    assert len(asked) == 5


def test_bytes_of_a_token_are_not_known_of_examples(folders):
    known = {}
    for kind in KINDS:
        known[kind] = build_validation_loader(folders[kind], max_rows=2, **OPTIONS[kind]).bytes_per_token
    assert known == {"pairs": pytest.approx(1.0), "spans": None, "segments": None}


def test_pairs_of_which_none_fits_are_refused_with_lengths_that_do(folders):
    folder: Path = folders["pairs"]
    asked: dict[str, Any] = {"seq_len": 2, "source_seq_len": 3}
    said = r"(?s)no pair in .*pairs fits data.seq_len=2 and data.source_seq_len=3: the shortest has 3 tokens and"
    loader = build_loader(folder, rows_per_step=1, **asked)
    raising = {
        "the run's first lines": loader.pack_report,
        "its first row": lambda: next(loader),
        "validation": lambda: build_validation_loader(folder, **asked),
        "a sample": lambda: next(decode_rows(folder, rows=1, **asked)),
        "a row": lambda: show_row(folder, row=0, **asked),
    }
    for where, call in raising.items():
        with pytest.raises(ConfigError, match=said) as caught:
            call()
        assert ("validation.rows=0" in str(caught.value)) == (where == "validation")
        assert "Try data.seq_len=64 and data.source_seq_len=64, which fit most pairs" in str(caught.value)
    # They do.
    then = build_loader(folder, rows_per_step=1, seq_len=64, source_seq_len=64).pack_report()
    assert 0 < (then.pairs_left_out or 0) < 0.2 * 600
    # A description counts them.
    packing = describe(folder, **asked).packing
    assert packing is not None
    assert (packing.rows, packing.pairs_left_out, packing.padding_share) == (0, 600, 0)


def test_blocks_without_a_row_are_passed_over(tokenizer, tmp_path):
    shards = write_pairs(tmp_path / "late", tokenizer, [(100, 9)] * 6 + [(5, 9)] * 3)
    planner = BlockPlanner(shards, SEQ_LEN, source_seq_len=SOURCE_SEQ_LEN, shuffle=False, assignment=BlockAssignment(3))
    assert [planner.plan(0, block).num_rows for block in range(3)] == [0, 0, 1]
    report = planner.report()
    assert (report.rows, report.pairs_left_out, report.exact) == (1, 6, True)
    order = FolderOrder(shards, SEQ_LEN, source_seq_len=SOURCE_SEQ_LEN, shuffle=False, assignment=BlockAssignment(3))
    assert [len(row) for row in order.first_rows(2)] == [3, 3]


def test_texts_too_short_for_an_example_are_refused(wordpiece, tmp_path):
    folder = write_lengths(tmp_path / "short", wordpiece, [3, 2, 3]).folder
    loader = build_loader(folder, rows_per_step=1, **OPTIONS["segments"])
    said = r"(?s)segments .nsp. require texts with at least 2 tokens, but the longest text in .*short has 1\."
    for call in (loader.pack_report, lambda: next(loader)):
        with pytest.raises(ConfigError, match=said):
            call()
    with pytest.raises(ConfigError, match=rf"{said}.*or validation.rows=0"):
        build_validation_loader(folder, **OPTIONS["segments"])


def test_a_mixture_of_pairs_is_refused_at_once(folders, tmp_path):
    mixture = tmp_path / "mix.toml"
    sources = (("a", folders["segments"]), ("b", folders["pairs"]))
    mixture.write_text("".join(f'[[sources]]\nname = "{name}"\npath = "{path}"\n' for name, path in sources))
    said = "(?s)source 'b' in .*mix.toml contains pairs.*Build one folder from all pairs"
    for call in (
        lambda: describe_mixture(mixture),
        lambda: build_loader(mixture, seq_len=64, rows_per_step=1),
        lambda: build_validation_loader(mixture, seq_len=64),
        lambda: next(decode_rows(mixture, seq_len=64, rows=1)),
    ):
        with pytest.raises(ConfigError, match=said):
            call()


def test_a_length_of_sources_alone_is_refused(folders):
    with pytest.raises(ConfigError, match=r"source_seq_len=32 .* requires seq_len.\nTry --seq-len 32"):
        describe(folders["pairs"], source_seq_len=32)
