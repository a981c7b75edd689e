"""Stage 3 with its state on a disk: the same bits as in memory, while it trains, validates, is saved and goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

from longctx.checkpoint_format import ROLES
from longctx.config import ModelConfig
from parallel.layout.sequence import SequenceLayout
from parallel.loss import count_step
from parallel.zero.cpu_adam import compile_cpu_adam
from parallel.zero.zero_engine import ZeroEngine
from parallel.zero.zero_options import ZeroOptions
from tests.helpers import run_distributed
from tests.parallel.zero.swapping import swap_everything
from tests.parallel.zero.test_offload import refuse_broken_gradient
from tests.parallel.zero.test_zero import (
    DENSE,
    MOE,
    ROWS,
    SEQ_LEN,
    check_state,
    row_of,
    step_rows,
    train_together,
)

WIDE = replace(DENSE, hidden_size=768, head_dim=192, num_kv_heads=4, ffn_size=2049)
"""Half of a matrix has more than 1 MiB, below which DeepSpeed swaps nothing; odd parts begin at no aligned address."""


def weights_at(path: str) -> ZeroOptions:
    return ZeroOptions(
        offload_parameters="nvme",
        nvme_path=path,
        param_persistence_threshold=0,
        prefetch_bucket_size=500,
        max_live_parameters=5000,
        sub_group_size=3000,
    )


def state_at(path: str) -> ZeroOptions:
    return ZeroOptions(offload="nvme", nvme_path=path, sub_group_size=3000, reduce_bucket_size=1000)


def both_at(path: str) -> ZeroOptions:
    return replace(weights_at(path), offload="nvme")


def in_memory(zero: ZeroOptions) -> ZeroOptions:
    """The same, with the machine's memory in the place of the disk."""
    places = {key: "cpu" for key in ("offload", "offload_parameters") if getattr(zero, key) == "nvme"}
    return replace(zero, nvme_path="", **places)


def check_on_disk(engine: ZeroEngine) -> None:
    """What is large enough to be on the disk is not in memory."""
    zero = engine.partition.engine.optimizer
    if zero.swap_optimizer:
        flats = zero.fp32_partitioned_groups_flat
        swapped = [flat for number, flat in enumerate(flats) if zero._swappable_optimizer_subgroup(number)]
        assert len(swapped) > 1
        assert all(flat.numel() == 0 for flat in swapped)
        assert all(zero.optimizer.state[flat][key].numel() == 0 for flat in swapped for key in ROLES[1:])
    if zero.params_in_nvme_and_cpu:
        engine.partition._swapper.release_all()
        parts = [p.ds_tensor for p in engine.model.parameters() if p.ds_tensor.final_location == "nvme"]
        assert len(parts) > 1
        assert all(part.numel() == 0 for part in parts)


def check_equal(config: ModelConfig, zero: ZeroOptions, way: dict) -> None:
    """Losses, norms, masters and moments to the bit."""
    if zero.offload != "none":
        compile_cpu_adam()
    wanted, there = train_together(config, stage=3, zero=in_memory(zero), **way)
    got, here = train_together(config, stage=3, zero=zero, **way)
    assert (got.losses, got.norms) == (wanted.losses, wanted.norms)
    count = 0
    for a, b in zip(here.owned_ranges(), there.owned_ranges(), strict=True):
        assert a[:3] == b[:3]
        assert torch.equal(a.values, b.values), a[:3]
        count += 1
    assert count == len(here.owned_pieces())
    assert here.nonfinite_weights() == []
    for (name, p), (_, q) in zip(
        here.model.network.named_parameters(), there.model.network.named_parameters(), strict=True
    ):
        assert torch.equal(here.partition.working_part(name, p), there.partition.working_part(name, q)), name
    check_on_disk(here)


def check_small(kind: str, zero: ZeroOptions, way: dict) -> None:
    swap_everything()
    check_equal({"dense": DENSE, "moe": MOE}[kind], zero, {"layout": "zigzag", **way})


def read_ahead(engine: ZeroEngine) -> None:
    """Have old weights in memory before a step, as a prefetch that nothing used leaves them."""
    swapper = engine.partition._swapper
    away = PartitionedParamStatus.NOT_AVAILABLE
    parts = [p for p in engine.model.parameters() if p.ds_tensor.status == away]
    assert len(parts) > 1
    swapper.swap_in(parts, async_op=False)


def check_evaluation(zero: ZeroOptions) -> None:
    """A forward pass of its own, between steps, reads the weights of the last one."""
    swap_everything()
    _, engine = train_together(DENSE, context=2, layout="zigzag", stage=3, steps=1, zero=zero)
    _, wanted = train_together(DENSE, context=2, layout="zigzag", stage=3, steps=1)
    split = SequenceLayout.build("zigzag", SEQ_LEN, 2)
    mine = row_of(step_rows(9), 0).map_tokens(lambda x: split.split(x, dist.get_rank(), 1))
    counts = count_step(engine.model, [mine] * ROWS)
    seen = []
    for runner in (engine, wanted):
        runner.model.eval()
        with torch.no_grad():
            seen.append([float(runner.forward(mine)["nll"]) for _ in range(2)])
        runner.model.train()
        for _ in range(ROWS):
            runner.backward(engine.model.loss(runner.forward(mine), counts))
        if runner is engine:
            read_ahead(engine)
        seen[-1].append(runner.step(1e-2))
        with torch.no_grad():
            seen[-1].append(float(runner.forward(mine)["nll"]))
    assert seen[0] == pytest.approx(seen[1], rel=1e-6)
    assert seen[0][0] != seen[0][3]
    # What is gathered is freed: the rest is on the disk.
    engine.partition.engine.optimizer._partition_all_parameters()
    check_on_disk(engine)
    parameters = dict(engine.model.network.named_parameters())
    for r in engine.owned_ranges():
        if r.role == ROLES[0] and r.name in parameters:
            assert torch.equal(engine.partition.working_part(r.name, parameters[r.name]), r.values), r.name


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_validation_between_steps_reads_them_too(tmp_path):
    run_distributed(check_evaluation, 2, weights_at(str(tmp_path)), timeout=150)


# DeepSpeed compiles its AdamW for these, which takes minutes on a machine that has never done so.


@pytest.mark.slow
@pytest.mark.parametrize("options", [weights_at, state_at, both_at])
@pytest.mark.parametrize(
    ("kind", "world_size", "way"),
    [
        ("dense", 1, {"context": 1}),
        ("dense", 2, {"context": 2}),
        ("moe", 2, {"context": 1, "expert": 2}),
        ("dense", 2, {"context": 2, "dtype": torch.bfloat16}),
    ],
)
@pytest.mark.timeout(400)
def test_what_is_on_a_disk_trains_as_in_memory(tmp_path, options, kind, world_size, way):
    run_distributed(check_small, world_size, kind, options(str(tmp_path)), way, timeout=350)
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def check_wide(zero: ZeroOptions, dtype: torch.dtype) -> None:
    """With DeepSpeed's own least size: masters, moments, gradients and weights of more than 1 MiB."""
    check_equal(WIDE, zero, {"context": 2, "layout": "zigzag", "steps": 2, "dtype": dtype})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.timeout(400)
def test_large_parts_do_so_without_help(tmp_path, dtype):
    run_distributed(check_wide, 2, replace(both_at(str(tmp_path)), sub_group_size=2_000_000), dtype, timeout=350)


def check_move(stage: int, other: int, zero: ZeroOptions, other_zero: ZeroOptions) -> None:
    compile_cpu_adam()
    swap_everything()
    check_state(stage, other, zero, other_zero)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "other", "here", "there"),
    [
        (3, 1, both_at, None),
        (0, 3, None, both_at),
        (3, 3, state_at, both_at),
        (3, 3, None, weights_at),
        (3, 3, weights_at, state_at),
    ],
)
@pytest.mark.timeout(400)
def test_a_checkpoint_does_not_know_of_the_disk(tmp_path, stage, other, here, there):
    options = [make(str(tmp_path)) if make else ZeroOptions() for make in (here, there)]
    run_distributed(check_move, 2, stage, other, *options, timeout=350)


def check_unstepped(zero: ZeroOptions) -> None:
    """Moments that no step has made are zeros, also when they are read again."""
    compile_cpu_adam()
    swap_everything()
    _, engine = train_together(DENSE, context=2, layout="zigzag", stage=3, steps=0, zero=zero)
    for _ in range(2):
        moments = [r.values.clone() for r in engine.owned_ranges() if r.role != ROLES[0]]
        assert moments
        assert not any(values.any() for values in moments)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_no_step_has_made_is_read_as_zeros(tmp_path):
    run_distributed(check_unstepped, 2, state_at(str(tmp_path)), timeout=350)


def check_broken(zero: ZeroOptions) -> None:
    swap_everything()
    refuse_broken_gradient(3, zero)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_gradient_that_is_not_finite_changes_nothing_on_the_disk(tmp_path):
    run_distributed(check_broken, 2, both_at(str(tmp_path)), timeout=350)
