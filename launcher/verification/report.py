"""The verdict, on one screen."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.verification.compare import Finding

_MOST = 8
"""Figures that are outside their bound and shown."""


def report(findings: Sequence[Finding], changes: Sequence[str], described: str, seconds: float) -> str:
    """What was compared, the largest errors, and the first part that differs."""
    lines = [described]
    if changes:
        lines.append("Made small for it: " + "; ".join(changes) + ".")
    lines.append("")
    # Of each kind the figure that is nearest to its bound, or furthest beyond it.
    lines.append(f"{'step':>4}  {'what':<14}{'largest error':>14}{'bound':>10}  part")
    for step in sorted({finding.step for finding in findings}):
        for what in ("experts chosen", "loss", "gradient norm", "gradients", "weights"):
            of_kind = [finding for finding in findings if (finding.step, finding.what) == (step, what)]
            if of_kind:
                # A bound may be 0: then any error is beyond it.
                worst = max(of_kind, key=lambda finding: finding.error / max(finding.bound, 1e-30))
                lines.append(f"{step:>4}  {what:<14}{worst.error:>14.1e}{worst.bound:>10.0e}  {worst.part}")
    lines.append("")
    broken = [finding for finding in findings if not finding.held]
    if not broken:
        lines.append(f"They agree: {len(findings)} figures within their bounds, {seconds:.0f} s.")
        return "\n".join(lines)
    # In the order of computation: what is wrong first may be why the rest is.
    first = broken[0]
    part = first.part or "the step as a whole"
    by = f"by {first.error:.2g} (bound {first.bound:.0e})"
    lines.append(f"They differ, first in step {first.step}: {first.what} of {part}, {by}.")
    named = [f"{finding.part or 'whole'} ({finding.error:.1e})" for finding in broken if finding.step == first.step]
    more = len(named) - _MOST
    lines.append("In that step: " + ", ".join(named[:_MOST]) + (f", {more} more." if more > 0 else "."))
    return "\n".join(lines)
