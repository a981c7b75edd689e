"""Ranks that share a sequence agree on what they are about to do, before the first byte of it travels.

A rank with another schedule or other shapes would make its peers wait for rows that never come, or add up rows that do
not belong together. So a plan of attention is agreed on when it is made, once a batch and kind of layer.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, Protocol

from longctx.errors import ClusterError, ConfigError
from parallel.comm.communicator import Communicator
from parallel.comm.groups import ProcessGroup

_AGREEING = "agreeing on a schedule"


class Degrees(Protocol):
    """How many ranks share a sequence."""

    @property
    def degree(self) -> int:
        """Ranks that share the sequence, ring × Ulysses."""
        ...

    @property
    def ulysses(self) -> int:
        """How many of them split heads."""
        ...


class RanksOfSequence(Protocol):
    """The ranks that agree: a mesh."""

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        ...

    @property
    def context(self) -> int:
        """How many ranks share the sequence."""
        ...

    @property
    def ulysses(self) -> int:
        """How many of them split heads."""
        ...

    @property
    def comm(self) -> Communicator:
        """How they communicate."""
        ...

    @property
    def control_group(self) -> ProcessGroup | None:
        """Their group for CPU tensors; None where one rank has the whole sequence."""
        ...


class Agreed(Protocol):
    """What ranks must have alike: a schedule of attention, or the states of linear attention."""

    @property
    def digest(self) -> str:
        """A fingerprint of all that is agreed on."""
        ...

    def describe(self) -> str:
        """The same on one line, for a message."""
        ...


def degree_problem(layout: Degrees, mesh: RanksOfSequence) -> str | None:
    """What is wrong with a layout for this mesh; None where it is for as many ranks."""
    if (mesh.context, mesh.ulysses) == (layout.degree, layout.ulysses):
        return None
    return (
        f"the schedule is for {layout.degree} ranks of which {layout.ulysses} split heads; the "
        f"mesh has context {mesh.context} and ulysses {mesh.ulysses}."
    )


def agree(agreed: Agreed, mesh: RanksOfSequence, signature: str, problem: str | None) -> None:
    """Compare the digest and the ``signature`` of the call over the context group. Collective.

    ConfigError on every rank where one has a ``problem``, ClusterError where they differ.
    """
    group = mesh.control_group
    if group is None:
        if problem is not None:
            raise ConfigError(problem)
        return
    # A rank with a problem takes part: the others would wait for it.
    seen = _everyone(_digest(agreed, signature, problem), mesh, group)
    if problem is not None or len(set(seen)) > 1:
        _raise_difference(agreed, signature, problem, mesh, group)


class _Statement(NamedTuple):
    """What one rank was given, for a message."""

    problem: str | None
    description: str
    digest: str
    signature: str


def _digest(agreed: Agreed, signature: str, problem: str | None) -> bytes:
    # A fixed number of bytes, whatever is described: one small collective a plan.
    return blake2b(f"{agreed.digest} {signature} {problem or ''}".encode(), digest_size=16).digest()


def _everyone(digest: bytes, mesh: RanksOfSequence, group: ProcessGroup) -> list[bytes]:
    """Every context rank's digest."""
    try:
        return mesh.comm.gather_bytes(digest, group, doing=_AGREEING)
    except ClusterError as error:
        raise ClusterError(f"{error}\nOr one does not call attention when the others do.") from error.__cause__


def _raise_difference(
    agreed: Agreed, signature: str, problem: str | None, mesh: RanksOfSequence, group: ProcessGroup
) -> None:
    """The first problem, or what differs, in the same words on every rank."""
    # Descriptions are long, so they travel only once digests have shown that something differs.
    mine = _Statement(problem, agreed.describe(), agreed.digest, signature)
    statements: list[_Statement] = mesh.comm.gather_objects(mine, group, doing=_AGREEING)
    for rank, statement in enumerate(statements):
        if statement.problem is not None:
            raise ConfigError(f"context rank {rank}: {statement.problem}")
    lines = [
        f"  context rank {rank}: {x.description}; {x.signature}; schedule {x.digest[:8]}"
        for rank, x in enumerate(statements)
    ]
    raise ClusterError(
        "the ranks of a sequence were given different attention:\n" + "\n".join(lines) + "\n"
        "All must have the same documents, layout, mask, shapes, transport and kernel. Where kernels differ, install "
        "the same libraries on every node, or name a kernel that all of them have (parallel.kernel, train.products)."
    )
