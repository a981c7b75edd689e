"""Choice of a layout for ``parallel.layout = "auto"``, with its reason.

Measured by ``python -m benchmarks.layouts`` (benchmarks/results/amx/layouts.json, "masks") on sequences with 65,536
tokens over 8 ring ranks. Each cell: work on the busiest rank over the mean, then rows received by all ranks per token
in the sequence. A shard is one ring rank's part; a packed sequence holds 14 documents.

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

``balanced`` equals ``zigzag`` if one document fills the sequence. Linear layers do equal work in every layout (they do
not support ``striped``) and send one state per cut document: ``contiguous`` cuts the fewest. ``striped`` is never
chosen: it sends nearly every row to every rank to save a few percent of work. Ulysses ranks hold the same rows, so only
the ring decides.
"""

from __future__ import annotations

from collections.abc import Collection

from longctx.errors import ConfigError
from parallel.layout.sequence import KINDS, check_division, check_layout, num_parts

AUTO = "auto"

WINDOWS_IN_SHARD, WINDOWS_IN_SHARD_PACKED = 2, 8
"""A window is small if at least this many fit into a ring rank's tokens.

The first value, for one document, is exact: zigzag's parts are half a shard long, and up to that window both layouts
have one rank that lacks work, the first in the document. The second is measured: it costs at most 3 % of work.
"""


def check_choice(layout: str, num_tokens: int, degree: int, ulysses: int = 1) -> None:
    """Raise ConfigError unless ``layout`` is "auto" or a known layout, and the tokens divide over the ranks as it
    requires.
    """
    if layout == AUTO:
        # Contiguous and balanced layouts only require equal parts, so auto can always fall back to one.
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
    image_windows: bool = False,
) -> tuple[str, str]:
    """Choose the best layout for these layers; return it with a one-clause reason for the log.

    ``num_tokens`` is the length of a sequence that ``degree`` ranks share, ``ulysses`` among them splitting heads.
    ``packed`` is True if a sequence may hold several documents. ``reaches`` holds each mixer's ``Mixer.lookback``.
    ``side_by_side`` rows (``parallel.tokens_per_rank``) never use zigzag, which would spread each row over all ranks.
    If attention is not ``causal``, every cut of one document is even work. Layers with ``image_windows`` divide tokens
    themselves, image by image. Pure: a resumed run with the same settings
    and data gets the same layout.
    """
    ring = degree // ulysses
    if ring == 1:
        kind = "zigzag"
        if side_by_side:
            kind = "balanced"
        return kind, "every rank attends over complete sequences, so all layouts are equal"
    if image_windows:
        return "contiguous", "ranks get an image's windows in order, so the fewest patches move from this layout"
    # If contiguous work is even, there is no imbalance to fix, and no layout sends less.
    local = _reason_to_stay_local(num_tokens // ring, packed, reaches)
    if local is not None:
        return "contiguous", local
    if not causal and not packed and not side_by_side:
        return (
            "contiguous",
            "bidirectional attention over one document is even work, and this layout has the fewest cuts",
        )
    if packed:
        return (
            "balanced",
            f"for packed documents, only this layout gives {ring} ring ranks even work and few rows to send",
        )
    if side_by_side:
        return "balanced", "it keeps a short row on one rank and gives all ranks even work"
    parts = num_parts("zigzag", degree, ulysses)
    if num_tokens % parts:
        return "balanced", f"{num_tokens} tokens do not split into the {parts} equal parts of zigzag"
    return "zigzag", f"with one document per sequence, {ring} ring ranks have even work"


def _reason_to_stay_local(tokens_per_rank: int, packed: bool, reaches: Collection[int | None]) -> str | None:
    """Return the reason if a rank's tokens need hardly any remote ones; None if some layer attends far back."""
    rows = [lookback for lookback in reaches if lookback is not None]
    if len(rows) < len(reaches):
        return None
    window = max(rows)
    if not window:
        return "stateful layers do equal work in every layout, and this one cuts the fewest documents"
    windows_in_shard = WINDOWS_IN_SHARD
    if packed:
        windows_in_shard = WINDOWS_IN_SHARD_PACKED
    # One layer with a long window would need balance, so the longest window decides.
    if window * windows_in_shard > tokens_per_rank:
        return None
    return (
        f"window {window} is small relative to {tokens_per_rank} tokens per rank: even work, few rows from neighbours"
    )
