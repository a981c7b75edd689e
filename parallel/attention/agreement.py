"""Verification that ranks sharing a sequence have the same attention plan.

A rank with another schedule or other shapes would make its peers wait for rows that never come, or add rows that do not
belong together. So ranks compare an attention plan when they build it, once per batch and layer kind.
"""

from __future__ import annotations

from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.transport.plan_comparison import PlanTexts, SharedPlan, verify_plan

_TEXTS = PlanTexts(
    plan="schedule",
    call="attention call",
    advice=(
        "All must have the same documents, layout, mask, shapes, transport and kernel. If kernels differ, install "
        "the same libraries on every node, or set a kernel that all nodes have (parallel.kernel, train.products)."
    ),
)


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
    verify_plan(plan, mesh, signature, problem, _TEXTS)
