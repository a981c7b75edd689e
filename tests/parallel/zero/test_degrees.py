"""Rows side by side on any number of ranks, padded where they do not divide, against the plain one-process oracle."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from data_pipeline.rows.micro_batches import MicroBatches
from longctx.batch import Batch, PackedDocuments
from longctx.model.training_pass import Execution
from parallel.comm.world import sum_over_ranks
from parallel.layout.sequence import SequenceLayout
from parallel.layout.side_by_side import rows_at_once, tokens_on_ranks
from parallel.loss import count_step
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.zero.engine import ZeroEngine
from parallel.zero.optimizer import OptimizerOptions
from tests.helpers import run_distributed
from tests.oracles import Curve, packed_batch, train_alone
from tests.parallel.zero.test_zero import CLIP, DENSE, LR, MOE

ROWS, SEQ_LEN, STEPS = 5, 50, 3
KINDS = {"dense": DENSE, "moe": MOE}
BOUNDS = {"dense": 1e-5, "moe": 1e-4}
"""As in test_zero: a routing tie that falls the other way moves a norm."""


def step_rows(step: int) -> Batch:
    return packed_batch(rows=ROWS, seq_len=SEQ_LEN, vocab_size=64, seed=step)


def rows_of(batch: Batch, rows: range) -> Batch:
    """Neighbouring rows as a batch of their own."""
    start, stop = rows.start * SEQ_LEN, rows.stop * SEQ_LEN
    inside = [bound - start for bound in batch.documents.bounds if start <= bound <= stop]
    first = batch.documents.bounds.index(start)
    cut = batch.map_tokens(lambda x: x[rows.start : rows.stop])
    ids = torch.where(cut.document_ids < 0, cut.document_ids, cut.document_ids - first)
    return replace(cut, document_ids=ids, documents=PackedDocuments.of(inside))


def train_side_by_side(kind: str, *, stage: int, tokens_per_rank: int, layout: str, ulysses: int, **way: Any) -> Curve:
    """The oracle's steps, as many rows at once as the ranks of this process group hold."""
    config = KINDS[kind]
    mesh = Mesh.build(context=torch.distributed.get_world_size(), ulysses=ulysses, expert=way.pop("expert", 1))
    ranks = mesh.context
    dealt = MicroBatches.deal(ROWS, most_rows=rows_at_once(SEQ_LEN, ranks, tokens_per_rank))
    model = build_parallel_model(config, mesh, layout=layout, execution=Execution(**way))
    options = OptimizerOptions(clip_norm=CLIP)
    engine = ZeroEngine(model, stage=stage, dtype=torch.float32, accumulation=len(dealt), options=options)
    curve = Curve([], [], [])
    for step in range(STEPS):
        mine = []
        for number in range(len(dealt)):
            batch = rows_of(step_rows(step), dealt.rows(number, 0))
            tokens = tokens_on_ranks(
                batch.documents.num_tokens, ranks, ulysses=ulysses, tokens_per_rank=tokens_per_rank
            )
            batch = batch.padded(tokens)
            split = SequenceLayout.build(layout, tokens, ranks, batch.documents, ulysses)
            shard = batch.map_tokens(lambda x, split=split: split.split(x, mesh.context_rank, 1))
            mine.append(replace(shard, placement=split))
        counts = count_step(engine.model, mine)
        total = torch.zeros((), dtype=torch.float64)
        for batch in mine:
            loss = engine.forward(batch)
            total += loss["nll"].double()
            engine.backward(engine.model.loss(loss, counts))
        curve.norms.append(engine.step(LR))
        curve.losses.append(float(sum_over_ranks(total)) / counts["targets"])
    return curve


def check(kind: str, ways: list[dict[str, Any]]) -> None:
    wanted, _ = train_alone(KINDS[kind], [[step_rows(s)] for s in range(STEPS)], lr=LR, clip_norm=CLIP)
    assert min(wanted.norms) > CLIP, "clipping must be active"
    for way in ways:
        got = train_side_by_side(kind, **{"layout": "balanced", "ulysses": 1, **way})
        for name, mine, theirs in (("loss", got.losses, wanted.losses), ("norm", got.norms, wanted.norms)):
            worst = max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))
            if torch.distributed.get_rank() == 0:
                sys.stderr.write(f"{kind}, {torch.distributed.get_world_size()} ranks, {way}: {name} {worst:.1e}\n")
            assert worst <= BOUNDS[kind], f"{kind}, {way}: {name} is off by {worst}"


CHUNKS = {"keep": "attention", "store": "host", "chunk_tokens": 11}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "kind", "ways"),
    [
        (3, "dense", [{"stage": 0, "tokens_per_rank": 17}, {"stage": 2, "tokens_per_rank": 40, **CHUNKS}]),
        (3, "moe", [{"stage": 3, "tokens_per_rank": 40}]),
        (4, "moe", [{"stage": 2, "tokens_per_rank": 30, "expert": 4, "ulysses": 2}]),
        pytest.param(3, "moe", [{"stage": 1, "tokens_per_rank": 99, "layout": "contiguous"}], marks=pytest.mark.slow),
        pytest.param(5, "dense", [{"stage": 1, "tokens_per_rank": 20}], marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(200)
def test_any_number_of_ranks_trains_like_one_process(ranks, kind, ways):
    run_distributed(check, ranks, kind, ways, timeout=150)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [3, 5, 7])
@pytest.mark.timeout(900)
def test_in_every_stage_and_by_chunks(ranks, kind):
    ways = [{"stage": stage, "tokens_per_rank": n} for stage, n in ((0, 17), (1, 20), (2, 31), (3, 60))]
    ways += [{"stage": stage, "tokens_per_rank": 31, **CHUNKS} for stage in (2, 3)]
    run_distributed(check, ranks, kind, ways, timeout=800)


def test_the_cases_are_padded_and_uneven():
    """What this page is about happens in it."""
    padded, sizes = set(), set()
    for ranks, most in ((3, 17), (3, 40), (5, 20), (7, 17)):
        dealt = MicroBatches.deal(ROWS, most_rows=rows_at_once(SEQ_LEN, ranks, most))
        sizes.add(len(set(dealt.sizes)))
        for size in dealt.sizes:
            tokens = tokens_on_ranks(size * SEQ_LEN, ranks, ulysses=1, tokens_per_rank=most)
            padded.add(tokens - size * SEQ_LEN)
    assert sizes == {1, 2}
    assert min(padded) >= 0
    assert len(padded) > 2
