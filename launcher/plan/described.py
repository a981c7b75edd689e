"""A planned run in words, and the shape of the tables that say the rest."""

from __future__ import annotations

from launcher.config.resolved import ResolvedConfig
from launcher.config.side_by_side import padded_tokens
from launcher.plan.world import World
from launcher.wording import plural

Rows = tuple[list[str], list[list[str]]]
"""Headings and rows of a table."""


def describe_run(config: ResolvedConfig, world: World, document_tokens: int) -> str:
    """Ranks and degrees, and a micro-batch, a line each."""
    parallel, tokens = config.parallel, padded_tokens(config, config.data.seq_len * config.train.micro_batch_rows)
    documents = "one document a row"
    if document_tokens:
        documents = f"documents of {document_tokens:,} tokens"
    return (
        f"{plural(world.ranks, 'rank')} ({world.ranks_per_node} a machine): context {parallel.context}, ulysses "
        f"{parallel.ulysses}, expert {parallel.expert}, ZeRO {config.zero.stage}, {config.train.dtype}, layout "
        f"{parallel.layout}, keep {config.train.keep} on {config.train.store}{_chunks(config)}{_offload(config)}\n"
        f"{tokens:,} tokens a micro-batch, {tokens // parallel.context:,} of them on a rank, {documents}"
    )


def _chunks(config: ResolvedConfig) -> str:
    train = config.train
    if not config.train.chunk_tokens:
        return ""
    return f", chunks of {config.train.chunk_tokens:,} tokens, {plural(train.head_groups, 'group')} of heads"


def _offload(config: ResolvedConfig) -> str:
    """What the columns of weights, gradients and optimiser leave out."""
    found = [
        f"{what} on {where}"
        for what, where in (("optimizer", config.zero.offload), ("weights", config.zero.offload_parameters))
        if where != "none"
    ]
    return "".join(f", {text}" for text in found)
