"""The benchmark of planning at a small size: its corpora are shard folders, and its figures make its tables."""

from __future__ import annotations

import math

import numpy as np

from benchmarks import data_plan
from data_pipeline.loader import build_loader
from data_pipeline.shards.reader import ShardSet


def test_a_corpus_of_holes_has_every_length_and_takes_no_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(data_plan, "SHARD_DOCUMENTS", 3000)
    shards = ShardSet.open(data_plan.make_corpus(tmp_path / "data", 10_000), verify=False)
    lengths = shards.lengths_of(np.arange(10_000))
    assert [entry.documents for entry in shards.manifest.shards] == [3000, 3000, 3000, 1000]
    assert lengths.sum() == shards.num_tokens
    assert 1000 < lengths.mean() < 1300
    assert sum(shards.manifest.length_histogram.values()) == 10_000
    size = sum(path.stat().st_blocks * 512 for path in shards.folder.glob("*.arrow"))
    assert size < 30 * 10_000 < shards.num_tokens
    batch = next(build_loader(shards.folder, seq_len=4096, rows_per_step=1, verify=False))
    assert not batch.tokens.any()


def test_its_figures_make_its_bounds_and_tables(monkeypatch, tmp_path):
    monkeypatch.setattr(data_plan, "ROUNDS", 1)
    monkeypatch.setattr(data_plan, "run_ranks", lambda function, _, *arguments, preload: [function(*arguments)])
    content = data_plan.measure([5000])
    bounds = data_plan.bounds_of(content)
    assert len({str(bound) for bound in bounds}) == len(bounds) == 4 + 2 * 4
    assert all(math.isfinite(bound.figure) for bound in bounds)
