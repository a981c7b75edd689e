"""JoinSegments: connect document segments across ranks under the gated delta rule, with one all-gather per pass.

A segment maps its initial state to its final state, S ↦ M·S + U (``longctx/kernels/gated_delta/rule``). Each rank sends
the pairs (U, M) for its segments that continue elsewhere, and composes the pairs of a document's earlier segments in
sequence order, whichever rank sent them: states are bitwise reproducible. Their size is independent of the sequence
length. In backward each rank sends (U′, Mᵀ) and composes later segments.

Before that, these segments' last tokens are gathered in the same way, for the next segments' convolution.

Axes: B batch, H value heads, D key head size, V value head size, R tokens that the convolution reads, K key heads, C
channels per key head, s segments, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from longctx.kernels.gated_delta.gated_delta_call import InitialStates
from parallel.attention.gather_states import start_gather
from parallel.mesh import Mesh
from parallel.runtime.activity import ACTIVITY
from parallel.schedule.states import SplitSegment, StatePlan


@dataclass(frozen=True)
class JoinSegments:
    """Exchange within a context group (``longctx.kernels.gated_delta.gated_delta_call.SegmentExchange``)."""

    mesh: Mesh
    plan: StatePlan
    initial: InitialStates | None = None
    """State and tokens before the first token, if the layout has one document."""
    layer: int = field(default_factory=lambda: ACTIVITY.layer)
    """Layer that created the exchange, for messages; stored because backward does not mark layers."""
    pending_gathers: list[Callable[[], Tensor]] = field(default_factory=list)
    """Pending gathers from which this rank needs no result."""

    def states(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        """Start gathering U and M from sending segments; the result computes the receiving segments' initial states."""
        pending = self._gather(pairs_sBHDW, self.plan.given)
        if not self._taken:
            return self._leave(pending, _states_of(pairs_sBHDW))
        return lambda: self._compose(pending(), self.plan.given, self._taken, sign=1)

    def states_back(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        """Start gathering U′ and Mᵀ from receiving segments; the result computes gradients for sent states."""
        pending = self._gather(pairs_sBHDW, self.plan.taken)
        if not self._given:
            return self._leave(pending, _states_of(pairs_sBHDW))
        return lambda: self._compose(pending(), self.plan.taken, self._given, sign=-1)

    def rows(self, tail_sBRKC: Tensor) -> Callable[[], Tensor]:
        """Start gathering the sending segments' last tokens; the result holds those before each receiving segment."""
        # Post the gather even if this rank needs no result: an all-gather requires all ranks.
        pending = self._gather(tail_sBRKC, self.plan.given)
        if not self._taken:
            return self._leave(pending, tail_sBRKC)

        def finish() -> Tensor:
            by_rank = pending()
            before = by_rank.new_zeros(len(self._taken), *by_rank.shape[2:])
            lookback = before.shape[2]
            # Fill from the right: rows_before returns the nearest segment first, and short segments need several
            # sources.
            for entry, x in zip(before, self._taken, strict=True):
                missing = lookback
                for source, count, between in self.plan.rows_before(x, lookback):
                    missing = lookback - between - count
                    entry[:, missing : missing + count] = by_rank[source.rank, source.slot][:, lookback - count :]
                if self.initial is not None and missing:
                    entry[:, :missing] = self.initial.conv_state_sBRKC[0, :, lookback - missing :]
            return before

        return finish

    def rows_back(self, grad_conv_state_sBRKC: Tensor) -> Callable[[], Tensor]:
        """Start gathering gradients for received rows; the result holds those for the tails that this rank sent."""
        pending = self._gather(grad_conv_state_sBRKC, self.plan.taken)
        if not self._given:
            return self._leave(pending, grad_conv_state_sBRKC)

        def finish() -> Tensor:
            by_rank = pending()
            dtails = by_rank.new_zeros(len(self._given), *by_rank.shape[2:])
            lookback = dtails.shape[2]
            # The transpose of `rows`: add each received row's gradient back to the tail that it was copied from.
            for rank, taken in enumerate(self.plan.taken):
                for slot, x in enumerate(taken):
                    for source, count, between in self.plan.rows_before(x, lookback):
                        if source.rank == self.mesh.context_rank:
                            rows = slice(lookback - between - count, lookback - between)
                            dtails[source.slot][:, lookback - count :] += by_rank[rank, slot][:, rows]
            return dtails

        return finish

    def wait_for_gathers(self) -> None:
        """Wait for gathers that this rank does not read; until then, other ranks may lag far behind."""
        while self.pending_gathers:
            self.pending_gathers.pop(0)()

    def _leave(self, pending: Callable[[], Tensor], like_s: Tensor) -> Callable[[], Tensor]:
        """Return an empty result at once: this rank needs no data, so it need not wait for others to compute."""
        self.pending_gathers.append(pending)
        return lambda: like_s[:0]

    # Composition of affine maps. Each map S ↦ M·S + U is applied to the document's running state in sequence order (in
    # reverse for gradients), so after the map of segment i the state equals the one that a single process has at its
    # end.
    def _compose(
        self, pairs_PsBHDW: Tensor, sent: Sequence[Sequence[SplitSegment]], wanted: Sequence[SplitSegment], *, sign: int
    ) -> Tensor:
        """Return the segments' initial states, composed from earlier maps in their document (later ones, if sign is
        -1).
        """
        D = pairs_PsBHDW.shape[-2]
        V = pairs_PsBHDW.shape[-1] - D
        results = pairs_PsBHDW.new_zeros(len(wanted), *pairs_PsBHDW.shape[2:-1], V)
        for document in {x.document for x in wanted}:
            sources = self.plan.sources(document, sent)[::sign]
            state = results.new_zeros(results.shape[1:])
            if self.initial is not None:
                state = self.initial.states_sBHDV[0]
            passed = 0
            own = [n for n, x in enumerate(wanted) if x.document == document]
            for n in sorted(own, key=lambda n: sign * wanted[n].start):
                # Apply each map once, so the work is linear in the number of segments.
                while passed < len(sources) and sign * sources[passed].start < sign * wanted[n].start:
                    pair = pairs_PsBHDW[sources[passed].rank, sources[passed].slot]
                    state = pair[..., V:] @ state + pair[..., :V]
                    passed += 1
                results[n] = state
        return results

    @property
    def _given(self) -> tuple[SplitSegment, ...]:
        return self.plan.given[self.mesh.context_rank]

    @property
    def _taken(self) -> tuple[SplitSegment, ...]:
        return self.plan.taken[self.mesh.context_rank]

    def _gather(self, mine_s: Tensor, sent: Sequence[Sequence[SplitSegment]]) -> Callable[[], Tensor]:
        return start_gather(self.mesh, mine_s, sent, operation="joining gated delta segments", layer=self.layer)


def _states_of(pairs_sBHDW: Tensor) -> Tensor:
    """Return the state columns in pairs of states and maps."""
    D = pairs_sBHDW.shape[-2]
    return pairs_sBHDW[..., : pairs_sBHDW.shape[-1] - D]
