"""Agreement of the ranks that share a sequence on their plan of attention, before its first byte is sent.

A rank with another schedule or other shapes would make its peers wait for rows that never come, or add up rows that do
not belong together. So ranks agree on a plan of attention when it is built, once per batch and kind of layer.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, Protocol

import torch

from longctx.errors import ClusterError, ConfigError
from parallel.comm.groups import ProcessGroup
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh

_AGREEING = "agreeing on a schedule"


class Agreed(Protocol):
    """Object that must be equal on all ranks: a schedule of attention, or the states of linear attention."""

    @property
    def digest(self) -> str:
        """Fingerprint of everything that is agreed on."""
        ...

    def describe(self) -> str:
        """Return a one-line description of it, for a message."""
        ...


def degree_problem(layout: SequenceLayout, mesh: Mesh) -> str | None:
    """Return an error message if the layout does not fit this mesh; None if it is for as many ranks."""
    if (mesh.context, mesh.ulysses) == (layout.degree, layout.ulysses):
        return None
    return (
        f"the schedule is for {layout.degree} ranks of which {layout.ulysses} split heads; the "
        f"mesh has context {mesh.context} and ulysses {mesh.ulysses}."
    )


def agree(agreed: Agreed, mesh: Mesh, signature: str, problem: str | None) -> None:
    """Compare the digest and the ``signature`` of the call over the context group. Collective.

    Raise ConfigError on every rank if one has a ``problem``, ClusterError if they differ.
    """
    group = mesh.control_group
    if group is None:
        if problem is not None:
            raise ConfigError(problem)
        return
    # A rank with a problem takes part: the others would wait for it.
    mine = torch.frombuffer(bytearray(_digest(agreed, signature, problem)), dtype=torch.uint8)
    try:
        seen = mesh.comm.all_gather(mine, group, doing=_AGREEING)
    except ClusterError as error:
        raise ClusterError(f"{error}\nOr one does not call attention when the others do.") from error.__cause__
    if problem is not None or bool((seen != mine).any()):
        _raise_difference(agreed, signature, problem, mesh, group)


class _Statement(NamedTuple):
    """Arguments of one rank, for a message."""

    problem: str | None
    description: str
    digest: str
    signature: str


def _digest(agreed: Agreed, signature: str, problem: str | None) -> bytes:
    # A fixed number of bytes, whatever is described: one small collective per plan.
    return blake2b(f"{agreed.digest} {signature} {problem or ''}".encode(), digest_size=16).digest()


def _raise_difference(agreed: Agreed, signature: str, problem: str | None, mesh: Mesh, group: ProcessGroup) -> None:
    """Raise the first problem, or the difference, in the same words on every rank."""
    # Descriptions are long, so they are sent only once the digests have shown a difference.
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
