"""Muon: one process against PyTorch's own, ranks against one process, and its state at any size."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from longctx.batch import Batch
from longctx.model.decoder import Decoder
from longctx.objectives.causal_lm import CausalLM
from longctx.objectives.classes import Classes
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.zero import zero_muon
from parallel.zero.optimizer import OptimizerOptions, optimizer_groups
from parallel.zero.zero_muon import FlatMatrices, Matrices, MatrixRange, Muon, matrices_of, orthogonal, whole_matrices
from tests.helpers import on_ranks
from tests.longctx.image_samples import igpt_config, swin_config, vit_config
from tests.longctx.samples import dense_config, packed_batch, tiny_config
from tests.parallel.trained import (
    BETAS,
    CLIP,
    EPS,
    LR,
    ROWS,
    WEIGHT_DECAY,
    Trained,
    train_alone,
    train_over_ranks,
)

DENSE = dense_config(init_std=0.05, layers=("gated_delta", "full"), mtp_layers=1)
EXPERTS = tiny_config(init_std=0.05, dense_layers=(0,), tie_embeddings=False)
OPTIONS = OptimizerOptions(name="muon", clip_norm=CLIP)


def plain_orthogonal(x: torch.Tensor) -> torch.Tensor:
    """By the singular values: the polynomial of each, five times."""
    a, b, c = zero_muon.COEFFICIENTS
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(zero_muon.STEPS):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ vh


@pytest.mark.parametrize("shape", [(3, 5, 5), (2, 7, 3), (1, 2, 9)])
def test_orthogonal_is_a_polynomial_of_singular_values(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(orthogonal(x, torch.float64), plain_orthogonal(x), rtol=1e-10, atol=1e-12)
    assert not orthogonal(torch.zeros(1, 3, 3), torch.float32).any()


def test_one_process_updates_as_pytorchs_muon():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.randn(6, 10, generator=generator)) for _ in range(2))
    theirs.data.copy_(ours)
    group = {"params": [ours], "weight_decay": 0.1, "matrices": True}
    mine = Muon([group], momentum=0.9, lr=1e-2)
    # PyTorch's rounds to bfloat16 within.
    mine.flat_buffers = whole_matrices({"w": ours}, {"w": Matrices(1, 6, 10)}, torch.bfloat16)
    other = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        gradient = torch.randn(6, 10, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        other.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2 * 0.2 * 10**0.5 * 0.02)


def test_what_it_updates():
    dense, experts = matrices_of(Decoder(DENSE)), matrices_of(Decoder(EXPERTS))
    assert "model.embed_tokens.weight" not in dense
    assert not [name for name in dense if "norm" in name or "conv1d" in name or name.endswith("bias")]
    assert dense["model.mtp.0.join.eh_proj.weight"] == Matrices(1, 32, 64)
    assert experts["model.layers.1.mlp.experts.gate_up_proj"] == Matrices(8, 16, 32)
    assert experts["model.layers.1.mlp.experts.down_proj"] == Matrices(4, 32, 16)
    assert "model.layers.1.mlp.gate.weight" in experts
    assert "lm_head.weight" not in experts


OF_IMAGES = {
    "vit": vit_config(),
    "swin": swin_config(),
    "igpt": igpt_config(classes=5, class_pool="mean", num_experts=0, shared_ffn_size=0, activation="quick_gelu"),
}


@pytest.mark.parametrize("name", OF_IMAGES)
def test_what_it_updates_of_images(name):
    """Projections in blocks, and not patches, merged patches, position tables, tables of biases or the class head."""
    task = Classes(Decoder(OF_IMAGES[name]))
    found = matrices_of(task.network)
    assert found
    assert all(re.search(r"\.layers\.\d+\.(self_attn|mlp)\..*(proj|gate\.weight)", weight) for weight in found)
    rest = {weight: p for weight, p in task.network.named_parameters() if weight not in found and p.ndim > 1}
    kinds = ("embed_", "relative_bias", "merges", "class_head", "lm_head", "shared_expert_gate")
    assert all(any(kind in weight for kind in kinds) for weight in rest), list(rest)
    decayed = {id(p) for group in optimizer_groups(task, 0.1, found) if group["weight_decay"] for p in group["params"]}
    orthogonal = {id(p) for group in optimizer_groups(task, 0.1, found) if group["matrices"] for p in group["params"]}
    for weight, p in task.network.named_parameters():
        assert (id(p) in decayed, id(p) in orthogonal) == (p.ndim > 1, weight in found), weight


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks("world_size")
def test_cut_anywhere_matrices_are_those_of_one_process():
    """Ranges that cut matrices, leave ranks without any, and have other places on each rank; bucket by bucket."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shapes = [Matrices(1, 6, 4), Matrices(5, 3, 7), Matrices(2, 2, 9), Matrices(1, 1, 1), Matrices(3, 8, 8)]
    values = [torch.randn(m.number * m.size, generator=torch.Generator().manual_seed(n)) for n, m in enumerate(shapes)]
    for cuts_seed, bucket in itertools.product(range(4), (1, 60, 1 << 20)):
        generator, held, own = torch.Generator().manual_seed(cuts_seed), [], []
        at = 0
        for matrices, of_all in zip(shapes, values, strict=True):
            cuts = torch.randint(0, len(of_all) + 1, (world - 1,), generator=generator).sort()[0].tolist()
            bounds = [0, *cuts, len(of_all)]
            part = of_all[bounds[rank] : bounds[rank + 1]]
            # Gaps, as alignment leaves them.
            own += [part, torch.zeros(rank)]
            held.append(MatrixRange(matrices, bounds[rank], len(part), at))
            at += len(part) + rank
        flat = torch.cat(own)
        with mock.patch.object(zero_muon, "BUCKET_VALUES", bucket):
            FlatMatrices(held, dist.group.WORLD, torch.float32).make_orthogonal_(flat)
        for matrices, of_all, mine in zip(shapes, values, held, strict=True):
            whole = of_all.clone()
            FlatMatrices([MatrixRange(matrices, 0, len(whole), 0)], None, torch.float32).make_orthogonal_(whole)
            got = flat[mine.at : mine.at + mine.numel]
            torch.testing.assert_close(got, whole[mine.start : mine.start + mine.numel], rtol=1e-5, atol=1e-6)


def batches(number: int) -> list[Batch]:
    return [packed_batch([[19, 12, 7]], padding=10, seed=ROWS * number + row) for row in range(ROWS)]


def alone(config) -> Trained:
    """One process with Muon."""
    lm = CausalLM(Decoder(config))
    masters, matrices = dict(lm.network.named_parameters()), matrices_of(lm.network)
    optimizer = Muon(optimizer_groups(lm, WEIGHT_DECAY, matrices), momentum=0.95, lr=LR, betas=BETAS, eps=EPS)
    optimizer.flat_buffers = whole_matrices(masters, matrices, torch.float32)
    return train_alone(lm, batches, optimizer)


def shard_of(row: Batch, mesh: Mesh) -> Batch:
    layout = SequenceLayout.build("contiguous", 48, mesh.context, row.documents)
    return replace(row.map_tokens(lambda x: layout.split(x, mesh.context_rank, 1)), placement=layout)


PLAIN = dense_config(init_std=0.05, layers=("gated_delta", "full"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world_size", "context", "expert", "stages"),
    [
        (2, 1, 1, (1, 3)),
        *(
            pytest.param(n, c, e, (0, 1, 2, 3), marks=pytest.mark.slow)
            for n, c, e in ((1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 2, 1), (2, 1, 2), (4, 2, 2), (4, 1, 4))
        ),
    ],
)
@on_ranks("world_size", timeout=250)
def test_every_stage_trains_like_one_process(context, expert, stages):
    for config in (EXPERTS,) if expert > 1 else (PLAIN, EXPERTS):
        wanted = alone(config)
        mesh = Mesh.build(context=context, expert=expert)
        for stage in stages:
            model = build_parallel_model(config, mesh, layout="contiguous")
            got = train_over_ranks(model, mesh, batches, partial(shard_of, mesh=mesh), stage=stage, options=OPTIONS)
            got.check(wanted, 1e-6, f"ZeRO {stage}, context {context}, experts {expert}")
