"""``Auditor``: samples a call in a step, has other ranks repeat it, and names the rank that was wrong.

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
from parallel.audit.again import compute_again
from parallel.audit.alike import Assigned, Likeness, assign, likeness
from parallel.audit.bits import Difference, difference, digest, outside, outside_update
from parallel.audit.capture import Capture, operators_of
from parallel.audit.exchange import exchange
from parallel.audit.sample import UPDATE, Kind, Sample
from parallel.audit.verdict import Answer, Case, Finding, judge
from parallel.comm.world import any_rank, gather_objects
from parallel.runtime.spans import begin

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
    """The parts of a run that are audited."""

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


class Auditor:
    """Auditor for a run's steps. Every rank has one, and all call it in the same order."""

    def __init__(self, audited: Audited, *, seed: int, every: int, rank: int, limit_bytes: int = LIMIT_BYTES) -> None:
        """Audit one in ``every`` steps; 0 disables it."""
        self._audited, self._seed, self._every, self._rank = audited, seed, every, rank
        self._limit = limit_bytes
        self._assigned: list[Assigned] = []
        self._ranks: list[Likeness] = []
        self._samples: list[Sample] = []

    def kind_of(self, step: int) -> Kind | None:
        """Return the kind of calls audited in a step; None if it is not audited."""
        if not self._every or step % self._every:
            return None
        # From a generator that all ranks share, so that they enter the same collectives.
        kinds: list[Kind] = [kind for kind in SHARES if kind != "update" or self._audited.optimizer is not None]
        return self._chance(step, -1).choices(kinds, [SHARES[kind] for kind in kinds])[0]

    @property
    def ranks(self) -> list[Likeness]:
        """Descriptions of all ranks; empty before the first audit."""
        return self._ranks

    @property
    def assigned(self) -> list[Assigned]:
        """Auditing ranks of each rank; empty before the first audit."""
        return self._assigned

    def prepare(self) -> None:
        """Compare the ranks, before the first audit. Collective."""
        begin("comparing what the ranks compute")
        mine = likeness(socket.gethostname(), self._audited.device, self._audited.dtype, self._audited.kernel)
        self._ranks = gather_objects(mine)
        self._assigned = assign(self._ranks)

    @contextmanager
    def watching(self, step: int, *, update: bool) -> Iterator[None]:
        """Copy a call from the step's forward and backward, or from its ``update``, if that part is audited."""
        kind = self.kind_of(step)
        if kind is None or update != (kind == "update"):
            yield
            return
        chance = self._chance(step, self._rank)
        if kind == "update":
            assert self._audited.optimizer is not None
            with UpdateCapture(self._audited.optimizer, chance, self._limit) as captured:
                yield
            self._samples = self._named(captured)
            return
        operators = operators_of(kind, self._audited.device.type)
        # Free samples that an interrupted step may have left, before new ones are made.
        self._samples = []
        options = {"count": CALLS, "limit_bytes": self._limit // CALLS}
        with Capture(kind, operators, chance, name_of=self._weight_at, **options) as capture:
            yield
        self._samples = capture.samples

    def settle(self, step: int, *, update: bool) -> list[Finding]:
        """Have other ranks repeat this part's calls, and return mismatches; equal on every rank. Collective."""
        kind = self.kind_of(step)
        if kind is None or update != (kind == "update"):
            return []
        begin("auditing")
        # Lazily: a run shorter than its first audit pays no cost.
        if not self._assigned:
            self.prepare()
        # Free at the latest here: the optimizer needs the memory.
        samples, self._samples = self._samples, []
        arrived = exchange(samples, self._assigned, self._rank)
        cases = [self._case(number, sample) for number, sample in enumerate(samples)]
        answers = [
            self._answer(victim, number, sample)
            for victim, of_victim in arrived.items()
            for number, sample in of_victim.items()
        ]
        differs = any(x.own is not None for x in cases) or any(x.difference is not None for x in answers)
        # One flag for all ranks: details are gathered only after a mismatch.
        if not any_rank(differs):
            return []
        return _findings(gather_objects((cases, answers)))

    def _case(self, number: int, sample: Sample) -> Case:
        own, second = sample.own, ""
        if not sample.is_alone:
            again = compute_again(sample, self._audited.device)
            second = digest(again)
            # A tile was already compared on this rank; keep a difference found then.
            own = own or self._differs(sample, again, is_exact=True)
        if sample.is_tile and sample.own is not None:
            # The full call was wrong, which says nothing about the tile.
            second = ""
        host = self._ranks[self._rank].host
        return Case(rank=self._rank, host=host, number=number, place=sample.place, own=own, second=second)

    def _answer(self, victim: int, number: int, sample: Sample) -> Answer:
        again = compute_again(sample, self._audited.device)
        # Ranks with another machine kind compute other bits: only a difference beyond rounding counts.
        found, seen = self._differs(sample, again, self._assigned[victim].exact), ""
        if self._assigned[victim].exact:
            seen = digest(again)
        host = self._ranks[self._rank].host
        return Answer(rank=self._rank, host=host, of=victim, number=number, digest=seen, difference=found)

    def _differs(self, sample: Sample, again: list[Tensor], is_exact: bool) -> Difference | None:
        """Compare the step's result with another one, bitwise or beyond rounding."""
        # A part of an update has the full one's bits only if AdamW treats all values the same.
        if sample.op == UPDATE:
            is_exact = is_exact and all(x.updates for x in self._ranks)
        if is_exact:
            return difference(list(sample.outputs), again)
        return self._beyond_rounding(sample, again)

    def _beyond_rounding(self, sample: Sample, again: list[Tensor]) -> Difference | None:
        """Compare beyond rounding with a result from another machine kind; return None if it is within the bound."""
        inputs = [x.laid_out(self._audited.device) for x in sample.inputs]
        if sample.op == UPDATE:
            earlier = (inputs[0], inputs[2], inputs[3])
            triples = zip(earlier, sample.outputs, again, strict=True)
            found = (outside_update(before, x.to(before.device), y) for before, x, y in triples)
            return next(filter(None, found), None)
        shape = (inputs[0].shape[0], inputs[1].shape[1])
        used = sample.outputs[0].to(again[0].device)
        return outside(inputs[0], inputs[1], used.view(shape), again[0].view(shape))

    def _chance(self, step: int, rank: int) -> Random:
        """Return a generator seeded by these values only; rank −1 is for choices that all ranks share."""
        words = f"{self._seed} {step} {rank}".encode()
        return Random(int.from_bytes(blake2b(words, digest_size=8).digest(), "big"))

    def _weight_at(self, address: int) -> str:
        return _name_at(address, self._audited.weights())

    def _named(self, update: UpdateCapture) -> list[Sample]:
        """Return the update's sample, named by the weight in its range; empty if the step was skipped."""
        sample, master = update.sample, update.master
        if sample is None or master is None:
            return []
        address = master.data_ptr() + update.start * master.element_size()
        place = sample.place._replace(weight=_name_at(address, self._audited.masters()))
        return [replace(sample, place=place)]


def _findings(of_ranks: Sequence[tuple[list[Case], list[Answer]]]) -> list[Finding]:
    found = []
    answers = [answer for _, from_rank in of_ranks for answer in from_rank]
    for cases, _ in of_ranks:
        for case in cases:
            found.append(judge(case, [x for x in answers if (x.of, x.number) == (case.rank, case.number)]))
    return [finding for finding in found if finding is not None]


def _name_at(address: int, named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the name of the tensor that contains the address; empty if there is none."""
    if not address:
        return ""
    for name, x in named:
        start = x.data_ptr()
        if start <= address < start + x.numel() * x.element_size():
            return name
    return ""
