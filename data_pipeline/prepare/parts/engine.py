"""Who carries out the parts of a build: an engine, and what it is given for a whole build."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from data_pipeline.prepare.parts.deal import Part
from data_pipeline.prepare.parts.order import Order
from data_pipeline.prepare.parts.staging import Staging
from data_pipeline.prepare.parts.work import Advance, Advanced, Job
from longctx.tokenizer.contract import Tokenizer

OnPart = Callable[[Part, Any], None]
"""A function that takes a part that is done and its record."""


class Engine(Protocol):
    """Workers: processes of this machine, or of a cluster."""

    def carry_out(self, orders: Sequence[Order], crew: Crew, *, advance: Advance, finished: OnPart) -> None:
        """Carry out all orders, in any sequence; each is done when its folder holds its record.

        ``advance`` is told the sums over the parts in work. The first failure of any of them is raised, once nobody
        works any more. DataError as the part's own; ClusterError where the system has taken a worker away and the
        engine has no other.
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

    def carry_out(self, orders: Sequence[Order], records: dict[int, Any], *, advance: Advance) -> None:
        """Carry out the orders of parts that ``records`` lacks, and put theirs there, by the parts' numbers.

        ``advance`` is told the sums over all parts, those with a record included.
        """
        parts = [order.part for order in orders if order.part.number in records]
        done = sum((_whole(part, records[part.number]) for part in parts), Advanced())

        def finished(part: Part, record: Any) -> None:
            nonlocal done
            records[part.number] = record
            done += _whole(part, record)

        # Where the display begins: the rate is that of this build alone.
        if parts:
            advance(done)
        rest = [order for order in orders if order.part.number not in records]
        self.engine.carry_out(rest, self, advance=lambda of_work: advance(done + of_work), finished=finished)


def _whole(part: Part, record: Any) -> Advanced:
    """Return what a part is that is done."""
    return Advanced(record.documents, record.text_bytes, part.size)
