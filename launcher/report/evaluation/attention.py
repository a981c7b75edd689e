"""What queries attend to, as a picture of blocks and as a page of tokens.

Axes: N blocks of queries, G blocks of keys, as many and as large.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from itertools import accumulate

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter

from launcher.report.evaluation.figures import write_caption
from launcher.report.evaluation.tables import Rows
from launcher.report.figures import RED, new_figure, styled, to_svg
from launcher.report.template import fill_template

LEAST = 1e-4
"""Share that has the darkest colour; what is smaller has the same."""
_STEPS = 65535
"""Steps of a share on the page: two bytes each."""


@dataclass(frozen=True, kw_only=True)
class AttentionMap:
    """The mean share of a block of keys in the attention of a block's queries."""

    share_NG: np.ndarray
    is_seen_NG: np.ndarray
    """Whether the mask lets any query of the block see any key of the other one."""
    block_tokens: int
    bounds: list[int]
    """Where documents begin and end, in tokens."""


def csv_rows(found: AttentionMap) -> Rows:
    """A row for each pair of blocks that the mask allows."""
    size, num_tokens = found.block_tokens, found.bounds[-1]
    return [
        {
            "query_start": int(n) * size,
            "query_stop": min((int(n) + 1) * size, num_tokens),
            "key_start": int(g) * size,
            "key_stop": min((int(g) + 1) * size, num_tokens),
            "share": float(found.share_NG[n, g]),
        }
        for n, g in np.argwhere(found.is_seen_NG)
    ]


@styled
def map_figure(found: AttentionMap, caption: str, name: str) -> str:
    """Queries down, keys across, on a fixed log scale; what the mask forbids is blank, lines part documents."""
    num_tokens, size = found.bounds[-1], found.block_tokens
    figure, (axes,) = new_figure(1, height=7.6)
    # Blank and not dark: a key that may not be seen is another thing than one that is not looked at.
    shares = np.ma.masked_where(~found.is_seen_NG, np.maximum(found.share_NG, LEAST))
    # An image and not a mesh: ten thousand shapes would be a megabyte of text.
    end = len(shares) * size
    image = axes.imshow(
        shares,
        cmap=matplotlib.colormaps["viridis"],
        norm=LogNorm(LEAST, 1.0),
        extent=(0, end, end, 0),
        interpolation="nearest",
        aspect="equal",
    )
    axes.set_xlim(0, num_tokens)
    axes.set_ylim(num_tokens, 0)
    axes.grid(False)
    for bound in found.bounds[1:-1]:
        axes.axhline(bound, color=RED, linewidth=0.6)
        axes.axvline(bound, color=RED, linewidth=0.6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("key (token of the row)")
    axes.set_ylabel("query (token of the row)")
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.04)
    bar.set_label(f"share of a query's attention that a block of {size:,} keys has; {LEAST:g} or less is darkest")
    write_caption(figure, caption)
    return to_svg(figure, name)


def token_page(found: AttentionMap, documents: list[list[str]], caption: str) -> str:
    """A page with the text, on which the token under the pointer shows what it attends to. Blocks are single tokens."""
    # Two bytes a share: as text each would take ten.
    shares = np.rint(found.share_NG.clip(0, 1) * _STEPS).astype("<u2")
    starts = accumulate((len(tokens) for tokens in documents), initial=0)
    return fill_template(
        "attention.html",
        caption=caption,
        documents=[list(enumerate(tokens, start)) for start, tokens in zip(starts, documents, strict=False)],
        shares=base64.b64encode(shares.tobytes()).decode(),
        steps=_STEPS,
        num_tokens=found.bounds[-1],
    )
