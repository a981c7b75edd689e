"""ContextParallelImageWindows: attention in an image's windows, with the windows spread over ranks.

Every order of patches is cut between groups (a window, or four patches of each token in a window of the next stage),
into as equal parts as possible. A layer with plain windows sends nothing: its tokens already are in window order. A
shifted layer moves queries, keys and values to the shifted windows' ranks in one message, and the output back in
another; only rows that change ranks are sent. Window order is image by image and row by row, so these are the rows next
to a cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from longctx.model.attention.image_windows import ImageWindowCore, LocalImageWindows, Mover, PatchOrder
from parallel.attention.context_parallel_plan import CoreOverRanks
from parallel.layout.sequence import SequenceLayout
from parallel.layout.token_placement import TokenPlacement
from parallel.transport.relayout import Relayout

_LOCAL = LocalImageWindows()


@dataclass(frozen=True)
class ContextParallelImageWindows(CoreOverRanks, ImageWindowCore):
    """Core for window attention over the mesh's context ranks."""

    relayouts: dict[Any, Relayout] = field(default_factory=dict, compare=False, repr=False)
    """Movements between orders; ranks have compared each once."""

    plan = ImageWindowCore.plan
    __call__ = ImageWindowCore.__call__

    def mover(self, source: PatchOrder, target: PatchOrder, placement: Any = None) -> Mover | None:
        if self.mesh.context_group is None:
            return _LOCAL.mover(source, target)
        if source == target:
            return None
        return partial(self._relayout(source, target, placement).move_all, dim=1)

    def local_groups(self, order: PatchOrder) -> range:
        return groups_of_rank(order, self.mesh.context_rank, self.mesh.context)

    def _relayout(self, source: PatchOrder, target: PatchOrder, placement: Any) -> Relayout:
        key = source, target, placement
        if key not in self.relayouts:
            # The way back needs no comparison of its own.
            back = self.relayouts.get((target, source, placement))
            if back is not None:
                self.relayouts[key] = back.inverse
            else:
                before, after = (self._placement(order, placement) for order in (source, target))
                self.relayouts[key] = Relayout.build(before, after, self.mesh)
        return self.relayouts[key]

    def _placement(self, order: PatchOrder, placement: Any) -> TokenPlacement:
        if order.kind == "reading":
            num_tokens = order.images * order.tokens_per_image
            layout = placement or SequenceLayout.build(
                self.layout, num_tokens, self.mesh.context, None, self.mesh.ulysses, causal=False
            )
            return TokenPlacement.of_layout(layout)
        tokens, degree = order.indices(), self.mesh.context
        parts = [tokens[rows_of_rank(order, rank, degree)] for rank in range(degree)]
        return TokenPlacement.build(parts, len(tokens))


def groups_of_rank(order: PatchOrder, rank: int, degree: int) -> range:
    """Return one rank's groups out of ``degree``."""
    count = order.images * order.tokens_per_image // order.group
    return range(rank * count // degree, (rank + 1) * count // degree)


def rows_of_rank(order: PatchOrder, rank: int, degree: int) -> slice:
    """Return where one rank's tokens are in an order."""
    groups = groups_of_rank(order, rank, degree)
    return slice(groups.start * order.group, groups.stop * order.group)
