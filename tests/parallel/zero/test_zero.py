"""Training over ranks against the plain single-process oracle: losses, gradient norms, final weights."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from longctx.batch import Batch, PackedDocuments
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.kernels.regions import compile_count, missing_for_compiling
from longctx.model.activation_offload import Keep
from longctx.model.training_pass import Execution
from parallel.comm.world import sum_over_ranks
from parallel.layout.sequence import SequenceLayout
from parallel.loss import count_step
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.zero.optimizer import OptimizerOptions
from parallel.zero.zero_engine import ZeroEngine
from parallel.zero.zero_options import ZeroOptions, check_zero
from tests.as_on_a_gpu import computing_as_on_a_gpu
from tests.helpers import on_ranks, run_distributed
from tests.oracles import Curve, packed_batch, stream_of, train_alone

ROWS, SEQ_LEN, LR, CLIP = 4, 96, 1e-3, 0.5
FEW, MANY = 3, 20
DENSE = ModelConfig(vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96)
MOE = replace(DENSE, num_experts=4, expert_ffn_size=32, shared_ffn_size=32, balance_loss_weight=0.01)
ODD = replace(MOE, hidden_size=65, expert_ffn_size=31)
"""Its parameters start at no multiple of 16 bytes by themselves."""
KINDS = {"dense": DENSE, "moe": MOE, "odd": ODD}


def step_rows(step: int) -> Batch:
    return packed_batch(rows=ROWS, seq_len=SEQ_LEN, vocab_size=64, seed=step)


def row_of(batch: Batch, row: int) -> Batch:
    """One row as a batch of its own."""
    start, stop = row * SEQ_LEN, (row + 1) * SEQ_LEN
    cu = batch.cu_seqlens
    first = int((cu < start).sum())
    inside = cu[(cu >= start) & (cu <= stop)] - start
    cut = batch.map_tokens(lambda x: x[row : row + 1])
    documents = torch.where(cut.document_ids < 0, cut.document_ids, cut.document_ids - first)
    return replace(cut, document_ids=documents, documents=PackedDocuments.of(inside))


SPREADS = {
    0: {"layout": "contiguous"},
    1: {"layout": "zigzag", "transport": "two_level"},
    2: {"layout": "balanced", "transport": "all_gather"},
    3: {"layout": "striped", "ulysses": 2},
}
"""How a sequence is shared in each ZeRO stage of the parity tests."""


def train_together(
    config: ModelConfig,
    *,
    context: int,
    layout: str,
    stage: int,
    transport: str = "auto",
    ulysses: int = 1,
    steps: int = FEW,
    keep: Keep = "all",
    fused: bool = False,
    zero: ZeroOptions | None = None,
    compiler: str | None = None,
    expert: int = 1,
    dtype: torch.dtype = torch.float32,
):
    """The oracle's steps, a row a micro-batch, over the ranks of this process group."""
    mesh = Mesh.build(context=context, ulysses=ulysses, expert=expert, ranks_per_node=2)
    execution = Execution(keep, compiler=compiler)
    model = build_parallel_model(config, mesh, layout=layout, transport=transport, execution=execution)
    options = OptimizerOptions(clip_norm=CLIP, fused=fused)
    accumulation = ROWS // mesh.data
    engine = ZeroEngine(model, stage=stage, dtype=dtype, accumulation=accumulation, options=options, zero=zero)
    losses, norms, counts_by_step = [], [], []
    for step in range(steps):
        rows = [row_of(step_rows(step), a * mesh.data + mesh.data_rank) for a in range(accumulation)]
        streams = []
        for row in rows:
            split = SequenceLayout.build(layout, SEQ_LEN, context, row.cu_seqlens, ulysses)
            streams.append(stream_of(row).map_tokens(lambda x, split=split: split.split(x, mesh.context_rank, 1)))
        # As in a run: counted as they travel, then made batches by the objective, of this rank's tokens alone.
        counts = count_step(engine.model, streams)
        mine = [engine.model.prepare(stream) for stream in streams]
        total, routed = torch.zeros((), dtype=torch.float64), torch.zeros(0, 0)
        for batch in mine:
            loss = engine.forward(batch)
            total += loss["nll"].double()
            if loss.counts_LE is not None:  # of a dense model there are none
                routed = loss.counts_LE if batch is mine[0] else routed + loss.counts_LE
            engine.backward(engine.model.loss(loss, counts))
        norms.append(engine.step(LR))
        losses.append(float(sum_over_ranks(total)) / counts["targets"])
        counts_by_step.append(sum_over_ranks(routed))
    return Curve(losses, norms, counts_by_step), engine


def check_parity(kind: str, context: int, bound: float, steps: int, stages: tuple[int, ...] = (0, 1, 2, 3), **way):
    config = KINDS[kind]
    wanted, weights = train_alone(config, [[step_rows(s)] for s in range(steps)], lr=LR, clip_norm=CLIP)
    assert min(wanted.norms) > CLIP, "clipping must be active"
    for stage in stages:
        spread = SPREADS[stage] if context > 1 else {"layout": "zigzag"}
        curve, engine = train_together(config, context=context, stage=stage, steps=steps, **spread, **way)
        errors = {
            name: max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
            for name, got, want in (("loss", curve.losses, wanted.losses), ("norm", curve.norms, wanted.norms))
        }
        # Each routing tie that fell the other way takes a token from one expert and gives it to another.
        flips = sum(int((a - b).abs().sum()) // 2 for a, b in zip(curve.counts, wanted.counts, strict=True))
        decisions = sum(int(c.sum()) for c in wanted.counts)
        if torch.distributed.get_rank() == 0:
            world = torch.distributed.get_world_size()
            said = f"{kind}, {world} ranks, context {context}, ZeRO {stage}, {steps} steps: {errors}"
            sys.stderr.write(f"{said}, {flips} of {decisions} routings flipped\n")
        assert max(errors.values()) <= bound, f"{kind}, context {context}, ZeRO {stage}: {errors}"
        for name, role, start, values in engine.owned_ranges():
            if role == "master":
                want = weights[name].flatten()[start : start + len(values)]
                # AdamW turns rounding of gradients near zero into steps of up to lr.
                assert (values - want).abs().max() <= 0.2 * LR * steps, f"{name} in ZeRO {stage}"


BOUNDS = {"dense": 1e-5, "moe": 1e-4, "odd": 1e-4}
WORLDS = [(1, 1), (2, 2), (4, 4), (4, 2)]


# A few of all combinations: the slow test below has every one of them.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "world_size", "context", "stages"),
    [
        ("moe", 1, 1, (3,)),
        ("moe", 2, 2, (3,)),
        ("moe", 4, 2, (1, 2)),
        ("dense", 4, 4, (0,)),
        pytest.param("moe", 1, 1, (0,), marks=pytest.mark.slow),
        pytest.param("moe", 2, 2, (0,), marks=pytest.mark.slow),
        pytest.param("moe", 4, 4, (1, 3), marks=pytest.mark.slow),
        pytest.param("dense", 4, 4, (2,), marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(200)
def test_every_stage_and_degree_trains_like_one_process(kind, world_size, context, stages):
    run_distributed(check_parity, world_size, kind, context, BOUNDS[kind], FEW, stages, timeout=150)


SMALL = ZeroOptions(overlap_comm=True, reduce_bucket_size=1000, allgather_bucket_size=64, parameter_alignment=True)
"""Buckets that are full many times a backward pass, and that the embedding's gradient does not fit into."""


def check_as_on_gpus(stages: tuple[int, ...]):
    check_parity("odd", 2, BOUNDS["odd"], FEW, stages, fused=True, zero=SMALL)


@on_ranks(2)
def test_parameters_start_where_grouped_products_of_gpus_want_them():
    for stage, zero, wanted in ((2, SMALL, True), (1, SMALL, True), (2, None, False)):
        _, engine = train_together(ODD, context=2, layout="zigzag", stage=stage, steps=0, zero=zero)
        assert all(p.data_ptr() % 16 == 0 for p in engine.model.network.parameters()) == wanted


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fused_overlapped_and_in_small_buckets_they_train_like_one_process(stage):
    """What GPUs get by default, as far as CPU ranks can run it."""
    run_distributed(check_as_on_gpus, 2, (stage,), timeout=150)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize(("world_size", "context"), WORLDS)
def test_they_still_agree_after_20_steps(kind, world_size, context):
    run_distributed(check_parity, world_size, kind, context, BOUNDS[kind], MANY, timeout=900)


MORE_MOVES = [(1, 2), (3, 0), (3, 3)]
"""Tried where slow tests are: what stages 1 and 3 write, and 2 and 0 read, checkpoints show quickly."""


def check_state(
    stage: int,
    other: int,
    zero: ZeroOptions | None = None,
    other_zero: ZeroOptions | None = None,
    config: ModelConfig = DENSE,
):
    """Ranges written in one stage make the other go on as if nothing had happened, with a fused AdamW or without."""
    _, engine = train_together(config, context=2, layout="zigzag", stage=stage, fused=stage > other, zero=zero)
    gathered: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, [(*r[:3], r.values.clone()) for r in engine.owned_ranges()])
    whole = {}
    for name, role, start, values in (r for ranges in gathered for r in ranges):
        tensor = whole.setdefault((name, role), torch.full((engine.shapes[name].numel(),), torch.nan))
        assert tensor[start : start + len(values)].isnan().all(), f"{name} {role} was written twice"
        tensor[start : start + len(values)] = values
    assert not any(t.isnan().any() for t in whole.values())
    mesh = Mesh.build(context=2)
    model = build_parallel_model(config, mesh, layout="zigzag", seed=1)
    options = OptimizerOptions(clip_norm=CLIP, fused=stage < other)
    fresh = ZeroEngine(model, stage=other, dtype=torch.float32, accumulation=ROWS, options=options, zero=other_zero)
    fresh.load(lambda name, role, start, out: out.copy_(whole[name, role][start : start + len(out)]), step=FEW)
    batch = row_of(step_rows(99), 0)
    split = SequenceLayout.build("zigzag", SEQ_LEN, 2)
    mine = batch.map_tokens(lambda x: split.split(x, mesh.context_rank, 1))
    counts = count_step(engine.model, [mine] * ROWS)
    seen = []
    for runner in (engine, fresh):
        for _ in range(2):
            for _ in range(ROWS):
                loss = runner.forward(mine)
                runner.backward(engine.model.loss(loss, counts))
            seen += [float(loss["nll"]), runner.step(LR)]
    assert seen[:4] == pytest.approx(seen[4:], rel=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("stage", "other"), [(0, 3), (2, 1), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE_MOVES)]
)
def test_state_moves_between_stages(stage, other):
    run_distributed(check_state, 2, stage, other)


def test_stage_0_in_bfloat16_is_refused():
    with pytest.raises(ConfigError, match=r"zero\.stage=1"):
        check_zero(0, torch.bfloat16)


# --- as on a GPU, and compiled ----------------------------------------------------------------------------------------


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind", "stages", "way"),
    [
        ("moe", (2,), {"expert": 2}),
        pytest.param("moe", (3,), {"expert": 2, "keep": "attention"}, marks=pytest.mark.slow),
        pytest.param("dense", (2, 3), {"keep": "inputs"}, marks=pytest.mark.slow),
        pytest.param("dense", (2,), {"compiler": "aot_eager"}, marks=pytest.mark.slow),
        pytest.param("moe", (3,), {"compiler": "aot_eager", "keep": "attention"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@on_ranks(2, timeout=150)
def test_ranks_that_compute_as_on_a_gpu_train_like_one_process(kind: str, stages: tuple[int, ...], way: dict) -> None:
    with computing_as_on_a_gpu():
        check_parity(kind, 2, BOUNDS[kind], FEW, stages, fused=True, zero=SMALL, **way)


def check_compiled(
    kind: str, context: int, stages: tuple[int, ...], keep: Keep, backend: str, steps: int = FEW, expert: int = 1
) -> None:
    for stage in stages:
        torch.compiler.reset()
        before = compile_count().graphs
        how = {"keep": keep, "compiler": backend, "expert": expert}
        check_parity(kind, context, BOUNDS[kind], steps, (stage,), **how)
        # Before and after the core: all layers and all batches share two graphs.
        assert compile_count().graphs - before == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world_size", "context", "stages", "keep"),
    [
        ("dense", 2, 1, (0, 1, 2, 3), "all"),
        ("dense", 2, 2, (0, 1, 2, 3), "attention"),
        ("moe", 2, 2, (0, 1, 2, 3), "all"),
        ("dense", 4, 4, (1, 3), "all"),
    ],
)
@pytest.mark.timeout(600)
def test_compiled_regions_train_like_one_process(kind, world_size, context, stages, keep):
    run_distributed(check_compiled, world_size, kind, context, stages, keep, "aot_eager", timeout=550)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["all", "attention"])
@pytest.mark.timeout(600)
def test_so_they_do_with_experts_across_ranks(keep):
    run_distributed(check_compiled, 2, "moe", 2, (0, 1, 2, 3), keep, "aot_eager", FEW, 2, timeout=550)


@pytest.mark.slow
@pytest.mark.skipif(missing_for_compiling("cpu") is not None, reason=f"cannot compile: {missing_for_compiling('cpu')}")
@pytest.mark.timeout(600)
def test_so_do_kernels_of_inductor():
    run_distributed(check_compiled, 2, "moe", 2, (1, 3), "attention", "inductor", timeout=550)
