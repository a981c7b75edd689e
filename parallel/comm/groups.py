"""Process groups: all of them are created here, with the run's time-out, and are warmed when they are created.

**Time-out.** Every group has that of the world group, which is ``run.timeout_seconds``. A group that is created without
one gets torch's default of 10 or 30 minutes.

**Warm.** The first collective of a group is a tiny sum that all its ranks enter together. NCCL creates its communicator
in the first call, and its behaviour is undefined if that is a batch of sends that ranks enter at different hops.

**Control.** One more group of all ranks, for CPU tensors, has a time-out of a day: a rank waits there for another one
that hashes, converts, saves or evaluates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, lru_cache
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

T = TypeVar("T")


@dataclass(frozen=True)
class Members:
    """Ranks of a group, including this one."""

    ranks: tuple[int, ...]
    """Their numbers in the world, in the order of the group."""
    own: int
    """This rank's place in that order."""

    @cached_property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(self.of_others(self.ranks))

    def of_others(self, parts: Sequence[T]) -> list[T]:
        """Return the parts of the other ranks, out of the parts of all."""
        return [part for place, part in enumerate(parts) if place != self.own]


PATIENCE = timedelta(hours=24)
"""How long ranks wait for one that works on disk, or has more to do. A rank that dies ends the wait at once."""


@dataclass(frozen=True)
class _Control:
    """Control group, and the world that it belongs to."""

    world: ProcessGroup
    group: ProcessGroup


# Global, as torch's own world group is: there is one per process.
_control: _Control | None = None


@lru_cache(maxsize=64)
def members(group: ProcessGroup) -> Members:
    """Return the ranks of a group that this rank is in."""
    return Members(tuple(dist.get_process_group_ranks(group)), dist.get_rank(group))


def control_group() -> ProcessGroup:
    """Return the group of all ranks for CPU tensors, in which a rank may be hours late. Collective if it is created."""
    global _control
    world = world_group()
    if _control is None or _control.world is not world:
        group = make_group(range(world.size()), backend="gloo")
        # Only now: the creation must not wait that long for ranks that do not come.
        distributed_c10d._set_pg_timeout(PATIENCE, group)
        _control = _Control(world, group)
    return _control.group


def own_group(parts: Sequence[Sequence[int]], *, backend: str | None = None) -> ProcessGroup | None:
    """Return this rank's group among ``parts``, which cover all ranks; None if it would be alone. Collective.

    The group is for tensors of the run's device unless ``backend`` says otherwise.
    """
    if len(parts[0]) == 1:
        return None
    rank = dist.get_rank()
    return make_group(next(ranks for ranks in parts if rank in ranks), backend=backend)


def make_group(ranks: Sequence[int], *, backend: str | None = None) -> ProcessGroup:
    """Create a warm group of these ranks. Exactly these ranks call it, and all create their groups in one order."""
    # By torch's default every rank calls for every group of the world. Here a rank calls only for its own. torch names
    # such a group by its ranks and by the number of the caller's groups: each axis of a mesh gives every rank one.
    group = dist.new_group(
        list(ranks),
        timeout=world_timeout(),
        backend=backend or device_backend(),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    group = cast(ProcessGroup, group)
    warm(group)
    return group


def warm(group: ProcessGroup) -> None:
    """Run a first collective, which all ranks of the group enter. Collective."""
    device = torch.device("cpu")
    if "cuda:nccl" in str(dist.get_backend_config(group)):
        device = torch.device("cuda", torch.cuda.current_device())
    dist.all_reduce(torch.zeros(1, device=device), group=group)


@contextmanager
def groups_of_library() -> Iterator[None]:
    """Give the groups that a library creates within the block the run's time-out, and warm them. Collective."""
    before = set(distributed_c10d._world.pg_map)
    yield
    # In the order in which they were created, which is the same on all ranks of a group.
    for group in list(distributed_c10d._world.pg_map):
        if group not in before:
            distributed_c10d._set_pg_timeout(world_timeout(), group)
            warm(group)


def world_timeout() -> timedelta:
    """Return the time-out of collectives of the world group."""
    # torch has no function for it; every world group of a run has gloo for CPU tensors.
    options = world_group()._get_backend(torch.device("cpu")).options
    if options is None:
        # torch's fake groups, with which a step is traced, never wait.
        return distributed_c10d.default_pg_timeout
    return options._timeout


def device_backend() -> str:
    """Return the backend for tensors of the run's device: NCCL if the world has it, else gloo."""
    # NCCL only: comparisons on the CPU have their own groups, and gloo opens a connection to every member.
    if "cuda:nccl" in str(dist.get_backend_config()):
        return "nccl"
    return "gloo"


def forget_groups() -> None:
    """Forget the control group and the members of all groups, once torch has destroyed them."""
    global _control
    _control = None
    members.cache_clear()


def world_group() -> ProcessGroup:
    """Return the group of all ranks."""
    return cast(ProcessGroup, dist.group.WORLD)
