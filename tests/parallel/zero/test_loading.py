"""Loading into a wrapped model: every value is read once over all ranks, and each weight follows its master."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from longctx.checkpoint_format import ROLES
from longctx.model.decoder import Decoder
from longctx.model.experts.experts import is_expert_weight
from parallel.zero import zero_state
from tests.helpers import run_distributed
from tests.parallel.experts.expert_cases import CONFIG, RanksRun, Spread, gather_whole

ODD = replace(CONFIG, vocab_size=67, expert_ffn_size=23, ffn_size=41, shared_ffn_size=7)
"""Sizes that no number of ranks divides."""
STEP = 7

Case = tuple[int, torch.dtype, int]
"""ZeRO stage, dtype of the weights, ranks that share the experts."""
CASES: list[Case] = [
    (0, torch.float32, 1),
    (0, torch.float32, 2),
    (1, torch.bfloat16, 1),
    (1, torch.float32, 2),
    (2, torch.bfloat16, 2),
    (3, torch.bfloat16, 1),
    (3, torch.float32, 2),
]


class Source:
    """Values of a checkpoint by tensor and role, and what this rank has read of them."""

    def __init__(self) -> None:
        decoder = Decoder(ODD, seed=3)
        masters = {name: p.detach() for name, p in decoder.named_parameters()}
        biases = {name: torch.arange(1.0, 1 + b.numel()) for name, b in decoder.named_buffers()}
        self.values = {(name, ROLES[0]): x.flatten() for name, x in {**masters, **biases}.items()}
        for name, x in masters.items():
            self.values[name, ROLES[1]] = x.flatten() * 3
            self.values[name, ROLES[2]] = x.flatten().square()
        self.read_ranges: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)

    def read(self, name: str, role: str, start: int, out: Tensor) -> None:
        whole, count = self.values[name, role], len(out)
        assert 0 < count <= len(whole) - start, f"{name} {role}: {count} values from {start} of {len(whole)}"
        self.read_ranges[name, role].append((start, start + count))
        out.copy_(whole[start : start + count])

    def num_read(self) -> int:
        return sum(stop - start for ranges in self.read_ranges.values() for start, stop in ranges)


def check_each_value_is_read_once(source: Source, moments: bool) -> None:
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(source.read_ranges))
    for key, whole in source.values.items():
        if key[1] != ROLES[0] and not moments:
            assert not any(key in ranges for ranges in everyone)
            continue
        at = 0
        for start, stop in sorted(one for ranges in everyone for one in ranges.get(key, [])):
            assert start == at, f"{key}: values from {at} are read {'never' if start > at else 'twice'}"
            at = stop
        assert at == len(whole), f"{key}: nobody reads from {at}"


def own_part(run: RanksRun, name: str, p: nn.Parameter, whole: Tensor) -> Tensor:
    """What this rank's forward reads of a flattened tensor: of experts its own, and in stage 3 its part of them."""
    if is_expert_weight(name):
        whole = whole.chunk(run.mesh.expert)[run.mesh.expert_rank]
    if run.engine.stage < 3:
        return whole
    numel = p.ds_tensor.numel()  # type: ignore[attr-defined]
    return whole[p.ds_zero_partition_rank * numel :][:numel]  # type: ignore[attr-defined]


def check_weights(run: RanksRun, source: Source, dtype: torch.dtype) -> None:
    """Forward reads rounded masters."""
    for name, p in run.engine.model.network.named_parameters():
        held = run.engine.partition.working_part(name, p).flatten()
        assert held.dtype == dtype
        assert torch.equal(held, own_part(run, name, p, source.values[name, ROLES[0]]).to(dtype)), name


def check_loading(cases: list[Case], moments: bool, block: int) -> None:
    zero_state.BLOCK_VALUES = block  # as many blocks of a small tensor as a large one has
    for stage, dtype, expert in cases:
        source = Source()
        run = RanksRun(ODD, Spread(stage=stage, dtype=dtype, expert=expert))
        run.engine.load(source.read, step=STEP, moments=moments)
        check_each_value_is_read_once(source, moments)
        total = sum(len(x) for key, x in source.values.items() if moments or key[1] == ROLES[0])
        # Ranks take equal parts of a tensor, a block or a flat buffer, each rounded up to a whole value.
        assert source.num_read() <= 1.03 * total / dist.get_world_size() + 2 * len(source.values)
        check_weights(run, source, dtype)
        whole = gather_whole(run.owned(), run.engine.shapes)
        for key, values in source.values.items():
            if key[1] == ROLES[0] or moments:
                assert torch.equal(whole[key], values), key
        steps = {float(of_one["step"]) for of_one in run.engine.partition.inner.state.values()}
        assert steps == {STEP * moments}


QUICK = [(0, torch.float32, 2), (1, torch.bfloat16, 1), (2, torch.bfloat16, 2), (3, torch.float32, 2)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("world", "cases"), [(2, QUICK), (3, [CASES[0], CASES[5]])])
def test_every_value_is_read_once_over_all_ranks(world, cases):
    run_distributed(check_loading, world, cases, True, 1000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_over_one_and_four_ranks_and_of_weights_alone():
    run_distributed(check_loading, 2, CASES, True, 1000, timeout=200)
    run_distributed(check_loading, 4, CASES, True, 1000, timeout=200)
    run_distributed(check_loading, 4, CASES, False, 1000, timeout=200)
    run_distributed(check_loading, 1, [case for case in CASES if case[2] == 1], True, 1000, timeout=200)
