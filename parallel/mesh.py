"""``Mesh``: the ranks on named axes, and one process group per axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from longctx.errors import ConfigError
from parallel.comm.communicator import Communicator
from parallel.comm.messages.ledger import Ledger
from parallel.comm.process_groups import ProcessGroup, device_backend, own_group
from parallel.comm.world import num_ranks, own_rank
from parallel.runtime.launched import ranks_of_machine


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks arranged as data × ring × ulysses: rank = (data_rank · ring_degree + ring_rank) · ulysses + ulysses_rank.

    Ranks in a context group (ring × ulysses) are neighbours and share a node if possible; ranks that exchange heads are
    closest. The expert axis is independent: every ``expert`` neighbouring ranks divide the experts, whichever shard of
    whichever sequence they hold.
    """

    rank: int
    world_size: int
    context: int
    """Ranks that share one sequence."""
    ulysses: int = 1
    """Ranks within ``context`` that share rows and split heads; the rest is the ring."""
    expert: int = 1
    """Neighbouring ranks that divide each layer's experts."""
    ranks_per_node: int = 1
    """Ranks on one machine."""
    context_group: ProcessGroup | None = None
    """Ranks that share this rank's sequence; None if it is not sharded."""
    ring_group: ProcessGroup | None = None
    """Ranks in ``context_group`` with this rank's heads; None if the ring degree is 1."""
    between_nodes_group: ProcessGroup | None = None
    """A second communicator over the ring for traffic between nodes, so that traffic inside a node does not queue
    behind it. None unless a ring spans nodes and has several ranks on each."""
    ulysses_group: ProcessGroup | None = None
    """Ranks that hold the same rows; None if heads are not split."""
    expert_group: ProcessGroup | None = None
    """Ranks that together hold all experts; None if every rank holds all."""
    control_group: ProcessGroup | None = None
    """The context group for CPU tensors: ranks compare their inputs on it before they send the first byte."""
    comm: Communicator = field(default_factory=Communicator, compare=False, repr=False)
    """Collectives and point-to-point operations on these axes."""

    @classmethod
    def build(
        cls,
        *,
        context: int = 1,
        ulysses: int = 1,
        expert: int = 1,
        ranks_per_node: int | None = None,
        check_rows: bool = False,
    ) -> Mesh:
        """Build the mesh for the initialized process group (or for a single process). Collective.

        All ranks pass the same arguments. ``ranks_per_node`` defaults to the launcher's value. With ``check_rows`` the
        communicator keeps a ledger, which ranks compare once per step. Raise ConfigError if the degrees do not divide
        the world size.
        """
        rank, world_size = own_rank(), num_ranks()
        check_degrees(world_size, context=context, ulysses=ulysses, expert=expert)
        # One axis at a time, in the same order on all ranks: creating a group blocks until its other members join.
        spans = [range(first, first + context) for first in range(0, world_size, context)]
        context_group = own_group(spans)
        ring_group, ulysses_group = context_group, None
        rings = [span[n::ulysses] for span in spans for n in range(ulysses)]
        if ulysses > 1:
            # Neighbours exchange heads because that all-to-all is exposed; ring hops overlap with compute and tolerate
            # distance.
            neighbors = [span[n : n + ulysses] for span in spans for n in range(0, context, ulysses)]
            ulysses_group = own_group(neighbors)
            ring_group = own_group(rings)
        experts = [range(first, first + expert) for first in range(0, world_size, expert)]
        expert_group = own_group(experts)
        control_group = context_group
        if context_group is not None and device_backend() != "gloo":
            control_group = own_group(spans, backend="gloo")  # the compared tensors are on the CPU
        in_node = ranks_per_node or ranks_of_machine() or world_size
        between_nodes_group = None
        # If one ring needs it, all rings create it: torch names a group by its ranks and by how many groups the caller
        # has created, so these counts must match on all ranks.
        if any(1 < _ranks_in_node(ring, in_node) < len(ring) for ring in rings):
            between_nodes_group = own_group(rings)
        ledger = None
        if check_rows and world_size > 1:
            ledger = Ledger(rank)
        return cls(
            rank=rank,
            world_size=world_size,
            context=context,
            ulysses=ulysses,
            expert=expert,
            ranks_per_node=in_node,
            context_group=context_group,
            ring_group=ring_group,
            between_nodes_group=between_nodes_group,
            ulysses_group=ulysses_group,
            expert_group=expert_group,
            control_group=control_group,
            comm=Communicator(ledger),
        )

    @property
    def data(self) -> int:
        """Data degree: number of different sequences processed at once."""
        return self.world_size // self.context

    @property
    def data_rank(self) -> int:
        """Index of this rank's sequence among the ``data`` concurrent ones."""
        return self.rank // self.context

    @property
    def context_rank(self) -> int:
        """Index of this rank's shard in its sequence."""
        return self.rank % self.context

    @property
    def ring_degree(self) -> int:
        """Number of ring ranks; each holds different rows."""
        return self.context // self.ulysses

    @property
    def ring_rank(self) -> int:
        """This rank's position in its ring."""
        return self.context_rank // self.ulysses

    @property
    def ulysses_rank(self) -> int:
        """Index of this rank's head shard."""
        return self.context_rank % self.ulysses

    @property
    def expert_rank(self) -> int:
        """Index of this rank's expert shard."""
        return self.rank % self.expert

    def ring_peer(self, ring_rank: int) -> int:
        """Return the global rank at position ``ring_rank`` in this rank's ring."""
        return self.rank + (ring_rank - self.ring_rank) * self.ulysses

    def context_peer(self, context_rank: int) -> int:
        """Return the global rank at position ``context_rank`` in this rank's context group."""
        return self.rank - self.context_rank + context_rank

    @property
    def ring_ranks_in_node(self) -> int:
        """Number of neighbouring ring ranks per node; 1 if nodes hold different numbers."""
        return _ranks_in_node([self.ring_peer(index) for index in range(self.ring_degree)], self.ranks_per_node)

    def describe(self) -> str:
        """Return a one-line summary for the log."""
        line = f"{self.world_size} ranks = data {self.data} × context {self.context}"
        if self.ulysses > 1:
            line += f" (ring {self.ring_degree} × ulysses {self.ulysses})"
        if self.expert > 1:
            line += f", experts over {self.expert}"
        return line


def _ranks_in_node(ring: Sequence[int], ranks_per_node: int) -> int:
    """Return how many ranks the ring has on each node; 1 if nodes differ."""
    # Two-level transport pairs ranks with the same local index across nodes. If nodes hold different numbers, some
    # ranks have no counterpart, so the ring keeps one level.
    counts = set(Counter(rank // ranks_per_node for rank in ring).values())
    if len(counts) > 1:
        return 1
    return counts.pop()


def closest_value(value: int, fits: Sequence[int]) -> int:
    """Return the element in ``fits`` closest to the value; the smaller one in a tie."""
    return min(fits, key=lambda n: (abs(n - value), n))


def check_degrees(
    world_size: int,
    *,
    context: int,
    ulysses: int = 1,
    expert: int = 1,
    valid: Callable[[str, list[int]], list[int]] = lambda name, degrees: degrees,
) -> None:
    """Raise ConfigError unless the axes fit the world size.

    The message suggests only degrees that ``valid(name, degrees)`` returns, so that no other check rejects them.
    """
    for name, degree in (("context", context), ("ulysses", ulysses), ("expert", expert)):
        if degree < 1:
            raise ConfigError(f"parallel.{name}={degree} must be at least 1.")
    for name, degree in (("context", context), ("expert", expert)):
        if world_size % degree:
            divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
            fits = valid(name, divisors)
            raise ConfigError(
                f"parallel.{name}={degree} does not divide the {world_size} {'rank' if world_size == 1 else 'ranks'}.\n"
                f"Try parallel.{name}={closest_value(degree, fits)} (any of {fits}), or a multiple of "
                f"{degree} ranks: on one "
                f"machine, longctx train --ranks {degree}."
            )
    if context % ulysses:
        fits = [n for n in range(1, context + 1) if context % n == 0]
        raise ConfigError(
            f"parallel.ulysses={ulysses} does not divide parallel.context={context}, the number of ranks that "
            f"share a sequence.\nTry one of {fits}."
        )
