"""A run's config as it would be on the planned ranks: nothing is left to the machine or the data."""

from __future__ import annotations

from launcher.config.check import check_run
from launcher.config.sections import RunConfig
from launcher.config.side_by_side import settle_context
from launcher.plan.world import World
from parallel.layout.select import AUTO, choose_layout


def settled(config: RunConfig, world: World, *, document_tokens: int, device_type: str = "cuda") -> RunConfig:
    """The config with its dtype, ZeRO stage and layout. ConfigError for what a run would refuse."""
    config = config.resolve(native_bfloat16=True, device_type=device_type)
    check_run(config, world.ranks)
    config = settle_context(config, world.ranks)
    # As a run does once it has seen its data: here the documents are known beforehand.
    model, parallel = config.model.config(), config.parallel
    if parallel.layout != AUTO:
        return config
    layout, _ = choose_layout(
        num_tokens=config.data.seq_len * config.train.micro_batch_rows,
        degree=parallel.context,
        ulysses=parallel.ulysses,
        packed=bool(document_tokens and config.data.seq_len % document_tokens) or config.train.micro_batch_rows > 1,
        layers=model.layers,
        window=model.window,
        side_by_side=parallel.tokens_per_rank > 0,
    )
    return config.with_layout(layout)
