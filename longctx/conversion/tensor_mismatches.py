"""Error messages for mismatched tensors, short enough for one screen."""

from __future__ import annotations

from collections.abc import Iterable

from longctx.errors import CheckpointError


def format_names(names: Iterable[str], limit: int = 12) -> str:
    """Return the first names in sorted order, and the number of remaining ones."""
    ordered = sorted(names)
    text = ", ".join(ordered[:limit]) or "none"
    if len(ordered) > limit:
        text += f" … and {len(ordered) - limit} more"
    return text


def raise_mismatches(
    location: str, *, missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[str] = ()
) -> None:
    """Raise CheckpointError listing the mismatches; return if all three are empty."""
    found = {"missing": list(missing), "unexpected": list(unexpected), "with the wrong shape": list(mismatched)}
    lines = [f"  {kind} ({len(names)}): {format_names(names)}" for kind, names in found.items() if names]
    if lines:
        lines.insert(0, f"the tensors of {location} do not match its config:")
        raise CheckpointError("\n".join(lines))
