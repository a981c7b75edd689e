"""How often an epoch has a document: more often the long ones, so that a corpus has as much of length as a run wants.

Sources keep their shares (``mixture``), for length is not bought with another domain: "Data Engineering for Scaling
Language Models to 128K Context" (Fu et al., 2024, arXiv 2402.10171).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_pipeline.rows.pack import Parts
from data_pipeline.shuffle import key64
from longctx.mixing import mix64_array

_COPIES = 3
"""Salt of the draw; ``rows.pack`` and ``rows.blocks`` have the others."""

MAX_FACTOR = 1000.0


@dataclass(frozen=True, kw_only=True)
class Upsampling:
    """Documents of at least so many tokens stand in an epoch so many times, on average."""

    min_tokens: int
    factor: float
    """2.5: two or three times, by a draw for each document and epoch. Below 1, some are left out of an epoch."""


def copies_of(parts: Parts, rules: tuple[Upsampling, ...], *, seed: int, epoch: int) -> Parts:
    """Whole documents as often as the rules say, copies of one side by side; the last rule that fits is a document's.

    A function of document, length, seed and epoch, as everything of a plan is.
    """
    factors = np.ones(len(parts.documents))
    for rule in rules:
        factors[parts.lengths >= rule.min_tokens] = rule.factor
    # The top 53 bits, which a float holds exactly: the same draw on every machine.
    draws = mix64_array(parts.documents.astype(np.uint64) ^ np.uint64(key64(seed, epoch, _COPIES))) >> np.uint64(11)
    counts = np.floor(factors).astype(np.int64)
    counts += draws < (factors - counts) * 2.0**53
    numbers = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    found = parts.at(numbers)
    return Parts(found.documents, np.arange(len(numbers)) - first, found.starts, found.stops)
