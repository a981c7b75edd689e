"""Gradients behind a queued reduction: no memory is given away that the reduction still uses."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from longctx.config import ModelConfig
from parallel.loss import count_step
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.zero import gradients
from parallel.zero.optimizer import OptimizerOptions
from parallel.zero.zero_engine import ZeroEngine
from parallel.zero.zero_options import ZeroOptions
from tests.helpers import on_ranks, run_distributed
from tests.oracles import packed_batch
from tests.parallel.zero.streams import Spy, claim_streams

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=96)
BUCKET = 1000
"""Values: embedding, head and most matrices are larger; norms and projections of keys and values are not."""
HOOK = "reduce_independent_p_g_buckets_and_remove_grads"
"""The method of DeepSpeed's optimisers that backward calls with each parameter whose gradient is there."""
Case = tuple[int, torch.dtype, bool]
"""ZeRO stage, dtype of weights and gradients (reductions are in float32), overlap_comm."""


def spy_on(optimizer: Any, spy: Spy) -> None:
    """Show the spy each gradient as it arrives, and the stream that reduces it."""
    hook = getattr(optimizer, HOOK, None)
    if hook is None:
        return  # stage 0, and stage 1 in bfloat16: one reduction of everything, on the computation's stream

    def arrive(p: torch.nn.Parameter, *rest: Any) -> None:
        assert p.grad is not None
        spy.arrive(p.grad)
        hook(p, *rest)

    setattr(optimizer, HOOK, arrive)
    spy.watch(getattr(optimizer, "reduction_stream", None) or optimizer.reduce_and_partition_stream)


def train(case: Case, config: ModelConfig, bucket: int, spy: Spy | None = None) -> tuple[float, dict[str, Tensor]]:
    """A step of two micro-batches a rank by the project's engine: gradient norm, this rank's part of the gradient."""
    stage, dtype, overlap = case
    model = build_parallel_model(config, Mesh.build(context=1), layout="contiguous")
    zero = ZeroOptions(overlap_comm=overlap, reduce_bucket_size=bucket)
    options = OptimizerOptions(clip_norm=0.0)
    engine = ZeroEngine(model, stage=stage, dtype=dtype, accumulation=2, options=options, zero=zero)
    engine.initialize(seed=0)
    if spy is not None:
        spy_on(engine.partition.engine.optimizer, spy)
    rank = torch.distributed.get_rank()
    batches = [packed_batch(rows=1, seq_len=24, vocab_size=64, seed=2 * rank + a) for a in range(2)]
    counts = count_step(engine.model, batches)
    for batch in batches:
        engine.backward(engine.model.loss(engine.forward(batch), counts))
    gradient = {name: part.clone() for name, part in engine.partition.local_gradients()}
    return engine.step(0.0), gradient


def check(cases: list[Case], config: ModelConfig = CONFIG, bucket: int = BUCKET) -> None:
    """Each case as on a CPU, then with streams, where a gradient freed too early gets the next one's memory."""
    plain = [train(case, config, bucket) for case in cases]
    spy = claim_streams()
    for case, (norm, gradient) in zip(cases, plain, strict=True):
        spy.watch(spy.main)
        found_norm, found = train(case, config, bucket, spy)
        stage, _, overlap = case
        assert not spy.unrecorded, f"{case}: freed behind a queued reduction, unrecorded: {spy.unrecorded}"
        if stage >= 2 and overlap:
            assert spy.kept, f"{case}: no gradient was freed behind a queued reduction"
        # The same operations in the same order: the same bits.
        assert found_norm == norm, f"{case}: gradient norm {found_norm}, without streams {norm}"
        for name, part in gradient.items():
            assert torch.equal(found[name], part), f"{case}: {name}"


def cases(overlap: bool) -> list[Case]:
    every = product((0, 1, 2, 3), (torch.float32, torch.bfloat16))
    return [(*case, overlap) for case in every if case != (0, torch.bfloat16)]  # which check_zero refuses


# Without overlap nothing is queued, whatever the stage.
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_gradient_is_freed_behind_a_queued_reduction(overlap):
    run_distributed(check, 2, cases(overlap), timeout=120)


def test_one_that_lies_in_two_ranks_parts_is_kept_on_the_others():
    """Float32 too: of two parts the reduction makes a copy."""
    run_distributed(check, 4, [(2, torch.float32, True)], CONFIG, 2500)


def test_one_of_which_a_rank_holds_padding_alone_is_kept():
    config = replace(CONFIG, num_layers=1, hidden_size=9)
    run_distributed(check, 4, [(3, torch.float32, True)], config, 4)


@on_ranks(1)
def test_deepspeed_without_the_method_is_refused() -> None:
    claim_streams()
    with pytest.raises(AssertionError, match="has no another_name"):
        gradients._record_before(object(), "another_name", "reduction_stream", lambda: [])
