"""``parallel.tokens_per_rank``: the ranks and rows that follow from it, and its rules."""

from __future__ import annotations

from typing import TypeVar

from data_pipeline.rows.micro_batches import MicroBatches
from launcher.config.config_sections import RunConfig
from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from parallel.layout.layout_choice import AUTO
from parallel.layout.tokens_per_rank import rows_at_once, tokens_on_ranks
from parallel.mesh import check_degrees

C = TypeVar("C", bound=RunConfig)
_LAYOUTS = (AUTO, "balanced", "contiguous")
"""Layouts that keep a short document on one rank."""


def with_context(config: C, world_size: int) -> C:
    """Return the config with the ranks and rows implied by ``parallel.tokens_per_rank``; unchanged without that key.

    ``parallel.context`` becomes the number of ranks that share a micro-batch, and ``train.micro_batch_rows`` the
    largest micro-batch's rows. Idempotent. Raise ConfigError if the key contradicts other settings.
    """
    parallel, most = config.parallel, config.parallel.tokens_per_rank
    if most < 0:
        raise ConfigError(f"parallel.tokens_per_rank={most} must be at least 1, or 0 for a fixed parallel.context.")
    # An invalid length is rejected with the other ranges.
    if not most or config.data.seq_len < 1:
        return config
    # A degree of 1 is the default: all ranks may then share a micro-batch.
    ranks = parallel.context
    if ranks == 1:
        ranks = world_size
    check_degrees(world_size, context=ranks, ulysses=parallel.ulysses, expert=parallel.expert)
    if parallel.layout not in _LAYOUTS:
        raise ConfigError(
            f"parallel.layout={parallel.layout} spreads every document over all ranks, but parallel.tokens_per_rank="
            f"{most} uses as few as possible.\nTry --parallel.layout auto (any of {list(_LAYOUTS)})."
        )
    rows = _largest_rows(config, ranks, world_size)
    if config.train.micro_batch_rows not in (1, rows):
        raise ConfigError(
            f"train.micro_batch_rows={config.train.micro_batch_rows} contradicts parallel.tokens_per_rank={most}, "
            f"which gives {rows}: {ranks} ranks hold at most {rows_at_once(config.data.seq_len, ranks, most)} rows of "
            f"{config.data.seq_len} tokens.\nLeave train.micro_batch_rows out (1), or set "
            "--parallel.tokens_per_rank 0."
        )
    return config.changed({"parallel.context": ranks, "train.micro_batch_rows": rows})


def _largest_rows(config: RunConfig, ranks: int, world_size: int) -> int:
    """Return how many rows a step's largest micro-batch has on ``ranks`` ranks."""
    seq_len, most = config.data.seq_len, config.parallel.tokens_per_rank
    at_once = rows_at_once(seq_len, ranks, most)
    if not at_once:
        raise ConfigError(
            f"data.seq_len={seq_len} does not fit on the {ranks} ranks that share a micro-batch: "
            f"parallel.tokens_per_rank={most} on each is {ranks * most} in total.\nTry --parallel.tokens_per_rank "
            f"{-(-seq_len // ranks)}, --data.seq_len {ranks * most}, or {-(-seq_len // most)} ranks."
        )
    # ``tokens`` must cover full rows on every data rank. Rows per rank need not be a multiple of ``at_once``:
    # micro-batches then differ by at most one row, and the first is the largest.
    groups = world_size // ranks
    unit, tokens = seq_len * groups, config.train.tokens_per_step
    if tokens < unit or tokens % unit:
        below = tokens // unit * unit
        nearest = " or ".join(str(n) for n in (below, below + unit) if n)
        raise ConfigError(
            f"train.tokens_per_step={tokens} is not a multiple of {unit} = data.seq_len {seq_len} × {groups} "
            f"context groups of {ranks} ranks (parallel.tokens_per_rank={most}).\nTry {nearest}."
        )
    return MicroBatches.assign(tokens // seq_len, most_rows=at_once, data_degree=groups).largest


def padded_documents(config: RunConfig, documents: PackedDocuments) -> PackedDocuments:
    """Return a micro-batch's documents including its padding documents."""
    return documents.padded(padded_tokens(config, documents.num_tokens))


def padded_tokens(config: RunConfig, num_tokens: int) -> int:
    """Return a micro-batch's tokens after padding for its ranks; unchanged if the context degree is fixed."""
    parallel = config.parallel
    if not parallel.tokens_per_rank:
        return num_tokens
    return tokens_on_ranks(
        num_tokens, parallel.context, ulysses=parallel.ulysses, tokens_per_rank=parallel.tokens_per_rank
    )
