"""``OperationAudit``: samples a call in a step, has other ranks repeat it, and names the rank that was wrong.

    all ranks           choose the same kind: matmuls, attention, or the update
    each rank           copies one of its own calls, among those that the step makes anyway
    each rank           sends it to two others, repeats its own, and the two that it received
    all ranks           learn whether any two results mismatch

All ranks are audited in the same step: otherwise the others would wait for the audited one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random

import torch
from torch import Tensor

from parallel.audit.adamw import UpdateCapture
from parallel.audit.audit_decision import Case, Mismatch, RepeatedResult, find_mismatch
from parallel.audit.bits import BitDifference, difference, digest, matmul_difference, update_difference
from parallel.audit.call_sample import UPDATE, CallSample, Kind
from parallel.audit.capture import Capture, operators_of
from parallel.audit.rank_comparison import AuditAssignment, RankProfile, assign_auditing_ranks, profile_rank
from parallel.audit.repeated_call import repeat_call
from parallel.audit.sample_exchange import exchange
from parallel.comm.world import any_rank, gather_objects
from parallel.runtime.activity import begin

CALLS = 4
"""Audited calls per rank and step; one for updates."""
LIMIT_BYTES = 64 << 20
"""Maximum bytes that a rank copies for them, inputs and outputs together."""

SHARES: dict[Kind, int] = {"product": 6, "attention": 2, "update": 2}
"""Audited steps per ten, by kind."""

Named = Callable[[], Iterable[tuple[str, Tensor]]]
"""Tensors and their names, in their current state."""


@dataclass(frozen=True, kw_only=True)
class Audited:
    """A training run's device, dtype, attention kernel, weights and optimizer, for the audit."""

    device: torch.device
    dtype: torch.dtype
    kernel: str
    """Attention kernel, as named in the config."""
    weights: Named
    """Weights read by matmuls."""
    masters: Named
    """Master weights updated by the optimizer."""
    optimizer: torch.optim.Optimizer | None
    """None if its updates cannot be recomputed."""


class OperationAudit:
    """Auditor for a run's steps. Every rank has one, and all call it in the same order."""

    def __init__(self, audited: Audited, *, seed: int, every: int, rank: int, limit_bytes: int = LIMIT_BYTES) -> None:
        """Audit one in ``every`` steps; 0 disables it."""
        self._audited, self._seed, self._every, self._rank = audited, seed, every, rank
        self._limit = limit_bytes
        self._assigned: list[AuditAssignment] = []
        self._ranks: list[RankProfile] = []
        self._samples: list[CallSample] = []

    def kind_of(self, step: int) -> Kind | None:
        """Return the kind of calls audited in a step; None if it is not audited."""
        if not self._every or step % self._every:
            return None
        # From a generator that all ranks share, so that they enter the same collectives.
        kinds: list[Kind] = [kind for kind in SHARES if kind != "update" or self._audited.optimizer is not None]
        return self._generator(step, -1).choices(kinds, [SHARES[kind] for kind in kinds])[0]

    @property
    def ranks(self) -> list[RankProfile]:
        """Descriptions of all ranks; empty before the first audit."""
        return self._ranks

    @property
    def assigned(self) -> list[AuditAssignment]:
        """Auditing ranks of each rank; empty before the first audit."""
        return self._assigned

    def prepare(self) -> None:
        """Compare the ranks, before the first audit. Collective."""
        begin("comparing the ranks' hardware and kernels")
        mine = profile_rank(socket.gethostname(), self._audited.device, self._audited.dtype, self._audited.kernel)
        self._ranks = gather_objects(mine)
        self._assigned = assign_auditing_ranks(self._ranks)

    @contextmanager
    def capturing(self, step: int, *, update: bool) -> Iterator[None]:
        """Copy a call from the step's forward and backward, or from its ``update``, if that phase is audited."""
        kind = self.kind_of(step)
        if kind is None or update != (kind == "update"):
            yield
            return
        rng = self._generator(step, self._rank)
        if kind == "update":
            assert self._audited.optimizer is not None
            with UpdateCapture(self._audited.optimizer, rng, self._limit) as captured:
                yield
            self._samples = self._named(captured)
            return
        operators = operators_of(kind, self._audited.device.type)
        # Free samples that an interrupted step may have left, before new ones are made.
        self._samples = []
        options = {"count": CALLS, "limit_bytes": self._limit // CALLS}
        with Capture(kind, operators, rng, name_of=self._weight_at, **options) as capture:
            yield
        self._samples = capture.samples

    def finish(self, step: int, *, update: bool) -> list[Mismatch]:
        """Have other ranks repeat this phase's calls, and return mismatches; equal on every rank. Collective."""
        kind = self.kind_of(step)
        if kind is None or update != (kind == "update"):
            return []
        begin("auditing")
        # Lazily: a run shorter than its first audit pays no cost.
        if not self._assigned:
            self.prepare()
        # Free at the latest here: the optimizer needs the memory.
        samples, self._samples = self._samples, []
        received = exchange(samples, self._assigned, self._rank)
        cases = [self._case(number, sample) for number, sample in enumerate(samples)]
        answers = [
            self._answer(victim, number, sample)
            for victim, of_victim in received.items()
            for number, sample in of_victim.items()
        ]
        has_mismatch = any(x.own is not None for x in cases) or any(x.difference is not None for x in answers)
        # One flag for all ranks: details are gathered only after a mismatch.
        if not any_rank(has_mismatch):
            return []
        return _mismatches(gather_objects((cases, answers)))

    def _case(self, number: int, sample: CallSample) -> Case:
        own, second = sample.own, ""
        if not sample.is_alone:
            again = repeat_call(sample, self._audited.device)
            second = digest(again)
            # A tile was already compared on this rank; keep a difference found then.
            own = own or self._compare(sample, again, is_exact=True)
        if sample.is_tile and sample.own is not None:
            # The full call was wrong, which says nothing about the tile.
            second = ""
        host = self._ranks[self._rank].host
        return Case(rank=self._rank, host=host, number=number, place=sample.place, own=own, second=second)

    def _answer(self, victim: int, number: int, sample: CallSample) -> RepeatedResult:
        again = repeat_call(sample, self._audited.device)
        # Ranks with another machine kind compute other bits: only a difference beyond rounding counts.
        found, seen = self._compare(sample, again, self._assigned[victim].exact), ""
        if self._assigned[victim].exact:
            seen = digest(again)
        host = self._ranks[self._rank].host
        return RepeatedResult(rank=self._rank, host=host, of=victim, number=number, digest=seen, difference=found)

    def _compare(self, sample: CallSample, again: list[Tensor], is_exact: bool) -> BitDifference | None:
        """Compare the step's result with another one, bitwise or beyond rounding."""
        # A part of an update has the full one's bits only if AdamW treats all values the same.
        if sample.op == UPDATE:
            is_exact = is_exact and all(x.updates for x in self._ranks)
        if is_exact:
            return difference(list(sample.outputs), again)
        return self._rounding_difference(sample, again)

    def _rounding_difference(self, sample: CallSample, again: list[Tensor]) -> BitDifference | None:
        """Compare beyond rounding with a result from another machine kind; return None if it is within the bound."""
        inputs = [x.laid_out(self._audited.device) for x in sample.inputs]
        if sample.op == UPDATE:
            previous_values = (inputs[0], inputs[2], inputs[3])
            triples = zip(previous_values, sample.outputs, again, strict=True)
            found = (update_difference(before, x.to(before.device), y) for before, x, y in triples)
            return next(filter(None, found), None)
        shape = (inputs[0].shape[0], inputs[1].shape[1])
        used = sample.outputs[0].to(again[0].device)
        return matmul_difference(inputs[0], inputs[1], used.view(shape), again[0].view(shape))

    def _generator(self, step: int, rank: int) -> Random:
        """Return a generator seeded by these values only; rank −1 is for choices that all ranks share."""
        words = f"{self._seed} {step} {rank}".encode()
        return Random(int.from_bytes(blake2b(words, digest_size=8).digest(), "big"))

    def _weight_at(self, address: int) -> str:
        return _name_at(address, self._audited.weights())

    def _named(self, update: UpdateCapture) -> list[CallSample]:
        """Return the update's sample, named by the weight in its range; empty if the step was skipped."""
        sample, master = update.sample, update.master
        if sample is None or master is None:
            return []
        address = master.data_ptr() + update.start * master.element_size()
        place = sample.place._replace(weight=_name_at(address, self._audited.masters()))
        return [replace(sample, place=place)]


def _mismatches(of_ranks: Sequence[tuple[list[Case], list[RepeatedResult]]]) -> list[Mismatch]:
    found = []
    answers = [answer for _, from_rank in of_ranks for answer in from_rank]
    for cases, _ in of_ranks:
        for case in cases:
            found.append(find_mismatch(case, [x for x in answers if (x.of, x.number) == (case.rank, case.number)]))
    return [mismatch for mismatch in found if mismatch is not None]


def _name_at(address: int, named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the name of the tensor that contains the address; empty if there is none."""
    if not address:
        return ""
    for name, x in named:
        start = x.data_ptr()
        if start <= address < start + x.numel() * x.element_size():
            return name
    return ""
