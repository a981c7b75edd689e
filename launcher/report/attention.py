"""Attention patterns as a table, a picture by blocks, and a page by tokens.

The picture's scale is logarithmic and fixed, so pictures of two heads are compared side by side.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter

from launcher.report.figures import GREY, ORANGE, new_figure, styled, to_svg
from launcher.report.template import fill
from longctx.evaluation.patterns import HeadPattern

FAINTEST = 1e-3
"""Shares below this one have the colour of none."""
SHOWN_SHARE = 0.002
"""Shares below this one are left out of the page by tokens, which would be large otherwise."""
MOST_TOKENS = 1024
"""Tokens of a page by tokens."""


def pattern_rows(pattern: HeadPattern) -> list[dict[str, Any]]:
    """A row for each block of queries and block of keys that any of them sees."""
    bounds = pattern.blocks.bounds
    weights, seen = pattern.weights_NN.tolist(), pattern.seen_NN.tolist()
    rows = []
    for i, (query_start, query_stop) in enumerate(bounds):
        for j, (key_start, key_stop) in enumerate(bounds):
            if seen[i][j]:
                rows.append(
                    {
                        "layer": pattern.layer,
                        "head": pattern.head,
                        "query_start": query_start,
                        "query_stop": query_stop,
                        "key_start": key_start,
                        "key_stop": key_stop,
                        "share": weights[i][j],
                        "queries_that_see": seen[i][j],
                    }
                )
    return rows


@styled
def pattern_figure(pattern: HeadPattern, caption: str, name: str) -> str:
    """Shares by block of queries (down) and block of keys (across); grey is masked, lines are documents' ends."""
    figure, (axes,) = new_figure(1, height=8.2)
    edges = np.array([start for start, _ in pattern.blocks.bounds] + [pattern.blocks.num_tokens])
    shares = pattern.weights_NN.numpy().clip(FAINTEST, 1.0)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#b9bec6")
    image = axes.pcolormesh(
        edges,
        edges,
        np.ma.masked_where(pattern.seen_NN.numpy() == 0, shares),
        cmap=colours,
        norm=LogNorm(FAINTEST, 1.0),
        # The cells as one image: a path a cell would be a file of megabytes.
        rasterized=True,
    )
    _draw_documents(axes, pattern)
    axes.grid(False)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.set_xlabel("keys (tokens)")
    axes.set_ylabel("queries (tokens)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.03)
    bar.set_label(f"share of a query's attention, mean over the block ({FAINTEST:g} or less is one colour)")
    figure.supxlabel(caption, fontsize=7.5, color=GREY, parse_math=False)
    return to_svg(figure, name)


def _draw_documents(axes: Axes, pattern: HeadPattern) -> None:
    """A line around each document's queries and keys, where there are several."""
    bounds = pattern.documents.bounds
    if len(bounds) < 3:
        return
    for start, stop in pairwise(bounds):
        corners = [start, stop, stop, start, start], [start, start, stop, stop, start]
        axes.plot(*corners, color=ORANGE, linewidth=0.9)


def token_page(
    patterns: Sequence[HeadPattern], tokens: Sequence[str], document_of_token: Sequence[int], *, title: str, caption: str
) -> str:
    """A page on which hovering a token shows where each head looks from it; the patterns' blocks are tokens."""
    assert all(pattern.blocks.size == 1 for pattern in patterns), "a block of several tokens"
    heads = [{"head": pattern.head, "rows": _sparse_rows(pattern)} for pattern in patterns]
    # A text may hold "</script>": the page's own data must not end there.
    data = json.dumps({"heads": heads}, separators=(",", ":")).replace("</", "<\\/")
    first_of_document = [at for at in range(1, len(tokens)) if document_of_token[at] != document_of_token[at - 1]]
    return fill(
        "attention.html",
        title=title,
        caption=caption,
        layer=patterns[0].layer,
        heads=[pattern.head for pattern in patterns],
        tokens=tokens,
        first_of_document=set(first_of_document),
        data=data,
        smallest=f"{SHOWN_SHARE:.1%}",
    )


def _sparse_rows(pattern: HeadPattern) -> list[list[int]]:
    """For each query its keys and their shares in tenths of a per cent, one after the other: key, share, key, share."""
    rows = []
    for shares in pattern.weights_NN.numpy():
        keys = np.flatnonzero(shares >= SHOWN_SHARE)
        tenths = np.rint(1000 * shares[keys]).astype(int)
        rows.append(np.stack([keys, tenths], axis=1).ravel().tolist())
    return rows
