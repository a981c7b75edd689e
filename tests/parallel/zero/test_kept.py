"""Every ``keep`` and ``store`` over ranks, and layers by chunks, against one plain process: loss, gradients, norm.

No bit lies between one way to keep and another.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from longctx.batch import Batch
from longctx.config import ModelConfig
from longctx.model.activation_offload import Keep, Store
from longctx.model.chunks import token_table
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from parallel.comm.world import sum_over_ranks
from parallel.layout.sequence import SequenceLayout
from parallel.loss import count_step
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.zero.optimizer import OptimizerOptions
from parallel.zero.zero_engine import ZeroEngine
from tests.helpers import run_distributed
from tests.oracles import packed_batch
from tests.parallel.experts.expert_cases import gather_whole

ROWS, SEQ_LEN, SEED, CLIP, BETA = 2, 96, 11, 0.01, 0.9
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "residual_dropout": 0.1,
}
DENSE = ModelConfig(**SIZES, ffn_size=48)
EXPERTS = ModelConfig(**SIZES, num_experts=4, expert_ffn_size=24, shared_ffn_size=24, balance_loss_weight=0.01)
CONFIGS = {
    "dense": DENSE,
    "experts": EXPERTS,
    # A norm reads what the experts gave: "inputs" sends their tokens a second time.
    "sandwich": replace(EXPERTS, norm_order="sandwich"),
}
WAYS: list[tuple[Keep, Store]] = list(itertools.product(("all", "attention", "inputs"), ("device", "host")))
FEW_WAYS: list[tuple[Keep, Store]] = [("all", "device"), ("attention", "host"), ("inputs", "device")]


def rows() -> list[Batch]:
    return [packed_batch(rows=1, seq_len=SEQ_LEN, vocab_size=64, seed=row) for row in range(ROWS)]


def training_pass(row: int) -> TrainingPass:
    return TrainingPass(seed=SEED, first_tokens=(row * SEQ_LEN,))


def alone(config: ModelConfig) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient norm and clipped gradients of one process that keeps all, in float32."""
    lm = CausalLM(Decoder(config, seed=0))
    counts, nll = lm.count(rows()), 0.0
    for number, row in enumerate(rows()):
        loss = lm.loss_sum(lm(row, training_pass(number)))
        lm.loss(loss, counts).backward()
        nll += float(loss["nll"])
    norm = float(torch.nn.utils.clip_grad_norm_(lm.parameters(), CLIP))
    prefix = "network."
    grads = {name.removeprefix(prefix): p.grad.flatten() for name, p in lm.named_parameters() if p.grad is not None}
    return nll / counts["targets"], norm, grads


def together(
    config: ModelConfig, execution: Execution, stage: int, dtype: torch.dtype
) -> tuple[float, float, dict[str, Tensor]]:
    """The same over two ranks that share each row, and the experts; gradients are read off AdamW's first moments."""
    execution = replace(execution, matmul_mode="native")
    mesh = Mesh.build(context=2, expert=2 if config.num_experts else 1)
    model = build_parallel_model(config, mesh, layout="zigzag", execution=execution)
    options = OptimizerOptions(betas=(BETA, 0.95), clip_norm=CLIP)
    engine = ZeroEngine(model, stage=stage, dtype=dtype, accumulation=ROWS, options=options)
    mine = []
    for row in rows():
        padded = SequenceLayout.build("zigzag", SEQ_LEN, 2, row.cu_seqlens)
        mine.append(row.map_tokens(lambda x, layout=padded: layout.split(x, mesh.context_rank, 1)))
    counts, nll = count_step(engine.model, mine), torch.zeros((), dtype=torch.float64)
    for number, shard in enumerate(mine):
        loss = engine.forward(shard, training_pass(number))
        nll += loss["nll"].double()
        engine.backward(engine.model.loss(loss, counts))
    norm = engine.step(1e-3)
    whole = gather_whole(engine.owned_ranges(), engine.shapes)
    grads = {name: moment / (1 - BETA) for (name, role), moment in whole.items() if role == "exp_avg"}
    return float(sum_over_ranks(nll)) / counts["targets"], norm, grads


def check(kind: str, stages: tuple[int, ...], dtypes: tuple[torch.dtype, ...], ways: list = WAYS) -> None:
    config = CONFIGS[kind]
    wanted = alone(config)
    assert wanted[1] > CLIP, "clipping must be active"
    for stage, dtype in itertools.product(stages, dtypes):
        first = together(config, Execution(*ways[0]), stage, dtype)
        compare(first, wanted, dtype, f"{kind}, ZeRO {stage}, {dtype}")
        for way in ways[1:]:
            loss, norm, grads = together(config, Execution(*way), stage, dtype)
            where = f"{kind}, ZeRO {stage}, {dtype}, {way}"
            assert (loss, norm) == first[:2], where
            for name, grad in grads.items():
                assert torch.equal(grad, first[2][name]), f"{where}: {name}"


def compare(got: tuple, wanted: tuple, dtype: torch.dtype, where: str) -> None:
    """Float32 differs by the order of sums. bfloat16 is held to what its 8 bits leave of a gradient of three layers,
    among them choices of experts that fall otherwise."""
    bounds = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (1e-3, 0.1)}[dtype]
    loss, norm, grads = wanted
    difference = torch.stack([(got[2][name] - grad).square().sum() for name, grad in grads.items()]).sum().sqrt()
    errors = abs(got[0] - loss) / loss, float(difference) / CLIP
    if torch.distributed.get_rank() == 0:
        sys.stderr.write(f"{where}: loss {errors[0]:.1e}, gradient {errors[1]:.1e}, norm {got[1] / norm - 1:.1e}\n")
    assert got[2].keys() == grads.keys()
    assert errors[0] <= bounds[0], where
    assert errors[1] <= bounds[1], where
    assert abs(got[1] - norm) <= bounds[1] * norm, where


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "stage", "ways"), [("dense", 1, WAYS), ("sandwich", 3, FEW_WAYS)])
@pytest.mark.timeout(300)
def test_every_way_gives_one_process_gradients(kind, stage, ways):
    run_distributed(check, 2, kind, (stage,), (torch.float32,), ways, timeout=250)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.timeout(900)
def test_in_more_stages_and_in_bfloat16(kind):
    run_distributed(check, 2, kind, (1, 2, 3), (torch.float32, torch.bfloat16), timeout=850)


# --- layers by chunks -------------------------------------------------------------------------------------------------

# What an expert at its capacity drops depends on all chunks of all ranks.
CHUNK_CONFIGS = {
    **CONFIGS,
    "capacity": replace(EXPERTS, capacity_factor=1.0),
    # ZeRO-3 must sum the layers' gradients of one block before it reduces them.
    "shared": replace(DENSE, shared_layers=True),
}
CHUNK_WAYS: list[tuple[Keep, Store, int, int]] = list(
    itertools.product(("all", "attention", "inputs"), ("device", "host"), (11, 100), (1, 2))
)


def check_chunks(kind: str, stages: tuple[int, ...], dtypes: tuple[torch.dtype, ...], ways: list) -> None:
    wanted = alone(CHUNK_CONFIGS[kind])
    for stage, dtype, way in itertools.product(stages, dtypes, ways):
        keep, store, chunk_tokens, head_groups = way
        execution = Execution(keep, store, chunk_tokens=chunk_tokens, head_groups=head_groups)
        got = together(CHUNK_CONFIGS[kind], execution, stage, dtype)
        compare(got, wanted, dtype, f"{kind}, ZeRO {stage}, {dtype}, {way}")


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("sandwich", 3),
        ("shared", 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("dense", 0), ("capacity", 2), ("experts", 2), ("capacity", 3))
        ),
    ],
)
@pytest.mark.timeout(300)
def test_chunks_give_one_process_gradients(kind, stage):
    ways = [("attention", "host", 11, 2), ("inputs", "device", 7, 1)]
    run_distributed(check_chunks, 2, kind, (stage,), (torch.float32,), ways, timeout=250)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHUNK_CONFIGS)
@pytest.mark.timeout(900)
def test_chunks_in_more_stages_ways_and_in_bfloat16(kind):
    run_distributed(check_chunks, 2, kind, (1, 2, 3), (torch.float32, torch.bfloat16), CHUNK_WAYS, timeout=850)


def check_rows(stages: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Gradients of tables summed by rows in backward, for which ZeRO-3 gathers the weight again."""
    # Without dropout those of the embedding table, too.
    for tied, dropout in ((True, 0.0), (False, 0.0), (False, 0.1)):
        config = replace(CONFIGS["dense"], tie_embeddings=tied, residual_dropout=dropout)
        wanted = alone(config)
        with mock.patch.object(token_table, "SUMMED_VALUES", 7 * config.hidden_size):
            for stage, dtype in itertools.product(stages, dtypes):
                got = together(config, Execution("attention", "host", chunk_tokens=11), stage, dtype)
                compare(got, wanted, dtype, f"tables by rows, tied {tied}, ZeRO {stage}, {dtype}")


@pytest.mark.parametrize(
    ("stages", "dtypes"),
    [
        ((3,), (torch.float32,)),
        pytest.param((0, 1, 2), (torch.float32,), marks=pytest.mark.slow),
        pytest.param((1, 2, 3), (torch.bfloat16,), marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(300)
def test_tables_summed_by_rows_give_one_process_gradients(stages, dtypes):
    run_distributed(check_rows, 2, stages, dtypes, timeout=250)
