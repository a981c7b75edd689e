"""``parallel.layout = "auto"``: the choice of a run's layout, and its reason.

Figures of ``python -m benchmarks.layouts`` (benchmarks/results/amx/layouts.json, "masks"), rows of 65,536 tokens over a
ring of 8. Each cell is the busiest rank's work over the mean, and the rows that all ranks receive for each token of the
sequence. A shard is one ring rank's part; a packed row holds 14 documents.

========================== ============ ============ ============ ============ ============
attention over             contiguous   zigzag       balanced     striped      chosen
========================== ============ ============ ============ ============ ============
one document               1.88 · 3.50  1.00 · 5.25  1.00 · 5.25  1.00 · 7.00  zigzag
packed                     2.03 · 1.08  1.67 · 1.67  1.02 · 1.65  1.00 · 6.99  balanced
packed, sparse layers      1.47 · 1.08  1.27 · 1.64  1.01 · 1.65  1.00 · 6.99  balanced
one, window 1/4 shard      1.02 · 0.22  1.02 · 0.44  1.02 · 0.44  1.00 · 7.00  contiguous
one, window of a shard     1.07 · 0.88  1.07 · 1.69  1.07 · 1.69  1.00 · 7.00  zigzag
packed, window 1/8 shard   1.10 · 0.10  1.09 · 0.20  1.10 · 0.17  1.00 · 6.99  contiguous
packed, window of a shard  1.65 · 0.54  1.53 · 1.01  1.16 · 0.85  1.00 · 6.99  balanced
========================== ============ ============ ============ ============ ============

``balanced`` equals ``zigzag`` if a document fills the row. Linear layers do equal work in every layout but ``striped``,
which they do not support, and send a state for each cut of a document: ``contiguous`` cuts least. ``striped`` is never
chosen: it sends nearly every row to every rank, to save a few percent of work. Ranks that split heads (Ulysses) hold
the same rows, so only the ring decides.
"""

from __future__ import annotations

from collections.abc import Collection

from longctx.errors import ConfigError
from parallel.layout.sequence import KINDS, check_division, check_layout, num_parts

AUTO = "auto"

WINDOWS_IN_SHARD, WINDOWS_IN_SHARD_PACKED = 2, 8
"""A window is small when so many of it fit into the tokens of a ring rank.

Over one document the first holds exactly: zigzag's parts are half a shard long, and up to there the one rank that
lacks work, the first of the document, is the same rank in both layouts. The second is measured: 3 % of work at most.
"""


def check_choice(layout: str, num_tokens: int, degree: int, ulysses: int = 1) -> None:
    """Raise ConfigError unless ``layout`` is "auto" or a layout, and the tokens divide over the ranks as it needs."""
    if layout == AUTO:
        # Contiguous and balanced layouts need no more than equal parts, so auto always finds one.
        check_division(layout, num_tokens, degree, ulysses)
    elif layout in KINDS:
        check_layout(layout, num_tokens, degree, ulysses)
    else:
        raise ConfigError(f"parallel.layout={layout!r} is unknown. Try one of {[AUTO, *KINDS]}.")


def choose_layout(
    *,
    num_tokens: int,
    degree: int,
    ulysses: int,
    packed: bool,
    reaches: Collection[int | None],
    side_by_side: bool = False,
    causal: bool = True,
) -> tuple[str, str]:
    """Return the layout that is best for these layers, and the reason in one clause for the log.

    ``num_tokens`` are those of a sequence that ``degree`` ranks share, ``ulysses`` of which split heads. ``packed`` is
    True if a sequence may hold more than one document. ``reaches`` are those of the model's mixers (``Mixer.reach``).
    ``side_by_side`` rows (``parallel.tokens_per_rank``) are never zigzag, which spreads each over all ranks. If
    attention is not ``causal``, one document is even work however it is cut. Pure: a run that resumes with the same
    settings and data gets the same layout.
    """
    ring = degree // ulysses
    if ring == 1:
        kind = "zigzag"
        if side_by_side:
            kind = "balanced"
        return kind, "every rank attends over whole sequences, so all layouts are the same"
    # If contiguous work is even, there is nothing to balance, and no layout sends less.
    local = _reason_to_stay_local(num_tokens // ring, packed, reaches)
    if local is not None:
        return "contiguous", local
    if not causal and not packed and not side_by_side:
        return "contiguous", "every token of one document sees all of it, so work is even, and nothing is cut smaller"
    if packed:
        return "balanced", f"of packed documents it alone gives {ring} ring ranks even work and few rows to send"
    if side_by_side:
        return "balanced", "it leaves a short row on one rank and gives all ranks even work"
    parts = num_parts("zigzag", degree, ulysses)
    if num_tokens % parts:
        return "balanced", f"{num_tokens} tokens do not split into the {parts} equal parts of zigzag"
    return "zigzag", f"one document a sequence is even work for {ring} ring ranks"


def _reason_to_stay_local(tokens_per_rank: int, packed: bool, reaches: Collection[int | None]) -> str | None:
    """Return the reason if a rank's tokens need hardly any others; None if some layer sees far back."""
    rows = [reach for reach in reaches if reach is not None]
    if len(rows) < len(reaches):
        return None
    window = max(rows)
    if not window:
        return "layers with a state do equal work in every layout, and this one cuts the fewest documents"
    windows_in_shard = WINDOWS_IN_SHARD
    if packed:
        windows_in_shard = WINDOWS_IN_SHARD_PACKED
    if window * windows_in_shard > tokens_per_rank:
        return None
    return (
        f"a window of {window} is small beside a rank's {tokens_per_rank} tokens: work is even, neighbours' rows travel"
    )
