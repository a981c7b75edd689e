"""Gradients behind a queued reduction: no memory is given away that the reduction still uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longctx.config import ModelConfig
from parallel.loss import count_step
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.zero.engine import ZeroEngine
from parallel.zero.in_flight import record_queued_gradients
from parallel.zero.optimizer import OptimizerOptions
from parallel.zero.options import ZeroOptions
from tests.helpers import run_distributed
from tests.oracles import packed_batch
from tests.parallel.zero.streams import Spy, claim_streams

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=96)
BUCKET = 1000
"""Values: embedding, head and MLP matrices are larger, norms and attention's are not."""


def train(stage: int, dtype: torch.dtype, overlap: bool, spy: Spy | None, config: ModelConfig, bucket: int) -> Any:
    """Two micro-batches a rank through the project's engine: the step's gradient norm, and this rank's part of it."""
    model = build_parallel_model(config, Mesh.build(context=1), layout="contiguous")
    zero = ZeroOptions(overlap_comm=overlap, reduce_bucket_size=bucket)
    options = OptimizerOptions(clip_norm=0.0)
    engine = ZeroEngine(model, stage=stage, dtype=dtype, accumulation=2, options=options, zero=zero)
    engine.initialize(seed=0)
    optimizer = engine.partition.engine.optimizer
    hook = getattr(optimizer, "reduce_independent_p_g_buckets_and_remove_grads", None)

    def arrive(p: torch.nn.Parameter, *rest: Any) -> None:
        spy.reuse(p.grad)
        hook(p, *rest)

    if spy is not None and hook is not None:
        spy.watch(getattr(optimizer, "reduction_stream", None) or optimizer.reduce_and_partition_stream)
        optimizer.reduce_independent_p_g_buckets_and_remove_grads = arrive
    rank = torch.distributed.get_rank()
    batches = [packed_batch(rows=1, seq_len=24, vocab_size=64, seed=2 * rank + a) for a in range(2)]
    counts = count_step(batches)
    for batch in batches:
        engine.backward(counts.loss(engine.forward(batch), config))
    gradient = {name: part.clone() for name, part in engine.partition.local_gradients()}
    return engine.step(0.0), gradient


def check(cases: list[tuple], config: ModelConfig = CONFIG, bucket: int = BUCKET) -> None:
    plain = [train(*case, None, config, bucket) for case in cases]
    spy = claim_streams()
    for case, (norm, gradient) in zip(cases, plain, strict=True):
        stage, _, overlap = case
        found_norm, found = train(*case, spy, config, bucket)
        assert not spy.unrecorded, f"{case}: freed behind queued work, unrecorded: {spy.unrecorded}"
        print(case, spy.kept, len(spy.held))
        assert found_norm == norm, f"{case}: gradient norm {found_norm}, without streams {norm}"
        for name, part in gradient.items():
            assert torch.equal(found[name], part), f"{case}: {name}"


ALL = [
    (stage, dtype, overlap)
    for stage in (0, 1, 2, 3)
    for dtype in (torch.float32, torch.bfloat16)
    for overlap in (True, False)
    if (stage, dtype) != (0, torch.bfloat16)  # check_zero refuses it
]


def test_no_gradient_is_freed_behind_a_queued_reduction():
    run_distributed(check, 2, ALL)
