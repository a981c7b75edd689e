"""A run's config as it would be on the planned ranks: nothing is left to the machine or the data."""

from __future__ import annotations

from launcher.config.check import check_run
from launcher.config.sections import RunConfig
from launcher.config.side_by_side import settle_context
from launcher.config.zero import zero_options
from launcher.plan.world import World
from longctx.kernels.processor import has_native_bfloat16
from parallel.layout.select import AUTO, choose_layout
from parallel.zero.options import check_device


def settled(config: RunConfig, world: World, *, document_tokens: int, device_type: str = "cuda") -> RunConfig:
    """The config with its dtype, ZeRO stage and layout. ConfigError for what a run would refuse."""
    # A CPU is this machine's, or one like it.
    native = device_type == "cuda" or has_native_bfloat16()
    config = config.resolve(native_bfloat16=native, device_type=device_type)
    check_run(config, world.ranks)
    check_device(zero_options(config.zero), device_type)
    config = settle_context(config, world.ranks)
    # As a run does once it has seen its data: here the documents are known beforehand.
    model, parallel = config.model.config(), config.parallel
    if parallel.layout != AUTO:
        return config
    layout, _ = choose_layout(
        num_tokens=config.data.seq_len * config.train.micro_batch_rows,
        degree=parallel.context,
        ulysses=parallel.ulysses,
        packed=document_tokens % config.data.seq_len > 0 or config.train.micro_batch_rows > 1,
        layers=model.layers,
        window=model.window,
        side_by_side=parallel.tokens_per_rank > 0,
    )
    return config.with_layout(layout)
