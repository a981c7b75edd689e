"""What DeepSpeed does beside the stages: offload, and stage 3's own sizes. Each trains like one plain process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from longctx.errors import ConfigError, GradientError
from parallel.layout.sequence import SequenceLayout
from parallel.loss import count_step
from parallel.zero.cpu_adam import compile_cpu_adam
from parallel.zero.zero_engine import ZeroEngine
from parallel.zero.zero_options import ZeroOptions, check_device
from tests.helpers import on_ranks, run_distributed
from tests.parallel.zero.test_zero import (
    BOUNDS,
    DENSE,
    FEW,
    ROWS,
    SEQ_LEN,
    SMALL,
    check_parity,
    check_state,
    row_of,
    step_rows,
    train_together,
)

OFFLOAD = ZeroOptions(offload="cpu", reduce_bucket_size=1000)
PARAMETERS = ZeroOptions(offload_parameters="cpu", prefetch_bucket_size=500, max_live_parameters=5000)
BOTH = ZeroOptions(offload="cpu", offload_parameters="cpu", sub_group_size=3000, param_persistence_threshold=0)
HPZ = ZeroOptions(hpz_partition_size=2, param_persistence_threshold=10)
"""Sizes that cut the tests' 50 thousand parameters into many parts."""


def refuse_broken_gradient(stage: int, zero: ZeroOptions) -> ZeroEngine:
    """A gradient that is not finite is named, and changes neither masters nor moments."""
    compile_cpu_adam()
    _, engine = train_together(DENSE, context=2, layout="zigzag", stage=stage, steps=1, zero=zero)
    before = {(r.name, r.role, r.start): r.values.clone() for r in engine.owned_ranges()}
    name, p = next((n, p) for n, p in engine.model.network.named_parameters() if n.endswith("q_proj.weight"))
    if dist.get_rank() == 1:
        p.register_hook(lambda gradient: gradient * torch.inf)
    split = SequenceLayout.build("zigzag", SEQ_LEN, 2)
    mine = row_of(step_rows(1), 0).map_tokens(lambda x: split.split(x, dist.get_rank(), 1))
    counts = count_step(engine.model, [mine] * ROWS)
    for _ in range(ROWS):
        engine.backward(engine.model.loss(engine.forward(mine), counts))
    with pytest.raises(GradientError) as caught:
        engine.step(1e-3)
    assert caught.value.names == [name]
    for r in engine.owned_ranges():
        assert torch.equal(before[r.name, r.role, r.start], r.values)
    return engine


def check(kind: str, context: int, stages: tuple[int, ...], zero: ZeroOptions) -> None:
    if zero.offload != "none":
        compile_cpu_adam()
    check_parity(kind, context, BOUNDS[kind], FEW, stages, zero=zero)


# DeepSpeed compiles its AdamW for those that offload state, which takes minutes on a machine that has never done so.
@pytest.mark.parametrize(
    ("ranks", "kind", "stages", "zero"),
    [
        (2, "moe", (3,), PARAMETERS),
        pytest.param(4, "dense", (3,), HPZ, marks=pytest.mark.slow),
        pytest.param(2, "dense", (1, 2, 3), OFFLOAD, marks=pytest.mark.slow),
        pytest.param(2, "moe", (1, 2, 3), OFFLOAD, marks=pytest.mark.slow),
        pytest.param(2, "dense", (3,), BOTH, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(400)
def test_state_and_weights_elsewhere_train_like_one_process(ranks, kind, stages, zero):
    run_distributed(check, ranks, kind, ranks, stages, zero, timeout=350)


def test_quantized_messages_are_refused_on_a_cpu():
    for zero in (ZeroOptions(quantized_weights=True), ZeroOptions(quantized_gradients=True)):
        with pytest.raises(ConfigError, match=r"zero\.quantized_\w+=true needs GPUs.*is not implemented on the CPU"):
            check_device(zero, "cpu")
        check_device(zero, "cuda")


PLAIN = ZeroOptions()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "other", "zero", "other_zero"),
    [
        (1, 2, OFFLOAD, PLAIN),
        (2, 1, PLAIN, OFFLOAD),
        (2, 2, OFFLOAD, OFFLOAD),
        (3, 1, BOTH, PLAIN),
        (0, 3, PLAIN, BOTH),
        (3, 3, HPZ, PARAMETERS),
    ],
)
@pytest.mark.timeout(400)
@on_ranks(2, timeout=350)
def test_a_checkpoint_does_not_know_where_state_lived(
    stage: int, other: int, zero: ZeroOptions, other_zero: ZeroOptions
) -> None:
    compile_cpu_adam()
    check_state(stage, other, zero, other_zero)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.timeout(400)
@on_ranks(2, timeout=350)
def test_so_they_do_in_bfloat16(stage: int) -> None:
    """In bfloat16 masters, gradients and moments are float32 as well: only a weight's last bit may fall otherwise."""
    compile_cpu_adam()
    ways = {"offload": {"zero": OFFLOAD}, "as on GPUs": {"fused": True, "zero": SMALL}}
    common = {"context": 2, "layout": "zigzag", "stage": stage, "dtype": torch.bfloat16}
    wanted, _ = train_together(DENSE, **common)
    for name, way in ways.items():
        got, _ = train_together(DENSE, **common, **way)
        assert got.losses == pytest.approx(wanted.losses, rel=1e-3), name
        assert got.norms == pytest.approx(wanted.norms, rel=1e-2), name


def check_where_it_lives(engine) -> None:
    """Masters and moments are read and written where they are, and not as copies on the device."""
    device = get_accelerator()
    real, device.current_device_name = device.current_device_name, lambda: "meta"
    try:
        parts = [engine.partition.part(name, p) for name, p in engine.model.network.named_parameters()]
    finally:
        device.current_device_name = real
    assert {values.device.type for part in parts for values in part.values()} == {"cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.timeout(400)
@on_ranks(2, timeout=350)
def test_an_offloaded_gradient_that_is_not_finite_changes_nothing(stage: int) -> None:
    check_where_it_lives(refuse_broken_gradient(stage, OFFLOAD))
