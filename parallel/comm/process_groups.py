"""Process groups: all are created here, with the run's timeout, and warmed up on creation.

**Timeout.** Every group inherits the world group's timeout, ``run.timeout_seconds``. Without an explicit timeout, torch
would use its default, 10 or 30 minutes.

**Warm-up.** A group's first collective is a tiny all-reduce that all its ranks enter together. NCCL creates its
communicator in the first call, and the behaviour is undefined if that is a batch of sends that ranks enter at different
hops.

**Control.** An additional group over all ranks, for CPU tensors, has a one-day timeout: there, ranks wait for one that
hashes, converts, saves or evaluates.
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
    """A group's ranks, including this one."""

    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    own: int
    """This rank's index in ``ranks``."""

    @cached_property
    def others(self) -> tuple[int, ...]:
        """All ranks except this one."""
        return tuple(self.of_others(self.ranks))

    def of_others(self, parts: Sequence[T]) -> list[T]:
        """Drop this rank's entry from a sequence with one entry per rank."""
        return [part for index, part in enumerate(parts) if index != self.own]


CONTROL_TIMEOUT = timedelta(hours=24)
"""Timeout while a rank works on disk or has more to do. A rank that dies ends the wait at once."""


@dataclass(frozen=True)
class _Control:
    """Control group, with the world group it belongs to."""

    world: ProcessGroup
    group: ProcessGroup


# Global, like torch's world group: one per process.
_control: _Control | None = None


@lru_cache(maxsize=64)
def members(group: ProcessGroup) -> Members:
    """Return the members of a group that contains this rank."""
    return Members(tuple(dist.get_process_group_ranks(group)), dist.get_rank(group))


def control_group() -> ProcessGroup:
    """Return the group over all ranks for CPU tensors, in which ranks may be hours late. Collective on first use."""
    global _control
    world = world_group()
    if _control is None or _control.world is not world:
        group = make_group(range(world.size()), backend="gloo")
        # Extend the timeout only after creation, which must not wait a day for missing ranks.
        distributed_c10d._set_pg_timeout(CONTROL_TIMEOUT, group)
        _control = _Control(world, group)
    return _control.group


def own_group(parts: Sequence[Sequence[int]], *, backend: str | None = None) -> ProcessGroup | None:
    """Return this rank's group among ``parts``, which cover all ranks; None if it would contain only this rank.
    Collective.

    The group carries tensors on the run's device unless ``backend`` is given.
    """
    if len(parts[0]) == 1:
        return None
    rank = dist.get_rank()
    return make_group(next(ranks for ranks in parts if rank in ranks), backend=backend)


def make_group(ranks: Sequence[int], *, backend: str | None = None) -> ProcessGroup:
    """Create and warm up a group. Exactly its ranks call this; all ranks create their groups in the same order."""
    # By default every rank must call new_group for every group in the world. With local synchronization only members
    # call. torch then names the group by its ranks and by how many groups the caller has created: so each mesh axis
    # must give every rank exactly one group.
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
    """Run the group's first collective. Collective."""
    device = torch.device("cpu")
    if "cuda:nccl" in str(dist.get_backend_config(group)):
        device = torch.device("cuda", torch.cuda.current_device())
    dist.all_reduce(torch.zeros(1, device=device), group=group)


@contextmanager
def groups_of_library() -> Iterator[None]:
    """Set the run's timeout on groups that a library creates in the ``with`` block, and warm them up. Collective."""
    before = set(distributed_c10d._world.pg_map)
    yield
    # Creation order, which is the same on all ranks in a group.
    for group in list(distributed_c10d._world.pg_map):
        if group not in before:
            distributed_c10d._set_pg_timeout(world_timeout(), group)
            warm(group)


def world_timeout() -> timedelta:
    """Return the world group's timeout for collectives."""
    # torch has no public accessor; every world group in a run has gloo for CPU tensors.
    options = world_group()._get_backend(torch.device("cpu")).options
    if options is None:
        # torch's fake groups, used to trace a step, never wait.
        return distributed_c10d.default_pg_timeout
    return options._timeout


def device_backend() -> str:
    """Return the backend for tensors on the run's device: NCCL if the world has it, otherwise gloo."""
    # Not both: CPU comparisons have their own groups, and gloo would open a connection to every member.
    if "cuda:nccl" in str(dist.get_backend_config()):
        return "nccl"
    return "gloo"


def clear_groups() -> None:
    """Clear the control group and all cached members, once torch has destroyed the groups."""
    global _control
    _control = None
    members.cache_clear()


def world_group() -> ProcessGroup:
    """Return the group over all ranks."""
    return cast(ProcessGroup, dist.group.WORLD)
