"""Corrupted spans: by T5's own definition of a mask, for every rank alike, and nothing of a text is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.loader import build_loader, build_validation_loader
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.sources import TextSource
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from data_pipeline.rows.pack import Packing
from data_pipeline.rows.row_batches import Share
from data_pipeline.rows.span_corruption import SpanRule, Spans
from data_pipeline.shards.reader import ShardSet
from longctx.errors import ConfigError
from longctx.tokenizer import Tokenizer
from parallel.layout.sequence import SequenceLayout

SEQ_LEN, SOURCE_SEQ_LEN = 48, 128
RULE = SpanRule()


@pytest.fixture(scope="module")
def marked(source: TextSource, tmp_path_factory) -> Tokenizer:
    """A tokenizer with sentinels."""
    return train_tokenizer(source, tmp_path_factory.mktemp("spans") / "t.model", vocab_size=400, sentinels=20)


@pytest.fixture(scope="module")
def folder(source: TextSource, marked: Tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("spans") / "shards"
    build_shards(source, marked, folder, validation_fraction=0.2, shard_tokens=20_000)
    return folder


def whole(source: list[int], target: list[int], sentinels: tuple[int, ...]) -> list[int]:
    """The text of both sides: each sentinel of the source by what stands behind it in the target."""
    filled: dict[int, list[int]] = {}
    for token in target:
        if token in sentinels:
            filled[token] = []
        else:
            filled[list(filled)[-1]].append(token)
    # Sentinels come in their order, each once on either side.
    assert list(filled) == list(sentinels[: len(filled)]) == [token for token in source if token in sentinels]
    return [x for token in source for x in filled.get(token, [token])]


@settings(max_examples=150)
@given(count=st.integers(1, 400), rate=st.floats(0.01, 0.9), length=st.floats(1, 9), seed=st.integers(0, 9))
def test_a_piece_has_the_lengths_that_the_rule_says_and_comes_back(folder, marked, count, rate, length, seed):
    rule = SpanRule(rate, length)
    spans = Spans(RULE, ShardSet.open(folder), seq_len=SEQ_LEN, source_seq_len=SOURCE_SEQ_LEN, seed=seed)
    spans.rule = rule
    spans.sentinels = np.arange(1000, 2000, dtype=np.int32)
    tokens = np.arange(count, dtype=np.int32)
    made = spans.corrupt((3, 7, 7 + count), 2, tokens)
    source, target = made.source, made.tokens
    n = np.array([count])
    assert (len(source), len(target)) == (rule.source_lengths(n)[0], rule.lengths(n)[0])
    assert target[0] == marked.prefix_ids[0]
    assert source[-1] == target[-1] == marked.suffix_ids[0]
    back = whole(source[:-1].tolist(), target[1:-1].tolist(), tuple(range(1000, 2000)))
    assert back == tokens.tolist()
    # T5's own numbers (``random_spans_noise_mask``): at least one token out and one left, spans rounded.
    taken = int(rule.taken(n)[0])
    if count > 1:
        assert taken == min(max(int(np.round(count * rate)), 1), count - 1)
        wanted = max(int(np.round(taken / length)), 1)
        assert int(rule.spans(n)[0]) == min(wanted, count - taken)
        # A text begins with what is left and ends with what is out, as T5's.
        assert source[0] < 1000
        assert source[-2] >= 1000


def test_other_seeds_epochs_and_places_cut_elsewhere(folder):
    shards = ShardSet.open(folder)
    tokens, found = np.arange(200, dtype=np.int32), set()
    for seed, epoch, document, start in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 5)):
        spans = Spans(RULE, shards, seq_len=SEQ_LEN, source_seq_len=SOURCE_SEQ_LEN, seed=seed)
        found.add(spans.corrupt((document, start, start + 200), epoch, tokens).source.tobytes())
    assert len(found) == 5


def loader_of(folder: Path, **options):
    packing = Packing(examples=RULE)
    return build_loader(
        folder,
        seq_len=SEQ_LEN,
        source_seq_len=SOURCE_SEQ_LEN,
        rows_per_step=2,
        micro_batch_rows=2,
        packing=packing,
        **options,
    )


def test_rows_hold_every_token_of_the_texts_once(folder, marked):
    shards, loader = ShardSet.open(folder), loader_of(folder, shuffle=False)
    report = loader.pack_report()
    assert report.truncated_tokens == 0
    assert report.tokens + report.padding_tokens == report.rows * SEQ_LEN
    texts: list[int] = []
    sentinels = marked.special.sentinels
    while loader.epoch == 0:
        batch = next(loader)
        ids, source_ids = batch.document_ids.flatten(), batch.source.document_ids.flatten()
        for n in sorted(set(ids[ids >= 0].tolist())):
            target = batch.tokens.flatten()[ids == n].tolist()
            read = batch.source.tokens.flatten()[source_ids == n].tolist()
            texts += whole(read[:-1], target[1:-1], sentinels)
    # What the tokenizer puts around a text is no part of it.
    wanted = np.concatenate([shards.document(n)[1:-1] for n in range(shards.num_documents)]).tolist()
    # The last step may have begun the next epoch.
    missing, more = Counter(wanted) - Counter(texts), Counter(texts) - Counter(wanted)
    assert not missing
    assert more.total() <= 2 * SOURCE_SEQ_LEN


@pytest.mark.parametrize(("layout", "degree"), [("zigzag", 2), ("striped", 2)])
def test_ranks_read_equal_bits_and_a_run_goes_on_to_them(folder, layout, degree):
    whole_loader, ranks = loader_of(folder, seed=5), [loader_of(folder, seed=5) for _ in range(degree)]

    def place(rank: int):
        def of(documents):
            laid = SequenceLayout.build(layout, documents.num_tokens, degree, documents)
            return Share(documents, laid.rank_runs(rank), laid)

        return of

    for step in range(3):
        state = whole_loader.state_dict()
        batch = next(whole_loader)
        again = loader_of(folder, seed=5)
        again.load_state_dict(state)
        assert torch.equal(next(again).source.tokens, batch.source.tokens)
        flat = batch.flatten_rows()
        for rank, loader in enumerate(ranks):
            got = loader.take(place(rank)).share.unpack()
            for mine, all_of_it in ((got, flat), (got.source, flat.source)):
                assert torch.equal(mine.tokens, mine.placement.split(all_of_it.tokens, rank, 1)), step
            assert torch.equal(got.targets, got.placement.split(flat.targets, rank, 1))


def test_validation_reads_the_same_each_time(folder):
    def rows():
        options = {
            "seq_len": SEQ_LEN,
            "source_seq_len": SOURCE_SEQ_LEN,
            "max_rows": 4,
            "packing": Packing(examples=RULE),
        }
        return [batch.source.tokens for batch in build_validation_loader(folder / "validation", **options)]

    assert len(rows()) == 4
    assert all(torch.equal(a, b) for a, b in zip(rows(), rows(), strict=True))


def test_what_is_refused(folder, built, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)has no sentinels.*--sentinels 10"):
        build_loader(
            built,
            seq_len=SEQ_LEN,
            source_seq_len=SOURCE_SEQ_LEN,
            rows_per_step=1,
            packing=Packing(examples=SpanRule(0.2, 3)),
        )
    with pytest.raises(ConfigError, match="has 20 sentinels"):
        build_loader(folder, seq_len=512, source_seq_len=2048, rows_per_step=1, packing=Packing(examples=RULE))
    with pytest.raises(ConfigError, match="do not fit a single token"):
        build_loader(folder, seq_len=1, source_seq_len=8, rows_per_step=1, packing=Packing(examples=RULE))
    for bad in ((0.0, 3.0), (1.0, 3.0), (0.15, 0.5), (float("nan"), 3.0)):
        with pytest.raises(ConfigError, match="must be"):
            SpanRule(*bad)
