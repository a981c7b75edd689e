"""JoinSegments: join the segments of documents under the gated delta rule over ranks, in one all-gather per pass.

A segment maps the state that enters it to the one that leaves it, S ↦ M·S + U (``longctx/kernels/gated_delta/rule``).
Each rank sends the pairs (U, M) of its segments that others continue, and composes those of a document's earlier
segments in the order of the sequence, regardless of their ranks: states are bitwise reproducible. Their size does not
depend on the sequence's length. In backward each rank sends (U′, Mᵀ) and composes those of later segments.

Before that, the last tokens of those segments are sent in the same way, for the convolution of the next segments.

Axes: B batch, H value heads, D key head size, V value head size, R tokens that the convolution reads, K key heads, C
their channels, s segments, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from longctx.kernels.gated_delta.call import Carried
from parallel.attention.gather_states import start_gather
from parallel.mesh import Mesh
from parallel.runtime.spans import DOING
from parallel.schedule.states import Open, StatePlan


@dataclass(frozen=True)
class JoinSegments:
    """Exchange among a context group (``longctx.kernels.gated_delta.call.SegmentExchange``)."""

    mesh: Mesh
    plan: StatePlan
    carried: Carried | None = None
    """What precedes the first token of all, of one document."""
    layer: int = field(default_factory=lambda: DOING.layer)
    """Layer that made the exchange, for messages about its collectives: backward does not say."""
    unread: list[Callable[[], Tensor]] = field(default_factory=list)
    """Gatherings under way of which nothing is for this rank."""

    def states(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        """Start to gather U and M of segments that give; the result computes the states that enter those that take."""
        arriving = self._gather(pairs_sBHDW, self.plan.given)
        if not self._taken:
            return self._leave(arriving, _states_of(pairs_sBHDW))
        return lambda: self._compose(arriving(), self.plan.given, self._taken, sign=1)

    def states_back(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        """Start to gather U′ and Mᵀ of segments that took; the result computes the gradients of given states."""
        arriving = self._gather(pairs_sBHDW, self.plan.taken)
        if not self._given:
            return self._leave(arriving, _states_of(pairs_sBHDW))
        return lambda: self._compose(arriving(), self.plan.taken, self._given, sign=-1)

    def rows(self, tails_sBRKC: Tensor) -> Callable[[], Tensor]:
        """Start to gather the last tokens of the segments that give; the result has those before each that takes."""
        arriving = self._gather(tails_sBRKC, self.plan.given)
        if not self._taken:
            return self._leave(arriving, tails_sBRKC)

        def finish() -> Tensor:
            by_rank = arriving()
            before = by_rank.new_zeros(len(self._taken), *by_rank.shape[2:])
            reach = before.shape[2]
            for entry, x in zip(before, self._taken, strict=True):
                missing = reach
                for source, count, between in self.plan.rows_before(x, reach):
                    missing = reach - between - count
                    entry[:, missing : missing + count] = by_rank[source.rank, source.slot][:, reach - count :]
                if self.carried is not None and missing:
                    entry[:, :missing] = self.carried.before_sBRKC[0, :, reach - missing :]
            return before

        return finish

    def rows_back(self, dbefore_sBRKC: Tensor) -> Callable[[], Tensor]:
        """Start to gather the gradients of rows that segments took; the result has those of the tails given here."""
        arriving = self._gather(dbefore_sBRKC, self.plan.taken)
        if not self._given:
            return self._leave(arriving, dbefore_sBRKC)

        def finish() -> Tensor:
            by_rank = arriving()
            dtails = by_rank.new_zeros(len(self._given), *by_rank.shape[2:])
            reach = dtails.shape[2]
            for rank, taken in enumerate(self.plan.taken):
                for slot, x in enumerate(taken):
                    for source, count, between in self.plan.rows_before(x, reach):
                        if source.rank == self.mesh.context_rank:
                            rows = slice(reach - between - count, reach - between)
                            dtails[source.slot][:, reach - count :] += by_rank[rank, slot][:, rows]
            return dtails

        return finish

    def settle(self) -> None:
        """Wait for the gathers that this rank does not read; until then all other ranks may be far behind."""
        while self.unread:
            self.unread.pop(0)()

    def _leave(self, arriving: Callable[[], Tensor], like_s: Tensor) -> Callable[[], Tensor]:
        """Return an empty result at once: this rank wants nothing, so it need not wait for others to compute."""
        self.unread.append(arriving)
        return lambda: like_s[:0]

    def _compose(
        self, pairs_PsBHDW: Tensor, sent: Sequence[Sequence[Open]], wanted: Sequence[Open], *, sign: int
    ) -> Tensor:
        """Return the states that reach segments through the maps of earlier ones of their document (later, if -1)."""
        D = pairs_PsBHDW.shape[-2]
        V = pairs_PsBHDW.shape[-1] - D
        results = pairs_PsBHDW.new_zeros(len(wanted), *pairs_PsBHDW.shape[2:-1], V)
        for document in {x.document for x in wanted}:
            sources = self.plan.sources(document, sent)[::sign]
            state = results.new_zeros(results.shape[1:])
            if self.carried is not None:
                state = self.carried.states_sBHDV[0]
            passed = 0
            own = [n for n, x in enumerate(wanted) if x.document == document]
            for n in sorted(own, key=lambda n: sign * wanted[n].start):
                # Each map is applied once, so the work is linear in the number of segments.
                while passed < len(sources) and sign * sources[passed].start < sign * wanted[n].start:
                    pair = pairs_PsBHDW[sources[passed].rank, sources[passed].slot]
                    state = pair[..., V:] @ state + pair[..., :V]
                    passed += 1
                results[n] = state
        return results

    @property
    def _given(self) -> tuple[Open, ...]:
        return self.plan.given[self.mesh.context_rank]

    @property
    def _taken(self) -> tuple[Open, ...]:
        return self.plan.taken[self.mesh.context_rank]

    def _gather(self, mine_s: Tensor, sent: Sequence[Sequence[Open]]) -> Callable[[], Tensor]:
        return start_gather(self.mesh, mine_s, sent, doing="joining segments of the gated delta rule", layer=self.layer)


def _states_of(pairs_sBHDW: Tensor) -> Tensor:
    """Return the columns of states in pairs of states and maps."""
    D = pairs_sBHDW.shape[-2]
    return pairs_sBHDW[..., : pairs_sBHDW.shape[-1] - D]
