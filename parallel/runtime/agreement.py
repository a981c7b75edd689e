"""Ranks that share a sequence agree on what they are about to do, before the first byte of it travels.

A rank with another schedule or other shapes would make its peers wait for rows that never come, or add up rows that do
not belong together.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from longctx.errors import ClusterError, ConfigError
from parallel.mesh import Mesh
from parallel.schedule.schedule import Schedule

if TYPE_CHECKING:
    from parallel.schedule.states import StatePlan


def agree(schedule: Schedule | StatePlan, mesh: Mesh, words: str, problem: str | None, *, again: bool = False) -> None:
    """Compare schedule and ``words`` over the context group; once for each schedule, or ``again``. Collective.

    ConfigError on every rank where one has a ``problem`` or the mesh is not the schedule's, ClusterError where they
    differ.
    """
    if (mesh.context, mesh.ulysses) != (schedule.layout.degree, schedule.layout.ulysses):
        raise ConfigError(
            f"the schedule is for {schedule.layout.degree} ranks of which {schedule.layout.ulysses} split heads; the "
            f"mesh has context {mesh.context} and ulysses {mesh.ulysses}."
        )
    if mesh.control_group is None:
        if problem is not None:
            raise ConfigError(problem)
        return
    agreed: set[str] = schedule.cached("agreed", set)
    if agreed and not again and problem is not None:  # the others are past the comparison
        raise ConfigError(problem)
    if words in agreed and not again:
        return
    seen = _everyone(_digest(schedule, words, problem), mesh)
    if problem is None and len(set(seen)) == 1:
        agreed.add(words)
        return
    _raise_difference(schedule, words, problem, mesh)


def _digest(schedule: Schedule | StatePlan, words: str, problem: str | None) -> bytes:
    return blake2b(f"{schedule.digest} {words} {problem or ''}".encode(), digest_size=16).digest()


def _everyone(digest: bytes, mesh: Mesh) -> list[bytes]:
    """Every context rank's digest."""
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    seen = [torch.empty_like(mine) for _ in range(mesh.context)]
    try:
        dist.all_gather(seen, mine, group=mesh.control_group)
    except RuntimeError as error:
        raise ClusterError(
            f"rank {mesh.rank} waited for the other {mesh.context - 1} ranks of its sequence to agree on a schedule: "
            f"{str(error).splitlines()[0]}\nOne died, or does not call attention when the others do."
        ) from error
    return [x.numpy().tobytes() for x in seen]


def _raise_difference(schedule: Schedule | StatePlan, words: str, problem: str | None, mesh: Mesh) -> None:
    """The first problem, or what differs, in the same words on every rank."""
    said: list = [None] * mesh.context
    dist.all_gather_object(said, (problem, schedule.describe(), schedule.digest, words), group=mesh.control_group)
    for rank, (found, *_) in enumerate(said):
        if found is not None:
            raise ConfigError(f"context rank {rank}: {found}")
    lines = [
        f"  context rank {rank}: {what}; {asked}; schedule {h[:8]}" for rank, (_, what, h, asked) in enumerate(said)
    ]
    raise ClusterError(
        "the ranks of a sequence were given different attention:\n" + "\n".join(lines) + "\n"
        "All must have the same documents, layout, mask, shapes and transport."
    )
