"""``Auditor``: draws a call of a step, has other ranks make it again, and says who was wrong.

    all ranks           draw alike: products, attention, or the update
    each rank           copies one call of its own, of those that it makes in the step anyway
    each rank           sends it to two others, makes its own again, and the two that came from others
    all ranks           hear whether any two results differ

Every rank is audited in the same step: the others would wait for one that is audited alone.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random

import torch
from torch import Tensor

from parallel.audit.adamw import UpdateCapture
from parallel.audit.again import compute_again
from parallel.audit.alike import Assigned, Likeness, assign, likeness
from parallel.audit.bits import Difference, difference, digest
from parallel.audit.bound import outside, outside_update
from parallel.audit.capture import Capture, operators_of
from parallel.audit.exchange import exchange
from parallel.audit.sample import UPDATE, Kind, Sample
from parallel.audit.verdict import Answer, Case, Finding, judge
from parallel.runtime.process import any_rank, gather_objects
from parallel.runtime.watch.spans import begin

LIMIT_BYTES = 64 << 20
"""Most bytes that a rank copies of a call, inputs and outputs together."""

_SHARES: dict[Kind, int] = {"product": 6, "attention": 2, "update": 2}
"""Audited steps of ten that look at each."""

Named = Callable[[], Iterable[tuple[str, Tensor]]]
"""Tensors and their names, as they are now."""


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What an auditor looks at."""

    device: torch.device
    dtype: torch.dtype
    kernel: str
    """Of attention, as the config names it."""
    weights: Named
    """What products read."""
    masters: Named
    """What the optimiser updates."""
    optimizer: torch.optim.Optimizer | None
    """None where its updates cannot be computed again."""


class Auditor:
    """Audits the steps of a run. Every rank has one and calls it alike."""

    def __init__(self, audited: Audited, *, seed: int, every: int, rank: int, limit_bytes: int = LIMIT_BYTES) -> None:
        """``every`` so many steps one is audited; 0 never."""
        self._audited, self._seed, self._every, self._rank = audited, seed, every, rank
        self._limit = limit_bytes
        self._assigned: list[Assigned] = []
        self._ranks: list[Likeness] = []
        self._sample: Sample | None = None

    def kind_of(self, step: int) -> Kind | None:
        """What is looked at in a step; None in one that is not audited."""
        if not self._every or step % self._every:
            return None
        kinds: list[Kind] = [kind for kind in _SHARES if kind != "update" or self._audited.optimizer is not None]
        return self._chance(step, -1).choices(kinds, [_SHARES[kind] for kind in kinds])[0]

    @property
    def ranks(self) -> list[Likeness]:
        """What the ranks said of themselves; empty before the first audit."""
        return self._ranks

    @property
    def assigned(self) -> list[Assigned]:
        """Who audits whom; empty before the first audit."""
        return self._assigned

    def prepare(self) -> None:
        """Compare the ranks, before the first audit. Collective."""
        begin("comparing what the ranks compute")
        mine = likeness(socket.gethostname(), self._audited.device, self._audited.dtype, self._audited.kernel)
        self._ranks = gather_objects(mine)
        self._assigned = assign(self._ranks)

    @contextmanager
    def watching(self, step: int, *, update: bool) -> Iterator[None]:
        """Copy a call of the step's forward and backward passes, or of its ``update``, if it is the audited part."""
        kind = self.kind_of(step)
        if kind is None or update != (kind == "update"):
            yield
            return
        chance = self._chance(step, self._rank)
        if kind == "update":
            assert self._audited.optimizer is not None
            with UpdateCapture(self._audited.optimizer, chance, self._limit) as captured:
                yield
            self._sample = self._named(captured)
            return
        operators = operators_of(kind, self._audited.device.type)
        # Freed before the next one is made: a step that was broken off may have left it.
        self._sample = None
        with Capture(kind, operators, chance, limit_bytes=self._limit, name_of=self._weight_at) as capture:
            yield
        self._sample = capture.sample

    def settle(self, step: int, *, update: bool) -> list[Finding]:
        """Have this part's call made again, and say what was wrong; the same on every rank. Collective."""
        kind = self.kind_of(step)
        if kind is None or update != (kind == "update"):
            return []
        begin("auditing")
        if not self._assigned:
            self.prepare()
        sample, self._sample = self._sample, None
        arrived = exchange(sample, self._assigned, self._rank)
        case = self._case(sample)
        answers = [self._answer(victim, of_victim) for victim, of_victim in arrived.items()]
        differs = (case is not None and case.own is not None) or any(x.difference is not None for x in answers)
        # A single number for all: what was found travels only where there is something.
        if not any_rank(differs):
            return []
        cases, all_answers = [], []
        for of_rank, from_rank in gather_objects((case, answers)):
            all_answers += from_rank
            if of_rank is not None:
                cases.append(of_rank)
        findings = [judge(one, [x for x in all_answers if x.of == one.rank]) for one in cases]
        return [finding for finding in findings if finding is not None]

    def _case(self, sample: Sample | None) -> Case | None:
        """This rank's own second try."""
        if sample is None:
            return None
        own, second = sample.own, ""
        if not sample.is_alone:
            again = compute_again(sample, self._audited.device)
            second = digest(again)
            # Of a tile the rank has two results by itself; one that is found wrong already stays so.
            own = own or difference(list(sample.outputs), again)
        if sample.is_tile and sample.own is not None:
            # The whole call was wrong, which says nothing of the tile.
            second = ""
        return Case(rank=self._rank, host=self._ranks[self._rank].host, place=sample.place, own=own, second=second)

    def _answer(self, victim: int, sample: Sample) -> Answer:
        again = compute_again(sample, self._audited.device)
        if self._assigned[victim].exact:
            found, seen = difference(list(sample.outputs), again), digest(again)
        else:
            # Ranks of another kind have other bits, right or wrong: what counts is whether they differ by too much.
            found, seen = self._beyond_rounding(sample, again), ""
        return Answer(rank=self._rank, host=self._ranks[self._rank].host, of=victim, digest=seen, difference=found)

    def _beyond_rounding(self, sample: Sample, again: list[Tensor]) -> Difference | None:
        """How a result differs from that of a rank of another kind; None of what has no bound."""
        inputs = [x.laid_out(self._audited.device) for x in sample.inputs]
        if sample.op == UPDATE:
            befores = (inputs[0], inputs[2], inputs[3])
            triples = zip(befores, sample.outputs, again, strict=True)
            found = (outside_update(before, x.to(before.device), y) for before, x, y in triples)
            return next(filter(None, found), None)
        shape = (inputs[0].shape[0], inputs[1].shape[1])
        used = sample.outputs[0].to(again[0].device)
        return outside(inputs[0], inputs[1], used.view(shape), again[0].view(shape))

    def _chance(self, step: int, rank: int) -> Random:
        """Draws that depend on these alone; rank −1 is what all ranks draw alike."""
        words = f"{self._seed} {step} {rank}".encode()
        return Random(int.from_bytes(blake2b(words, digest_size=8).digest(), "big"))

    def _weight_at(self, address: int) -> str:
        return _name_at(address, self._audited.weights())

    def _named(self, update: UpdateCapture) -> Sample | None:
        """The update's sample with the weights' name, where the range lies in one."""
        sample, master = update.sample, update.master
        if sample is None or master is None:
            return None
        address = master.data_ptr() + update.start * master.element_size()
        place = sample.place._replace(weight=_name_at(address, self._audited.masters()))
        return replace(sample, place=place)


def _name_at(address: int, named: Iterable[tuple[str, Tensor]]) -> str:
    """The tensor that has this address in its memory; empty where none has."""
    if not address:
        return ""
    for name, x in named:
        start = x.data_ptr()
        if start <= address < start + x.numel() * x.element_size():
            return name
    return ""
