"""Who carries out the parts of a build: an engine, and what it is given for a whole build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from data_pipeline.prepare.duplicates.outcome import PartDecision
from data_pipeline.prepare.parts.deal import Part
from data_pipeline.prepare.parts.order import Order
from data_pipeline.prepare.parts.staging import Staging
from data_pipeline.prepare.parts.work import Advance, Job
from longctx.tokenizer.contract import Tokenizer

OnPart = Callable[[Part, Any], None]
"""A function that takes a part that is done and its record."""


class Engine(Protocol):
    """Workers: processes of this machine, or of a cluster."""

    def carry_out(self, orders: Sequence[Order], crew: Crew, *, advance: Advance, finished: OnPart) -> None:
        """Carry out all orders, in any sequence; each is done when its folder holds its record.

        The first failure of any of them is raised, once nobody works any more. DataError as the part's own;
        ClusterError where the system has taken a worker away and the engine has no other.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Crew:
    """An engine, and what all orders of a build have in common."""

    engine: Engine
    staging: Staging
    job: Job
    tokenizer: Tokenizer
    workers: int | None = None
    """How many work at once; None for as many as the engine has."""

    def encode(
        self,
        parts: Sequence[Part],
        *,
        advance: Advance,
        finished: OnPart,
        decisions: Mapping[int, PartDecision] | None = None,
    ) -> None:
        """Encode ``parts`` into the staging folder.

        ``advance`` is told the sums over all parts in work; ``finished`` each part that is done and its
        ``PartRecord``. ``decisions`` say for each part which documents stay.
        """
        decisions = decisions or {}
        orders = [
            Order(part=part, folder=self.staging.part_folder(part.number), decision=decisions.get(part.number))
            for part in parts
        ]
        self.engine.carry_out(orders, self, advance=advance, finished=finished)

    def sign(self, parts: Sequence[Part], *, advance: Advance, finished: OnPart) -> None:
        """Sign ``parts`` as ``encode`` encodes them; ``finished`` gets their ``SignedRecord``."""
        orders = [Order(part=part, folder=self.staging.signatures_folder(part.number), signs=True) for part in parts]
        self.engine.carry_out(orders, self, advance=advance, finished=finished)
