"""A picture of the rows that a run will read: tokens by the length of their document, and how even ranks are."""

from __future__ import annotations

import numpy as np

from data_pipeline.rows.survey import Survey
from launcher.report.figures import BLUE, GREY, ORANGE, new_figure, standalone, styled, to_svg


@styled
def packing_picture(found: Survey) -> str:
    """An SVG file's text: two panels."""
    figure, (by_length, by_step) = new_figure(2, height=3.4)
    names, tokens = list(found.piece_tokens), np.array(list(found.piece_tokens.values()), dtype=float)
    labels = [_short(2 ** int(name.removeprefix("2^"))) for name in names]
    # Shares: the rows looked at are a beginning of the corpus.
    by_length.bar(labels, 100 * tokens / tokens.sum(), color=BLUE)
    by_length.set_title("Tokens by the length of their piece")
    by_length.set_xlabel("tokens of the piece, from")
    by_length.set_ylabel("% of tokens")
    by_length.tick_params(axis="x", rotation=45)
    steps = np.arange(1, len(found.work.in_order) + 1)
    by_step.plot(steps, found.work.in_order, color=ORANGE, marker=".", label="rows in their order")
    by_step.plot(steps, found.work.balanced, color=BLUE, marker=".", label="data.balance")
    # What no dealing out can go below.
    by_step.axhline(1, color=GREY, linewidth=0.8)
    by_step.set_title("Work of the busiest rank")
    by_step.set_xlabel("step")
    by_step.set_ylabel("times the mean rank's")
    by_step.margins(y=0.25)
    by_step.legend(loc="upper right", ncols=2)
    return standalone(to_svg(figure, "packing"))


def _short(tokens: int) -> str:
    """1, 512, 8K, 1M."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= size:
            return f"{tokens // size}{unit}"
    return f"{tokens}"
