"""Which group of ranks continues which prompt, and the continuations of all groups in the prompts' order.

Groups work for themselves: none waits for another before its own prompts are continued.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from launcher.evaluation.harness.batches import deal_by_cost
from longctx.errors import LongCtxError
from parallel.comm.mailbox import Mailbox
from parallel.comm.world import agree_or_raise
from parallel.mesh import Mesh

_SECONDS_BETWEEN_LOOKS = 0.05
"""How often rank 0 looks for continuations of the other groups when it has none to make."""


class Shares:
    """The prompts of each group of ranks that share prompts, and the way of their continuations to rank 0."""

    def __init__(self, mesh: Mesh, costs: Sequence[int]) -> None:
        """``costs`` are about what the prompts cost."""
        self._mesh, self._num_prompts = mesh, len(costs)
        # Early prompts first: their lines can be written early.
        self.mine = sorted(deal_by_cost(costs, mesh.data)[mesh.data_rank])
        """The prompts of this rank's group."""
        self._found: dict[int, list[int] | None] = {}
        self._upcoming = 0
        """The prompt whose continuation is next in order."""
        self._mailbox: Mailbox | None = None
        if mesh.data > 1:
            self._mailbox = Mailbox("continuations")

    def in_order(self, continued: Iterable[tuple[int, list[int]]]) -> Iterator[tuple[int, list[int]]]:
        """Yield (prompt, new tokens) of all groups on rank 0, each as soon as those before it have ended.

        ``continued`` yields those of this rank's group in any order; other ranks than 0 only work. Collective. A
        LongCtxError of one group is raised on all ranks, when the other groups are done.
        """
        problem, missing = None, set(self.mine)
        try:
            for index, ids in continued:
                missing.discard(index)
                self._hand_in(index, ids)
                yield from self._ready()
        except LongCtxError as error:
            problem = error
        # Rank 0 shall not wait for what never comes.
        for index in missing:
            self._hand_in(index, None)
        while self._mesh.rank == 0 and self._upcoming < self._num_prompts:
            yield from self._ready()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        agree_or_raise(problem)

    def _hand_in(self, index: int, ids: list[int] | None) -> None:
        """Give rank 0 a continuation of this group, or None for one that failed."""
        if self._mesh.rank == 0:
            self._found[index] = ids
        # Every rank of a group has the same; its first one speaks.
        elif self._mesh.context_rank == 0 and self._mailbox is not None:
            self._mailbox.leave(index, ids)

    def _ready(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the continuations that are next in order, as far as they are there."""
        while self._mesh.rank == 0 and self._upcoming < self._num_prompts:
            index = self._upcoming
            if index in self._found:
                ids = self._found.pop(index)
            elif self._mailbox is not None and self._mailbox.has(index):
                ids = self._mailbox.take(index)
            else:
                return
            self._upcoming += 1
            if ids is not None:
                yield index, ids
