"""Arrow files with a model's outputs for each token in some documents: ids, log-likelihoods, chosen experts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.shards.marked import mask_of
from longctx.errors import DataError
from longctx.files import write_atomically

_TOTAL = b"longctx.total"
"""Key for the totals in a file's metadata."""


@dataclass(frozen=True, kw_only=True)
class ScoredDocument:
    """One document's scores: a row in a file."""

    number: int
    name: str
    ids: np.ndarray
    """[N]."""
    nll: np.ndarray | None
    """Negative log-likelihoods of the tokens after the first [N − 1], nats; None for a single-token document."""
    experts: np.ndarray | None
    """Experts that processed each token [N, K], layer after layer; None if not requested or for a single-token
    document."""
    target_runs: np.ndarray | None
    """Spans of target tokens, as in ``EncodedDocument.target_runs``; None if all tokens are targets."""


@dataclass(frozen=True)
class Total:
    """Totals over a folder's files."""

    documents: int = 0
    tokens: int = 0
    """Tokens with a likelihood: all but the first in each document."""
    log_likelihood: float = 0.0
    """Summed log-likelihood, nats."""
    counted_tokens: int = 0
    """Target tokens among them."""
    counted_log_likelihood: float = 0.0

    @property
    def mean(self) -> float:
        """Mean log-likelihood per token, nats."""
        return self.log_likelihood / max(1, self.tokens)

    @property
    def target_mean(self) -> float:
        """Mean log-likelihood per target token, nats."""
        return self.counted_log_likelihood / max(1, self.counted_tokens)

    def __add__(self, other: Total) -> Total:
        return Total(
            *(mine + other_value for mine, other_value in zip(vars(self).values(), vars(other).values(), strict=True))
        )


def write_scores(path: Path, documents: Sequence[ScoredDocument], *, experts_a_token: int = 0) -> None:
    """Write a file atomically: each row is a document, each list has one entry per token."""
    fields = [
        pa.field("document", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("tokens", pa.list_(pa.int32())),
        pa.field("log_likelihood", pa.list_(pa.float32())),
    ]
    if experts_a_token:
        fields.append(pa.field("experts", pa.list_(pa.list_(pa.int16(), experts_a_token))))
    total = Total()
    columns: dict[str, list[Any]] = {field.name: [] for field in fields}
    for document in documents:
        likelihoods = np.full(len(document.ids), np.nan, np.float32)
        if document.nll is not None:
            likelihoods[1:] = -document.nll
        total += _total_of(likelihoods[1:], document.target_runs)
        columns["document"].append(document.number)
        columns["name"].append(document.name)
        columns["tokens"].append(document.ids.astype(np.int32))
        # NaN becomes null: the first token has no likelihood.
        columns["log_likelihood"].append(pa.array(likelihoods, from_pandas=True))
        if experts_a_token:
            # −1 marks a missing expert: a single-token document is not read.
            chosen = document.experts
            if chosen is None:
                chosen = np.full((len(document.ids), experts_a_token), -1)
            columns["experts"].append(list(chosen.astype(np.int16)))
    # Totals in the footer: files can be added up without reading their rows.
    schema = pa.schema(fields, metadata={_TOTAL: json.dumps(vars(total))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(pa.table(columns, schema=schema))
    write_atomically(path, sink.getvalue())


def read_total(path: Path) -> Total:
    """Return the totals in a file's footer; raise DataError if it is not a score file."""
    try:
        with pa.OSFile(str(path)) as file:
            return Total(**json.loads((pa.ipc.open_file(file).schema.metadata or {})[_TOTAL]))
    except (OSError, pa.ArrowInvalid, LookupError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not a score file: {error}. Remove it, and run the same command again.") from error


def _total_of(likelihoods: np.ndarray, target_runs: np.ndarray | None) -> Total:
    """Return the totals over a document's tokens after the first [N − 1]; ``target_runs`` has spans of target tokens
    over N.
    """
    is_target = np.ones(len(likelihoods), bool)
    if target_runs is not None:
        is_target = mask_of(target_runs, len(likelihoods) + 1)[1:]
    # Accumulate in float64: float32 totals over millions of tokens would lose digits.
    sums = [float(values.sum(dtype=np.float64)) for values in (likelihoods, likelihoods[is_target])]
    return Total(1, len(likelihoods), sums[0], int(is_target.sum()), sums[1])
