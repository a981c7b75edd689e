"""Rows as a run reads them, decoded whole: for people to read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from data_pipeline.rows.blocks import BlockPlanner
from data_pipeline.shards.reader import ShardSet
from longctx.errors import ConfigError


def sample_rows(folder: str | Path, *, seq_len: int, rows: int, seed: int = 0) -> Iterator[str]:
    """Yield the first ``rows`` rows of epoch 0 as text, a line above each row and each piece of a document.

    ConfigError for sizes below 1; DataError for a folder that cannot be read. An epoch with fewer rows ends earlier.
    """
    for name, value in (("seq_len", seq_len), ("rows", rows)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1.")
    shards = ShardSet.open(folder, verify=False)
    tokenizer = shards.tokenizer()
    # The same pure function as the loader's: what is shown is what a run reads.
    planner, shown = BlockPlanner(shards, seq_len, seed=seed), 0
    for block in range(planner.num_blocks):
        plan = planner.plan(0, block)
        for row in range(min(plan.num_rows, rows - shown)):
            text = [f"════ row {shown} ({int(plan.row_tokens[row]):,} of {seq_len:,} tokens)"]
            for document, start, stop in plan.row(row):
                size = len(shards.document(document))
                text.append(f"──── {shards.name(document)} (tokens {start:,} to {stop:,} of {size:,})")
                text.append(tokenizer.decode(shards.slice(document, start, stop)))
            yield "\n".join(text) + "\n"
            shown += 1
        if shown == rows:
            return
