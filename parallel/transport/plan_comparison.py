"""Verification that ranks sharing a sequence have the same plan, before the first byte is sent.

A rank with another plan would make its peers wait for rows that never come, or send rows that do not belong together.
So ranks compare a plan's fingerprint once, when they build it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

import torch

from longctx.errors import ClusterError, ConfigError
from parallel.comm.process_groups import ProcessGroup
from parallel.mesh import Mesh


class SharedPlan(Protocol):
    """Object that must be equal on all ranks: an attention schedule, linear-attention states, a relayout."""

    @property
    def digest(self) -> str:
        """Checksum over everything that must match."""
        ...

    def describe(self) -> str:
        """Return a one-line description for error messages."""
        ...


@dataclass(frozen=True)
class PlanTexts:
    """Words for a kind of plan in error messages."""

    plan: str
    """What the plan is: "schedule"."""
    call: str
    """What uses it: "attention call"."""
    advice: str
    """Sentences after a mismatch."""

    @property
    def operation(self) -> str:
        """Operation named while a rank waits for the others' plans."""
        return f"agreeing on a {self.plan}"


def verify_plan(plan: SharedPlan, mesh: Mesh, signature: str, problem: str | None, texts: PlanTexts) -> None:
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
    mine = torch.frombuffer(bytearray(fingerprint(plan, signature, problem)), dtype=torch.uint8)
    try:
        seen = mesh.comm.all_gather(mine, group, operation=texts.operation)
    except ClusterError as error:
        raise ClusterError(f"{error}\nOr a rank made fewer {texts.call}s than its peers.") from error.__cause__
    if problem is not None or bool((seen != mine).any()):
        _raise_difference(_Statement(problem, plan.describe(), plan.digest, signature), mesh, group, texts)


def fingerprint(plan: SharedPlan, signature: str, problem: str | None) -> bytes:
    """Return the 16 bytes that ranks compare."""
    # Fixed size regardless of the description: one small collective per plan.
    return blake2b(f"{plan.digest} {signature} {problem or ''}".encode(), digest_size=16).digest()


class _Statement(NamedTuple):
    problem: str | None
    description: str
    digest: str
    signature: str


def _raise_difference(mine: _Statement, mesh: Mesh, group: ProcessGroup, texts: PlanTexts) -> None:
    """Raise the first problem, or the mismatch, with the same text on every rank."""
    # Descriptions are long, so ranks exchange them only after a digest mismatch.
    statements: list[_Statement] = mesh.comm.gather_objects(mine, group, operation=texts.operation)
    for rank, statement in enumerate(statements):
        if statement.problem is not None:
            raise ConfigError(f"context rank {rank}: {statement.problem}")
    lines = [
        f"  context rank {rank}: {x.description}; {x.signature}; {texts.plan} {x.digest[:8]}"
        for rank, x in enumerate(statements)
    ]
    raise ClusterError(
        f"the ranks that share a sequence have different {texts.call}s:\n" + "\n".join(lines) + f"\n{texts.advice}"
    )
