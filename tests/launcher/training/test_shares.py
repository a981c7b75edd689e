"""A rank's share of a micro-batch, read by itself: what the whole batch, split, has for it, to the bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.loader import build_loader, build_validation_loader
from data_pipeline.rows.pack import Piece, Row
from data_pipeline.rows.row_batches import build_batch, build_share
from data_pipeline.shards.reader import ShardSet
from launcher.config.config_sections import RunConfig
from launcher.config.load_config import load_run_config
from launcher.training.task_builder import shard_batch, share_of
from longctx.batch import PADDING_DOCUMENT, Batch
from longctx.compact_batch import CompactBatch
from longctx.tokenizer import load_tokenizer
from parallel.layout.sequence import KINDS, num_parts
from tests.data_pipeline.lengths import write_lengths
from tests.launcher.runs import TINY_MODEL

LENGTHS = (1, 2, 7, 63, 64, 65, 200, 3, 128, 500, 31, 1)


@pytest.fixture(scope="module")
def corpus(shards: Path, tmp_path_factory) -> ShardSet:
    """Documents of odd lengths, each token different from its neighbours."""
    folder = tmp_path_factory.mktemp("odd") / "shards"
    return write_lengths(folder, load_tokenizer(shards), list(LENGTHS), shard_tokens=300)


@cache
def loaded(**keys: Any) -> RunConfig:
    named = {**TINY_MODEL, **{name.replace("__", "."): value for name, value in keys.items()}}
    return load_run_config([word for key, value in named.items() for word in (f"--{key}", str(value))])


def config_of(row_tokens: int, **keys: Any) -> RunConfig:
    # Reading a command line takes longer than all that an example does.
    config = loaded(**keys)
    return replace(config, data=replace(config.data, seq_len=row_tokens))


def mesh_of(config: RunConfig, rank: int) -> Any:
    return SimpleNamespace(context=config.parallel.context, ulysses=config.parallel.ulysses, context_rank=rank)


def check_equal(compact: CompactBatch, wanted: Batch) -> None:
    share = compact.unpack()
    for name in ("tokens", "targets", "positions", "document_ids"):
        assert torch.equal(getattr(share, name), getattr(wanted, name)), name
    assert share.documents == wanted.documents
    assert share.row_tokens == wanted.row_tokens
    assert share.placement == wanted.placement
    assert compact.num_targets == wanted.num_targets
    assert compact.num_tokens == int((wanted.document_ids != PADDING_DOCUMENT).sum())


def check_rows(corpus: ShardSet, config: RunConfig, pieces: list[list[Piece]]) -> None:
    rows = [Row.of(row) for row in pieces]
    whole = build_batch(corpus, rows, config.data.seq_len).unpack()
    for rank in range(config.parallel.context):
        mesh = mesh_of(config, rank)
        share, documents = build_share(
            corpus, rows, config.data.seq_len, lambda found, mesh=mesh: share_of(found, config, mesh)
        )
        check_equal(share, shard_batch(whole, config, mesh))
        assert documents == whole.documents


@pytest.mark.few(3)
@pytest.mark.parametrize(("context", "ulysses"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (2, 2), (5, 1)])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_share_is_what_a_split_gives(corpus, kind, context, ulysses, data):
    parts = num_parts(kind, context, ulysses)
    row_tokens = parts * data.draw(st.integers(1, 400 // parts))
    rows = []
    for _ in range(data.draw(st.integers(1, 3))):
        row, left = [], row_tokens
        while left and data.draw(st.booleans()):
            document = data.draw(st.integers(0, len(LENGTHS) - 1))
            start = data.draw(st.integers(0, LENGTHS[document] - 1))
            stop = min(LENGTHS[document], start + data.draw(st.integers(1, left)))
            row.append((document, start, stop))
            left -= stop - start
        rows.append(row)
    check_rows(corpus, config_of(row_tokens, parallel__context=context, parallel__layout=kind,
                                 parallel__ulysses=ulysses), rows)  # fmt: skip


@pytest.mark.parametrize("tokens_per_rank", [64, 100, 128])
@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_padding_behind_rows_side_by_side_is_the_same(corpus, tokens_per_rank, num_rows):
    config = config_of(
        64,
        parallel__context=3,
        parallel__layout="balanced",
        parallel__tokens_per_rank=tokens_per_rank,
        train__micro_batch_rows=num_rows,
    )
    check_rows(corpus, config, [[(9, 64 * n, 64 * (n + 1))] for n in range(num_rows - 1)] + [[(10, 0, 31), (2, 0, 7)]])


def test_loaders_give_shares_in_the_order_of_their_batches(corpus):
    config = config_of(64, parallel__context=2, parallel__layout="zigzag")
    for rank in range(2):
        mesh = mesh_of(config, rank)

        def place(documents, mesh=mesh):
            return share_of(documents, config, mesh)

        common: dict[str, Any] = {"seq_len": 64, "micro_batch_rows": 2}
        by_batch, by_share = (build_loader(corpus.folder, rows_per_step=6, **common) for _ in range(2))
        for _ in range(9):
            check_equal(by_share.take(place).share, shard_batch(next(by_batch), config, mesh))
            assert by_share.state_dict() == by_batch.state_dict()
        validation = build_validation_loader(corpus.folder, max_rows=7, **common)
        for share, batch in zip(validation.shares(place), validation, strict=True):
            check_equal(share, shard_batch(batch, config, mesh))


def test_a_share_reads_its_own_tokens_and_one_more_of_each_run(corpus, monkeypatch):
    read: list[int] = []
    slices_of = ShardSet.slices

    def counted(self, pieces):
        found = slices_of(self, pieces)
        read.extend(map(len, found))
        return found

    monkeypatch.setattr(ShardSet, "slices", counted)
    config = config_of(480, parallel__context=4, parallel__layout="zigzag")
    for rank in range(4):
        read.clear()
        mesh = mesh_of(config, rank)
        build_share(corpus, [Row.of([(9, 0, 480)])], 480, lambda found, mesh=mesh: share_of(found, config, mesh))
        # Two runs of 60 tokens; those of the last rank are neighbours.
        assert sum(read) == 120 + len(read)
        assert len(read) <= 2
