"""Verification that ranks sharing a sequence have the same attention plan, before the first byte is sent.

A rank with another schedule or other shapes would make its peers wait for rows that never come, or add rows that do not
belong together. So ranks compare an attention plan when they build it, once per batch and layer kind.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, Protocol

import torch

from longctx.errors import ClusterError, ConfigError
from parallel.comm.process_groups import ProcessGroup
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh

_AGREEING = "agreeing on a schedule"


class SharedPlan(Protocol):
    """Object that must be equal on all ranks: an attention schedule, or linear-attention states."""

    @property
    def digest(self) -> str:
        """Checksum over everything that must match."""
        ...

    def describe(self) -> str:
        """Return a one-line description for error messages."""
        ...


def degree_problem(layout: SequenceLayout, mesh: Mesh) -> str | None:
    """Return an error message if the layout has a different number of ranks than the mesh, otherwise None."""
    if (mesh.context, mesh.ulysses) == (layout.degree, layout.ulysses):
        return None
    return (
        f"the schedule has context {layout.degree} and ulysses {layout.ulysses}; the "
        f"mesh has context {mesh.context} and ulysses {mesh.ulysses}."
    )


def verify_across_ranks(plan: SharedPlan, mesh: Mesh, signature: str, problem: str | None) -> None:
    """Compare digest and call ``signature`` over the context group. Collective.

    Raise ConfigError on every rank if one has a ``problem``, ClusterError on a mismatch.
    """
    # On the control group, i.e. on CPU tensors: a GPU collective would synchronize host and device for every plan.
    group = mesh.control_group
    if group is None:
        if problem is not None:
            raise ConfigError(problem)
        return
    # A rank with a problem still takes part: the others would wait for it.
    mine = torch.frombuffer(bytearray(_digest(plan, signature, problem)), dtype=torch.uint8)
    try:
        seen = mesh.comm.all_gather(mine, group, operation=_AGREEING)
    except ClusterError as error:
        raise ClusterError(f"{error}\nOr a rank skipped an attention call that its peers made.") from error.__cause__
    if problem is not None or bool((seen != mine).any()):
        _raise_difference(plan, signature, problem, mesh, group)


class _Statement(NamedTuple):
    problem: str | None
    description: str
    digest: str
    signature: str


def _digest(plan: SharedPlan, signature: str, problem: str | None) -> bytes:
    # Fixed size regardless of the description: one small collective per plan.
    return blake2b(f"{plan.digest} {signature} {problem or ''}".encode(), digest_size=16).digest()


def _raise_difference(plan: SharedPlan, signature: str, problem: str | None, mesh: Mesh, group: ProcessGroup) -> None:
    """Raise the first problem, or the mismatch, with the same text on every rank."""
    # Descriptions are long, so ranks exchange them only after a digest mismatch.
    mine = _Statement(problem, plan.describe(), plan.digest, signature)
    statements: list[_Statement] = mesh.comm.gather_objects(mine, group, operation=_AGREEING)
    for rank, statement in enumerate(statements):
        if statement.problem is not None:
            raise ConfigError(f"context rank {rank}: {statement.problem}")
    lines = [
        f"  context rank {rank}: {x.description}; {x.signature}; schedule {x.digest[:8]}"
        for rank, x in enumerate(statements)
    ]
    raise ClusterError(
        "the ranks that share a sequence have different attention calls:\n" + "\n".join(lines) + "\n"
        "All must have the same documents, layout, mask, shapes, transport and kernel. If kernels differ, install "
        "the same libraries on every node, or set a kernel that all nodes have (parallel.kernel, train.products)."
    )
