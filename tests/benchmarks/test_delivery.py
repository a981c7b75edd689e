"""The benchmark of deliveries at a small size: its corpora, its contenders, and what its figures become."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import delivery
from benchmarks.delivering import contest, corpus, details
from benchmarks.delivering.contender import Contender, Tokens
from benchmarks.delivering.contenders import COPY, HERE, OURS, SHARDS
from benchmarks.delivering.peers import END
from data_pipeline.loader import build_loader
from data_pipeline.shards.reader import ShardSet

TOKENS, SEQ_LEN = 60_000, 256


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.make_synthetic(tmp_path_factory.mktemp("delivery") / "corpus", TOKENS)


def test_shards_and_plain_tokens_are_the_same_documents(made):
    shards, tokens = ShardSet.open(made / SHARDS), Tokens.load(made)
    documents = list(tokens.documents())
    assert len(documents) == shards.num_documents
    for number, document in enumerate(documents):
        assert np.array_equal(shards.document(number), document)
        # A peer that finds documents by their last id finds these.
        assert np.flatnonzero(document == END).tolist() == [len(document) - 1]
    rows = list(tokens.rows(SEQ_LEN))
    assert len(rows) == TOKENS // SEQ_LEN
    assert np.array_equal(np.concatenate(rows), tokens.ids()[: len(rows) * SEQ_LEN])


@pytest.mark.few(2)
@pytest.mark.parametrize("contender", HERE, ids=lambda contender: contender.name)
def test_a_contender_gives_rows_without_end(made, tmp_path, contender: Contender):
    opened = contender.open(made, tmp_path, SEQ_LEN)
    rows = list(itertools.islice(opened.rows, 2 * TOKENS // SEQ_LEN))
    assert len(rows) == 2 * TOKENS // SEQ_LEN
    assert opened.state() is not None


def test_our_contender_gives_what_the_loader_gives(made, tmp_path):
    ours = next(contender for contender in HERE if contender.name == OURS).open(made, tmp_path, SEQ_LEN).rows
    loader = build_loader(made / SHARDS, seq_len=SEQ_LEN, rows_per_step=(1 << 20) // SEQ_LEN)
    for row, wanted in zip(itertools.islice(ours, 20), loader, strict=False):
        assert np.array_equal(row.unpack().tokens.numpy(), wanted.tokens.numpy())


@pytest.mark.slow
def test_a_contender_that_fails_says_why_and_the_others_go_on(made, monkeypatch, tmp_path):
    monkeypatch.setattr(contest, "MOST_SECONDS", 0.02)
    copy, ours = (next(of for of in HERE if of.name == name) for name in (COPY, OURS))
    seats = [contest.Seat(copy, made), contest.Seat(ours, tmp_path / "no-corpus")]
    try:
        rows = contest._compete_at(seats, tmp_path / "own", SEQ_LEN, TOKENS, 1)
    finally:
        for seat in seats:
            seat.close()
    assert rows[0]["problem"] == ""
    assert rows[0]["share"] == 1.0
    assert "DataError" in rows[1]["problem"]
    assert "share" not in rows[1]


@pytest.mark.slow
def test_figures_become_bounds_and_tables(made, monkeypatch):
    monkeypatch.setattr(contest, "MOST_SECONDS", 0.02)
    monkeypatch.setattr(details, "COMPUTED_SECONDS", 0.001)
    chosen = [contender for contender in HERE if contender.name in (COPY, OURS)]
    result = {
        "rates": {"synthetic": contest.compete(made, [8192], TOKENS, 1, chosen)},
        "details": {
            "synthetic": {
                "slices": details.measure_slices(made, seq_len=4096, num_rows=1, rounds=1),
                "waits": details.measure_waits(made, seq_len=1024, steps=5),
                "documents": details.measure_documents(made, count=100, rounds=1),
                "packing": [details.measure_packing(made, 8192, steps=1)],
            }
        },
    }
    bounds = delivery.bounds_of(result)
    assert len({bound.text for bound in bounds}) == len(bounds) == 4 + 3
    assert all(math.isfinite(bound.figure) for bound in bounds)
