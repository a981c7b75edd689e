"""A rank that computes a wrong number is found and named; ranks that compute right ones never are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import parallel.audit.operation_audit
from benchmarks.flips import Flip, flip_bit, looked_at
from parallel.audit.audit_decision import Mismatch
from parallel.audit.capture import operators_of
from parallel.audit.operation_audit import CALLS, Audited, OperationAudit
from parallel.comm.process_groups import control_group
from parallel.zero.optimizer import AdamW
from tests.as_on_a_gpu import computing_as_on_a_gpu
from tests.helpers import on_ranks, run_distributed

pytestmark = pytest.mark.timeout(240)

BAD = 1
"""The rank that goes wrong."""
SMALL = CALLS * 2048
"""Bytes that no product below fits in: of each a tile is sent."""


class Model(nn.Module):
    """Products with and without a bias, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up = nn.Linear(32, 96, bias=False), nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x_BtM: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BtM).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.down(functional.silu(self.up(x_BtM + heads)))


class Steps:
    """Audited steps of a model on this rank."""

    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        torch.manual_seed(dist.get_rank())
        self.model = Model()
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        audited = Audited(
            device=torch.device("cpu"),
            dtype=torch.float32,
            kernel="auto",
            weights=self.model.named_parameters,
            masters=self.model.named_parameters,
            optimizer=self.optimizer,
        )
        self.auditor = OperationAudit(audited, seed=3, every=1, rank=dist.get_rank(), limit_bytes=limit_bytes)
        self.number = 0

    def to(self, kind: str) -> None:
        """Pass over steps until the next one is of this kind."""
        while self.auditor.kind_of(self.number + 1) != kind:
            self.number += 1

    def take(self, flip: Flip | None = None) -> list[Mismatch]:
        self.number += 1
        # As within a model: what a layer reads has a gradient, too.
        x = torch.randn(2, 24, 32, requires_grad=True)
        with self.auditor.capturing(self.number, update=False):
            if flip is not None:
                flip.seen, flip.is_counting = 0, True
            self.model(x).square().mean().backward()
            if flip is not None:
                flip.is_counting = False
        found = self.auditor.finish(self.number, update=False)
        with self.auditor.capturing(self.number, update=True):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return found + self.auditor.finish(self.number, update=True)

    def wrong(self, flip: Flip, kind: str) -> list[Mismatch]:
        """A step of this kind in which the bad rank goes wrong in a call that is looked at."""
        self.to(kind)
        if dist.get_rank() != BAD % dist.get_world_size():
            return self.take()
        chance = self.auditor._generator(self.number + 1, dist.get_rank())
        flip.call = Random(self.number).choice(looked_at(chance, {"product": 9, "attention": 2}[kind]))
        with flip:
            return self.take(flip)


def check_named(found: Sequence[Mismatch], rank: int = BAD) -> None:
    assert found, "nothing was found"
    assert {tuple(finding.candidate_ranks) for finding in found} == {(rank,)}


def audit_right_steps(limit_bytes: int) -> None:
    control_group()
    steps, kinds = Steps(limit_bytes), set()
    for _ in range(12):
        kinds.add(steps.auditor.kind_of(steps.number + 1))
        assert steps.take() == []
    assert kinds == {"product", "attention", "update"}


@pytest.mark.parametrize("limit_bytes", [1 << 20, pytest.param(SMALL, marks=pytest.mark.slow)])
def test_right_numbers_are_never_called_wrong(limit_bytes):
    run_distributed(audit_right_steps, 3, limit_bytes, timeout=150)


@pytest.mark.slow
@on_ranks(3, timeout=150)
def test_the_operators_of_a_gpu_are_audited() -> None:
    """Of a GPU's operators, and without the bound of rounding, which its sums need not keep."""
    parallel.audit.operation_audit.operators_of = lambda kind, _: operators_of(kind, "cuda")
    with computing_as_on_a_gpu():
        audit_right_steps(SMALL)
        audit_wrong_steps_of_tiles()


def audit_wrong_steps() -> None:
    control_group()
    steps = Steps()
    # Every part of a value: the lowest bit of the mantissa, its middle, the exponent, the sign.
    for bit in (0, 11, 23, 30, 31):
        for kind in ("product", "attention"):
            flip = Flip(operators_of(kind, "cpu"))
            flip.bit = bit
            found = steps.wrong(flip, kind)
            check_named(found)
            assert found[0].place.kind == kind
            assert found[0].difference.bits == (bit,)
            assert found[0].difference.values == 1
            assert "did not repeat" in found[0].evidence
            if kind == "product":
                assert found[0].place.weight in dict(steps.model.named_parameters())


def audit_repeating_faults() -> None:
    """One that gives wrong products each time is wrong about the others' too."""
    control_group()
    for limit in (1 << 20, SMALL):
        flip = Flip()
        flip.bit, flip.repeats = 20, True
        steps = Steps(limit)
        steps.take()  # ranks compare themselves while all are well
        found = steps.wrong(flip, "product")
        check_named(found)
        evidence = " ".join(finding.evidence for finding in found)
        assert "only rank 1 got a different one" in evidence
        if limit == SMALL:
            # Its second try of the whole product is wrong in the same way: only the tile tells.
            assert "; a tile [" in found[0].place.call
        assert "the fault repeats" in evidence


def audit_wrong_updates() -> None:
    control_group()
    steps = Steps()
    steps.to("update")

    def spoil(*_: object) -> None:
        for p in steps.model.parameters():
            with torch.no_grad():
                flip_bit(p, 5, 3)

    # Before the audit looks at what came out.
    if dist.get_rank() == BAD:
        steps.optimizer.register_step_post_hook(spoil)
    found = steps.take()
    check_named(found)
    assert found[0].place.weight in dict(steps.model.named_parameters())
    assert found[0].difference.bits == (3,)


def audit_wrong_steps_of_tiles() -> None:
    control_group()
    steps = Steps(SMALL)
    flip = Flip()
    flip.bit = 0
    found = steps.wrong(flip, "product")
    check_named(found)
    assert "repeated the call" in found[0].evidence


@on_ranks(3, timeout=150)
def test_a_wrong_number_is_found_and_its_rank_named() -> None:
    audit_wrong_steps()
    audit_repeating_faults()
    audit_wrong_updates()
    audit_wrong_steps_of_tiles()
    audit_a_rank_that_was_never_well()


def audit_a_rank_that_was_never_well() -> None:
    """It has other bits than the others from the first comparison on."""
    control_group()
    steps, flip = Steps(), Flip()
    flip.bit, flip.repeats = 20, True
    check_named(steps.wrong(flip, "product"))
    assert [x.exact for x in steps.auditor.assigned] == [True, False, True]
    assert len({x.machine for x in steps.auditor.ranks}) == 1


def two_disagree() -> None:
    control_group()
    flip = Flip()
    flip.bit, flip.repeats = 20, True
    steps = Steps()
    steps.take()
    found = steps.wrong(flip, "product")
    assert found
    assert all(sorted(finding.candidate_ranks) == [0, 1] for finding in found)
    assert "two results give no majority" in found[0].evidence
    assert "ranks 1 and 0 disagree" in found[-1].describe(7)
    # What is wrong once has the second try against it.
    flip = Flip()
    flip.bit = 20
    check_named(Steps().wrong(flip, "product"))


def alone() -> None:
    control_group()
    flip = Flip()
    flip.bit = 20
    steps = Steps()
    assert [steps.take() for _ in range(10)] == [[]] * 10
    found = steps.wrong(flip, "product")
    check_named(found, rank=0)
    assert "repeated the call" in found[0].evidence


@pytest.mark.parametrize(("ranks", "check"), [(2, two_disagree), pytest.param(1, alone, marks=pytest.mark.slow)])
def test_fewer_ranks_say_less(ranks, check):
    run_distributed(check, ranks, timeout=150)


@pytest.mark.slow
@on_ranks(3, timeout=150)
def test_ranks_of_other_kinds_compare_within_rounding() -> None:
    control_group()
    likeness = parallel.audit.operation_audit.profile_rank

    def of_another_kind(host, *rest):
        mine = likeness(host, *rest)
        return mine.__class__(**{**vars(mine), "machine": f"processor {dist.get_rank()}"})

    parallel.audit.operation_audit.profile_rank = of_another_kind
    steps = Steps()
    assert not any(map(bool, (steps.take() for _ in range(12))))
    assert not any(x.exact for x in steps.auditor.assigned)
    flip = Flip()
    flip.bit, flip.repeats = 28, True
    check_named(steps.wrong(flip, "product"))


SCRIPT = """
import gc, random, sys, weakref
import torch
from parallel.audit.capture import Capture, operators_of

if sys.argv[1] == "compiler":
    import torch._dynamo
loaded = "torch._dynamo" in sys.modules
gc.disable()
with Capture("product", operators_of("product", "cpu"), random.Random(0), count=1, limit_bytes=1 << 20,
             name_of=lambda address: "") as capture:
    torch.ones(3, 4) @ torch.ones(4, 5)
assert capture.seen == 1 and len(capture.samples) == 1, (capture.seen, capture.samples)
assert ("torch._dynamo" in sys.modules) == loaded
gone = weakref.ref(capture)
del capture
assert gone() is None, "what was copied waits for Python to look for cycles"
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["nothing", "compiler"])
def test_a_look_imports_no_compiler_and_its_copies_go_with_it(what):
    subprocess.run([sys.executable, "-c", SCRIPT, what], check=True, timeout=120)
