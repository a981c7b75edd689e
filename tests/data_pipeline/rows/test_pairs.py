"""Pairs: built from two fields, packed whole under two budgets, and read side by side, by every rank its part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.loader import build_loader, build_validation_loader
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.sources import open_source
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from data_pipeline.rows.pack import Packing, Parts, plan_parts
from data_pipeline.rows.row_batches import Share
from data_pipeline.shards.reader import ShardSet, SourceSide
from longctx.batch import IGNORED_TARGET
from longctx.errors import ConfigError, DataError
from longctx.tokenizer import Tokenizer
from parallel.layout.sequence import SequenceLayout

SEQ_LEN, SOURCE_SEQ_LEN = 64, 96
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
OTHERS = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"]


def sentences(count: int) -> list[dict[str, str]]:
    """Numbers in words, in two languages; some long, some of one word."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        numbers = rng.integers(0, 10, rng.integers(1, 20)).tolist()
        found.append({"en": " ".join(WORDS[n] for n in numbers), "de": " ".join(OTHERS[n] for n in reversed(numbers))})
    return found


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [*sentences(300), {"en": "", "de": "leer"}, {"en": "nothing", "de": "  "}, {"en": "null", "de": None}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path: Path):
    return open_source(path, text_field="de", source_field="en")


@pytest.fixture(scope="module")
def own(pairs: Path, tmp_path_factory) -> Tokenizer:
    return train_tokenizer(opened(pairs), tmp_path_factory.mktemp("pairs") / "t.model", vocab_size=300)


@pytest.fixture(scope="module")
def folder(pairs: Path, own: Tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "shards"
    report = build_shards(opened(pairs), own, folder, validation_fraction=0.1, shard_tokens=2000)
    assert report.skipped == {"a side is empty": 3}
    return folder


def test_both_sides_come_back(pairs: Path, own: Tokenizer, folder: Path):
    shards = ShardSet.open(folder)
    assert len(shards.manifest.shards) > 1
    assert shards.manifest.has_sources
    assert shards.manifest.version == 2
    found = []
    for split in (shards, ShardSet.open(folder / "validation")):
        numbers = np.arange(split.num_documents)
        sides = [
            split.slices([(n, 0, 10_000) for n in numbers]),
            SourceSide(split).slices([(n, 0, 10_000) for n in numbers]),
        ]
        assert [len(x) for x in sides[1]] == SourceSide(split).lengths_of(numbers).tolist()
        found += [(own.decode(source), own.decode(target)) for target, source in zip(*sides, strict=True)]
        assert all(target[0] == own.prefix_ids[0] and target[-1] == own.suffix_ids[0] for target in sides[0])
    assert sorted(found) == sorted((row["en"], row["de"]) for row in sentences(300))


@settings(max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 15)), min_size=1, max_size=60),
    open_rows=st.integers(1, 8),
    shuffle=st.booleans(),
)
def test_every_pair_that_fits_is_in_one_row_whole(sizes, open_rows, shuffle):
    lengths, source_lengths = (np.array(x, np.int64) for x in zip(*sizes, strict=True))
    parts = Parts.whole(np.arange(len(sizes)), lengths, source_lengths)
    plan = plan_parts(parts, 10, source_seq_len=12, open_rows=open_rows, shuffle=shuffle, seed=3)
    rows, _ = plan.rows(0, plan.num_rows)
    seen = []
    for row in rows:
        assert row.lengths == [sizes[n][0] for n in row.documents]
        assert row.source_lengths == [sizes[n][1] for n in row.documents]
        assert sum(row.lengths) <= 10
        assert sum(row.source_lengths) <= 12
        assert len(row)
        seen += list(row.documents)
    fitting = [n for n, (target, source) in enumerate(sizes) if target <= 10 and source <= 12]
    assert sorted(seen) == fitting
    assert plan.num_cut == len(sizes) - len(fitting)
    assert plan_parts(
        parts, 10, source_seq_len=12, open_rows=open_rows, shuffle=shuffle, seed=3
    ).row_offsets.tolist() == (plan.row_offsets.tolist())


def test_rows_have_both_sides_of_the_same_pairs(folder: Path, own: Tokenizer):
    loader = build_loader(folder, seq_len=SEQ_LEN, source_seq_len=SOURCE_SEQ_LEN, rows_per_step=3, micro_batch_rows=3)
    wanted = {row["de"]: row["en"] for row in sentences(300)}
    for _ in range(4):
        batch = next(loader)
        source = batch.source
        assert batch.tokens.shape == (3, SEQ_LEN)
        assert source.tokens.shape == (3, SOURCE_SEQ_LEN)
        assert batch.documents.num_documents == source.documents.num_documents
        assert source.next_token_ids is None
        ids, source_ids = batch.document_ids.flatten(), source.document_ids.flatten()
        assert set(ids[ids >= 0].tolist()) == set(source_ids[source_ids >= 0].tolist())
        for n in set(ids[ids >= 0].tolist()):
            target, read = batch.tokens.flatten()[ids == n], source.tokens.flatten()[source_ids == n]
            assert wanted[own.decode(target.numpy())] == own.decode(read.numpy())
        # All but the first token of each target is predicted.
        assert int((batch.targets != IGNORED_TARGET).sum()) == int((ids >= 0).sum()) - len(set(ids[ids >= 0].tolist()))


@pytest.mark.parametrize(("layout", "degree"), [("zigzag", 2), ("striped", 3), ("balanced", 2)])
def test_a_rank_reads_its_part_of_both_sides(folder: Path, layout, degree):
    whole = build_loader(folder, seq_len=60, source_seq_len=96, rows_per_step=2, micro_batch_rows=2)

    def place(rank: int, *, causal: bool):
        def of(documents):
            laid = SequenceLayout.build(layout, documents.num_tokens, degree, documents, causal=causal)
            return Share(documents, laid.rank_runs(rank), laid)

        return of

    ranks = [
        build_loader(folder, seq_len=60, source_seq_len=96, rows_per_step=2, micro_batch_rows=2) for _ in range(degree)
    ]
    for _ in range(3):
        batch = next(whole).flatten_rows()
        taken = [loader.take(place(r, causal=True), place(r, causal=False)) for r, loader in enumerate(ranks)]
        for rank, part in enumerate(taken):
            got = part.share.unpack()
            for mine, all_of_it in ((got, batch), (got.source, batch.source)):
                assert mine.documents == all_of_it.documents
                for name, x in all_of_it.per_token().items():
                    assert torch.equal(mine.per_token()[name], mine.placement.split(x, rank, 1)), name
            # Padding is attended to as well, so its lengths cost what others' do.
            assert part.source_lengths == batch.source.documents.lengths
            found = part.share.source.unpack_by_lookup("cpu")
            assert torch.equal(found["tokens"].view(1, -1), got.source.tokens)
            assert torch.equal(found["document_ids"].view(1, -1), got.source.document_ids)


def test_a_run_goes_on_at_any_step(folder: Path):
    options = {"seq_len": SEQ_LEN, "source_seq_len": SOURCE_SEQ_LEN, "rows_per_step": 2, "seed": 4}
    loader = build_loader(folder, **options)
    states, batches = [], []
    for _ in range(6):
        states.append(loader.state_dict())
        batches.append((next(loader), next(loader)))
    for state, wanted in zip(states, batches, strict=True):
        again = build_loader(folder, **options)
        again.load_state_dict(state)
        for batch in wanted:
            got = next(again)
            assert torch.equal(got.tokens, batch.tokens)
            assert torch.equal(got.source.tokens, batch.source.tokens)
    other = build_loader(folder, **{**options, "source_seq_len": SOURCE_SEQ_LEN + 1})
    with pytest.raises(DataError, match=f"source_seq_len={SOURCE_SEQ_LEN}, but this run has {SOURCE_SEQ_LEN + 1}"):
        other.load_state_dict(states[0])


def test_held_out_pairs_are_read_in_their_order(folder: Path):
    loader = build_validation_loader(folder / "validation", seq_len=SEQ_LEN, source_seq_len=SOURCE_SEQ_LEN)
    batches = list(loader)
    shards = ShardSet.open(folder / "validation")
    numbers = np.arange(shards.num_documents)
    fits = (shards.lengths_of(numbers) <= SEQ_LEN) & (shards.lengths_of(numbers, "source") <= SOURCE_SEQ_LEN)
    assert 0 < fits.sum() < len(fits)
    assert sum(len(set(b.document_ids[b.document_ids >= 0].tolist())) for b in batches) == fits.sum()


def test_what_is_refused(folder: Path, pairs: Path, built: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"contains pairs.*data.source_seq_len"):
        build_loader(folder, seq_len=64, rows_per_step=1)
    with pytest.raises(ConfigError, match="contains none"):
        build_loader(built, seq_len=64, source_seq_len=64, rows_per_step=1)
    with pytest.raises(ConfigError, match="pairs must stay uncut"):
        next(build_loader(folder, seq_len=64, source_seq_len=64, rows_per_step=1, packing=Packing("concatenate")))
    with pytest.raises(DataError, match=r"has no pairs in fields 'fr' .source. and 'de'"):
        open_source(pairs, text_field="de", source_field="fr")
    with pytest.raises(DataError, match="are the same field"):
        open_source(pairs, text_field="de", source_field="de")
    with pytest.raises(DataError, match="--format messages selects conversations"):
        open_source(pairs, text_field="de", source_field="en", format="messages")
