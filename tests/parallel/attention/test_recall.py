"""A task that only long-range gradients can solve, learnt over several ranks.

The first quarter of a row holds (key, value) pairs at random places, the last quarter asks for values by key; the
loss is on the answers alone. So every answer is at least half a row away from its question and, with the contiguous
layout, on another rank. The rows grow from 32 to 512 tokens: without that curriculum even one process learns next to
nothing in the same number of steps.
"""

from __future__ import annotations

import sys

import pytest
import torch

from longctx.batch import IGNORED_TARGET, Batch, PackedDocuments
from longctx.config import ModelConfig
from parallel.comm.world import sum_over_ranks
from parallel.layout.sequence import SequenceLayout
from parallel.loss import count_step
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.zero.engine import ZeroEngine
from parallel.zero.optimizer import OptimizerOptions
from tests.helpers import run_distributed

NOISE, KEYS, VALUES = 16, 32, 32
TOKENS_PER_BATCH, LONGEST, MOST_STEPS = 8192, 512, 900
CONFIG = ModelConfig(
    vocab_size=NOISE + KEYS + VALUES,
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    qkv_bias=False,
    ffn_size=128,
    tie_embeddings=False,
    init_std=64**-0.5,
)


def recall_rows(length: int, seed: int) -> Batch:
    """Rows of ``length`` tokens: pairs, noise, questions; a question's target is the value that followed its key."""
    g = torch.Generator().manual_seed(seed)
    rows, quarter, pairs = TOKENS_PER_BATCH // length, length // 4, min(8, length // 8)
    questions = min(16, length // 8)
    tokens = torch.randint(NOISE, (rows, length), generator=g)
    targets = torch.full_like(tokens, IGNORED_TARGET)
    keys = torch.rand(rows, KEYS, generator=g).argsort(1)[:, :pairs]
    values = torch.randint(VALUES, (rows, pairs), generator=g)
    slots = 2 * torch.rand(rows, quarter // 2, generator=g).argsort(1)[:, :pairs]
    tokens.scatter_(1, slots, NOISE + keys)
    tokens.scatter_(1, slots + 1, NOISE + KEYS + values)
    asked = torch.randint(pairs, (rows, questions), generator=g)
    places = 3 * quarter + torch.rand(rows, quarter, generator=g).argsort(1)[:, :questions]
    tokens.scatter_(1, places, NOISE + keys.gather(1, asked))
    targets.scatter_(1, places, NOISE + KEYS + values.gather(1, asked))
    positions = torch.arange(length).expand(rows, length).contiguous()
    zeros, one = torch.zeros_like(tokens), PackedDocuments.of([0, length])
    return Batch(tokens=tokens, targets=targets, positions=positions, document_ids=zeros, documents=one)


def learn(context: int) -> None:
    mesh = Mesh.build(context=context)
    model = build_parallel_model(CONFIG, mesh, layout="contiguous")
    with torch.no_grad():  # token identities as large as what the first layer adds to them
        model.network.model.embed_tokens.weight.mul_(CONFIG.hidden_size**0.5)
    options = OptimizerOptions(clip_norm=1.0, weight_decay=0.0)
    engine = ZeroEngine(model, stage=1, dtype=torch.float32, accumulation=1, options=options)

    def share(batch: Batch) -> Batch:
        layout = SequenceLayout.build("contiguous", batch.tokens.shape[1], context)
        return batch.map_tokens(lambda x: layout.split(x, mesh.context_rank, 1))

    @torch.no_grad()
    def accuracy(length: int, seeds: range) -> float:
        right = torch.zeros(2)
        for seed in seeds:
            batch = share(recall_rows(length, seed))
            hidden = model.network(batch.tokens, batch.positions, batch.cu_seqlens)
            asked = batch.targets != IGNORED_TARGET
            found = model.network.logits(hidden).argmax(-1)[asked] == batch.targets[asked]
            right += torch.tensor([found.sum(), found.numel()])
        sum_over_ranks(right)
        return float(right[0] / right[1])

    length, reached = 32, 0.0
    for step in range(MOST_STEPS):
        mine = share(recall_rows(length, seed=step))
        counts = count_step(engine.model, [mine])
        engine.backward(engine.model.loss(engine.forward(mine), counts))
        engine.step(3e-3 * min(1.0, (step + 1) / 100))
        if step % 10 == 9:
            reached = accuracy(length, range(10**6, 10**6 + 2))
            if length == LONGEST and reached >= 0.998:
                break
            if length < LONGEST and reached > 0.9:
                length *= 2
    final = accuracy(LONGEST, range(2 * 10**6, 2 * 10**6 + 8))
    if mesh.rank == 0:
        sys.stderr.write(f"context {context}: {final:.4f} of the answers after {step + 1} steps\n")
    assert length == LONGEST, f"still at {length} tokens after {step + 1} steps, accuracy {reached:.3f}"
    assert final >= 0.99, f"accuracy {final:.4f} at {LONGEST} tokens"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("context", [1, 2, 4])
def test_answers_half_a_row_away_on_another_rank_are_learnt(context):
    run_distributed(learn, context, context, timeout=1700)
