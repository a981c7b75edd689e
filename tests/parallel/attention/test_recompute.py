"""Recomputed layers over ranks: nothing is sent twice, no bit changes."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import parallel.attention.context_parallel_core
from longctx.config import ModelConfig
from longctx.model.activation_offload import Keep
from longctx.model.training_pass import Execution
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from tests.helpers import run_distributed
from tests.oracles import packed_batch
from tests.parallel.attention.test_attention import ways

MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48)
SENDING = ("batch_isend_irecv", "all_gather_into_tensor", "all_to_all_single", "all_gather")


# Quickly from rank to rank, in two levels, and gathered with heads split.
@pytest.mark.parametrize("part", [slice(0, None, 2), pytest.param(slice(1, None, 2), marks=pytest.mark.slow)], ids=str)
def test_a_recomputed_layer_sends_nothing(part):
    run_distributed(check_messages, 4, ways(4)[part])


def check_messages(some_ways):
    for way in some_ways:
        plain, _, grads = count_messages(way, keep="all")
        again, replayed, same = count_messages(way, keep="attention")
        assert replayed == [0] * MODEL.num_layers, "each layer ran a second time, in silence"
        assert all(torch.equal(grads[name], same[name]) for name in grads)
        more, replayed, same = count_messages(way, keep="inputs")
        assert min(replayed) > 0, "attention is computed a second time over all ranks"
        assert more - again == sum(replayed)
        assert all(torch.equal(grads[name], same[name]) for name in grads)
        if "ulysses" not in way:  # there backward trades q, k, v and out for heads again instead of keeping them twice
            assert again == plain > 0


def count_messages(
    way: dict, *, keep: Keep, config: ModelConfig = MODEL
) -> tuple[int, list[int], dict[str, torch.Tensor]]:
    """(messages of forward and backward, messages of each recomputed attention, gradients)."""
    axes = {name: way[name] for name in ("ulysses", "ranks_per_node") if name in way}
    mesh = Mesh.build(context=4, **axes)
    model = build_parallel_model(config, mesh, layout="zigzag", transport=way["transport"], execution=Execution(keep))
    sent, replayed = [0], []

    def counted(function):
        def call(*args, **kwargs):
            sent[0] += 1
            return function(*args, **kwargs)

        return call

    def watched(*args, recompute_cache=None, **kwargs):
        before, recomputing = sent[0], recompute_cache is not None and recompute_cache.recomputing
        out = attend_planned(*args, recompute_cache=recompute_cache, **kwargs)
        if recomputing:
            replayed.append(sent[0] - before)
        return out

    attend_planned = parallel.attention.context_parallel_core.planned_attention
    batch = packed_batch(rows=2, seq_len=48, vocab_size=64, seed=3).flatten_rows()
    layout = SequenceLayout.build("zigzag", 96, 4, ulysses=mesh.ulysses)
    mine = batch.map_tokens(lambda x: layout.split(x, mesh.context_rank, 1))
    with ExitStack() as stack:
        stack.enter_context(patch.object(parallel.attention.context_parallel_core, "planned_attention", watched))
        for name in SENDING:
            stack.enter_context(patch.object(dist, name, counted(getattr(dist, name))))
        model(mine)[0].backward()
    return sent[0], replayed, {name: p.grad for name, p in model.named_parameters()}
