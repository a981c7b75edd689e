"""Every kind of position over ranks: each knows where its tokens stand in the whole sequence, and how long that is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from longctx.batch import Batch
from longctx.errors import ConfigError
from longctx.model.activation_offload import Keep
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution, TrainingPass
from parallel.attention.context_parallel_core import ContextParallelAttention
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from tests.helpers import on_ranks
from tests.longctx.model.test_positions import POSITIONS, odd_config
from tests.longctx.samples import packed_batch, randomize

EXACT = {"atol": 1e-11, "rtol": 1e-9}
"""float64: nothing but the order of additions."""

KINDS = [
    *("rope", "partial", "dynamic", "longrope", "some layers know none", "local base", "learned", "sinusoidal"),
    "sinusoids in halves",
    *("alibi", "alibi in windows", "t5", "t5 in windows", "relative", "relative in windows, with sinks", "none"),
]
"""What differs in how ranks share the work; ropes that do not look at the length are all one."""

DOCUMENTS = [[5, 11, 1, 3], [16, 1, 3]]
"""Of two rows; the longest, 16 tokens, is longer than any rank's share of it, and than the 8 that ropes know."""


def build(name: str, mesh: Mesh | None, layout: str = "", *, keep: Keep = "all", **changes) -> Decoder:
    core = None if mesh is None else ContextParallelAttention(mesh, layout)
    config = odd_config(**{**POSITIONS[name], "num_layers": 2, **changes})
    decoder = Decoder(config, core and {"softmax": core}, execution=Execution(keep)).double()
    randomize(decoder)
    return decoder


def differentiate(
    decoder: Decoder, batch: Batch, weights: torch.Tensor, training_pass: TrainingPass
) -> tuple[torch.Tensor, dict]:
    """Hidden states and all gradients of their weighted sum."""
    ids = batch.document_ids
    hidden = decoder(batch.tokens, batch.positions, batch.cu_seqlens, document_ids=ids, training_pass=training_pass)
    (hidden * weights).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in decoder.model.named_parameters()}


def check_kind(
    name: str,
    mesh: Mesh,
    layouts: tuple[str, ...] = ("zigzag", "striped"),
    *,
    seed: int | None = None,
    keep: Keep = "all",
    **changes,
) -> None:
    batch = packed_batch(DOCUMENTS, vocab_size=31).flatten_rows()
    weights = torch.randn(1, 40, 14, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    alone = build(name, None, **changes)
    training_pass = TrainingPass(seed=seed)
    wanted, wanted_grads = differentiate(alone, batch, weights, training_pass)
    for kind in layouts:
        spread = build(name, mesh, kind, keep=keep, **changes)
        layout = SequenceLayout.build(kind, 40, mesh.context, batch.cu_seqlens, mesh.ulysses)
        mine = batch.map_tokens(lambda x, layout=layout: layout.split(x, mesh.context_rank, 1))
        found, grads = differentiate(spread, mine, layout.split(weights, mesh.context_rank, 1), training_pass)
        what = f"{name}, {kind}, rank {mesh.rank} of {mesh.context}"
        same(found, layout.split(wanted, mesh.context_rank, 1), what)
        total = torch.cat([grad.flatten() for grad in grads.values()])
        dist.all_reduce(total)  # a rank's gradient is that of its own tokens
        sizes = [grad.numel() for grad in grads.values()]
        for parameter, grad in zip(grads, total.split(sizes), strict=True):
            same(grad, wanted_grads[parameter].flatten(), f"{what}, {parameter}")


def same(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, **EXACT, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks("world_size")
def test_every_kind_equals_one_process():
    mesh = Mesh.build(context=dist.get_world_size())
    for name in KINDS:
        check_kind(name, mesh)


@pytest.mark.slow
@on_ranks(4)
def test_kinds_equal_one_process_where_heads_are_split_too():
    mesh = Mesh.build(context=4, ulysses=2)  # of 3 heads, one rank has 2
    for name in ("dynamic", "alibi", "t5", "relative", "relative in windows, with sinks"):
        check_kind(name, mesh, ("zigzag",))


@on_ranks(4)
def test_dropout_drops_the_same_values_on_any_rank():
    mesh = Mesh.build(context=4)
    for keep in ("all", "attention"):
        check_kind("t5", mesh, residual_dropout=0.3, seed=5, keep=keep)


@on_ranks(2)
def test_a_document_too_long_for_a_learned_table_is_refused_on_every_rank():
    mesh = Mesh.build(context=2)
    decoder = build("learned", mesh, "zigzag", max_positions=15)
    batch = packed_batch(DOCUMENTS, vocab_size=31).flatten_rows()
    layout = SequenceLayout.build("zigzag", 40, 2, batch.cu_seqlens)
    mine = batch.map_tokens(lambda x: layout.split(x, mesh.context_rank, 1))
    with pytest.raises(ConfigError, match=r"a document of 16 tokens is longer than model.max_positions=15"):
        decoder(mine.tokens, mine.positions, mine.cu_seqlens)
    dist.barrier()  # nobody waits in a hop
