"""What routers do in training, over ranks: capacity, jitter, balance and what is seen, as in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from longctx.batch import Batch
from longctx.config import ModelConfig
from longctx.model.activation_offload import Keep
from longctx.model.decoder import Decoder
from longctx.model.experts.experts import is_expert_weight
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from longctx.objectives.task import LossSum
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from tests.helpers import on_ranks
from tests.oracles import packed_batch

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=40,
    dense_layers=(1,),
    num_experts=8,
    experts_per_token=3,
    expert_ffn_size=24,
    init_std=0.1,
    balance_loss_weight=0.05,
    router_z_loss_weight=0.01,
    router_jitter=0.2,
    residual_dropout=0.1,
    capacity_factor=1.0,
)
ROWS, LENGTH = 2, 48
WAYS = {
    2: (("zigzag", 2, 1), ("striped", 2, 2), ("contiguous", 1, 2)),
    4: (("balanced", 4, 1), ("striped", 2, 4), ("zigzag", 4, 2), ("contiguous", 1, 4)),
}
"""Layout, ranks that share a sequence, ranks that share the experts."""


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks("world_size")
def test_training_routes_as_in_one_process() -> None:
    for number, (layout, context, expert) in enumerate(WAYS[dist.get_world_size()]):
        scope = ("sequence", "micro_batch", "global_batch")[number % 3]
        check(replace(CONFIG, balance_scope=scope), layout, context, expert, keep="attention" if number else "all")


@pytest.mark.few(1)
@pytest.mark.parametrize("experts_per_token", [1, 2, 3])
@on_ranks(2)
def test_ranks_and_chunks_of_padding_alone(experts_per_token: int) -> None:
    """They send nobody a token, and enter every exchange."""
    config = replace(CONFIG, experts_per_token=experts_per_token)
    mesh = Mesh.build(context=2, expert=2)
    batch = micro_batch(0).padded(3 * ROWS * LENGTH)
    layout = SequenceLayout.build("contiguous", 3 * ROWS * LENGTH, 2, batch.documents)
    shard = batch.map_tokens(lambda x: layout.split(x, mesh.context_rank, 1))
    alone = CausalLM(Decoder(config)).double()
    wanted = differentiate(alone, batch, 0)
    for execution in (Execution(), Execution("attention", chunk_tokens=16), Execution(expert_tile_tokens=16)):
        spread = build_parallel_model(config, mesh, layout="contiguous", execution=execution).double()
        found = differentiate(spread, replace(shard, placement=layout), 0)
        for number, (tensor, right) in enumerate(zip(found.tensors(), wanted.tensors(), strict=True)):
            total = tensor.detach().clone()
            dist.all_reduce(total)
            same(total, right, f"{execution}, tensor {number} of LossSum")
        own = spread.network.dispatcher.local_experts
        for name, p in spread.network.named_parameters():
            exact = dict(alone.network.named_parameters())[name].grad
            assert p.grad is not None
            assert exact is not None
            if is_expert_weight(name):
                same(p.grad, exact[own], name)
                continue
            dist.all_reduce(p.grad)
            same(p.grad, exact, name)


def micro_batch(data_rank: int) -> Batch:
    return packed_batch(rows=ROWS, seq_len=LENGTH, vocab_size=64, seed=3 + data_rank)


def differentiate(model: CausalLM, batch: Batch, data_rank: int) -> LossSum:
    loads = torch.rand(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    load_LE = loads / loads.mean(1, keepdim=True)
    training_pass = TrainingPass(seed=7, first_tokens=(data_rank * ROWS * LENGTH,), expert_load_LE=load_LE)
    loss = model.loss_sum(model(batch, training_pass))
    model.loss(loss, {"targets": 1, "tokens": 1}).backward()  # sums stay sums
    return loss


def check(config: ModelConfig, layout: str, context: int, expert: int, *, keep: Keep) -> None:
    mesh = Mesh.build(context=context, expert=expert)
    alone = CausalLM(Decoder(config)).double()
    wanted = [differentiate(alone, micro_batch(d), d) for d in range(mesh.data)]
    assert min(loss.diagnostics.dropped_assignments.min() for loss in wanted) > 5, "some are refused"
    spread = build_parallel_model(config, mesh, layout=layout, execution=Execution(keep)).double()
    batch = micro_batch(mesh.data_rank).flatten_rows()
    whole = SequenceLayout.build(layout, ROWS * LENGTH, context, batch.cu_seqlens.tolist())
    found = differentiate(spread, batch.map_tokens(lambda x: whole.split(x, mesh.context_rank, 1)), mesh.data_rank)
    where = f"{layout}, context {context}, expert {expert}, rank {mesh.rank}"
    for number, tensor in enumerate(found.tensors()):
        total = tensor.detach().clone()
        dist.all_reduce(total)
        same(total, sum(loss.tensors()[number] for loss in wanted), f"{where}, tensor {number} of LossSum")
    exact = dict(alone.network.named_parameters())
    for name, p in spread.network.named_parameters():
        assert p.grad is not None
        grad = p.grad
        if is_expert_weight(name):
            grad = torch.zeros_like(exact[name])
            grad[spread.network.dispatcher.local_experts] = p.grad
        dist.all_reduce(grad)
        same(grad, exact[name].grad, f"{where}, {name}")


def same(found: torch.Tensor, wanted, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10, msg=lambda m: f"{what}: {m}")
