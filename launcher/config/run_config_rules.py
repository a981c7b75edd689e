"""Rules between config keys, and between keys and the number of ranks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

from data_pipeline.stores.urls import ObjectPath, is_url, locate
from launcher.config.config_sections import ModelSection, RunConfig, TrainSection
from launcher.config.objective import check_objective
from launcher.config.saved_activation_rules import check_kept
from launcher.config.tokens_per_rank_rules import padded_tokens, with_context
from launcher.config.zero_section import check_zero_section
from longctx.architecture.layer_specs import mixers_of
from longctx.errors import ConfigError, DataError
from longctx.kernels.attention.kernel_selection import KERNELS
from parallel.layout.layout_choice import check_choice
from parallel.mesh import check_degrees
from parallel.parallelize import check_experts, check_layers
from parallel.schedule.head_split import check_heads


def check_run(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError for the first broken rule between fields, or between fields and the world size."""
    _check_finite(config)
    # With parallel.tokens_per_rank, the ranks and rows per micro-batch follow from it; all rules below apply to the
    # result.
    config = with_context(config, world_size)
    # Degrees first: the messages of the later rules divide by them.
    check_degrees(
        world_size,
        context=config.parallel.context,
        ulysses=config.parallel.ulysses,
        expert=config.parallel.expert,
        valid=lambda name, degrees: _valid_degrees(config, world_size, name, degrees),
    )
    check_experts(config.model, config.parallel.expert, world_size)
    check_zero_section(config, world_size)
    _check_built(config)
    _check_ranges(config)
    _check_retention(config)
    if config.checkpoint.store:
        store_place(config.checkpoint.store)
    _check_routing(config)
    check_objective(config)
    check_kept(config)
    _check_step(config, world_size)
    tokens = padded_tokens(config, config.data.seq_len * config.train.micro_batch_rows)
    # A row may hold several images, and an image's rule has its own check.
    is_text = not config.model.image.is_used
    if is_text and config.model.position == "learned" and config.data.seq_len > config.model.max_positions:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} exceeds the table of learned positions, "
            f"model.max_positions={config.model.max_positions}.\nTry --data.seq_len {config.model.max_positions}."
        )
    check_choice(config.parallel.layout, tokens, config.parallel.context, config.parallel.ulysses)
    for mixer in mixers_of(config.model.config()):
        check_heads(config.model.num_heads, mixer.key_heads(config.model.config()).num_heads, config.parallel.ulysses)
    check_layers(config.model, config.parallel.layout, config.parallel.context // config.parallel.ulysses)


def _valid_degrees(config: RunConfig, world_size: int, name: str, degrees: list[int]) -> list[int]:
    """Return degrees that form a valid run; failing that, those valid with another tokens_per_step; or all."""
    # A degree suggested in an error message should itself start a run, so all rules are tried with each.
    configs = {degree: config.changed({f"parallel.{name}": degree}) for degree in degrees}
    fits = [degree for degree, changed in configs.items() if _is_run(changed, world_size)]
    if fits:
        return fits
    for degree, changed in configs.items():
        groups = world_size // changed.parallel.context
        step = changed.data.seq_len * changed.train.micro_batch_rows * max(1, groups)
        if _is_run(changed.changed({"train.tokens_per_step": step}), world_size):
            fits.append(degree)
    return fits or degrees


def _is_run(config: RunConfig, world_size: int) -> bool:
    try:
        check_run(config, world_size)
    except ConfigError:
        return False
    return True


def _check_finite(config: RunConfig) -> None:
    """Raise ConfigError for infinite or NaN values: TOML allows them, comparisons miss them, no checkpoint records
    them.
    """
    for section in dataclasses.fields(config):
        for key, value in dataclasses.asdict(getattr(config, section.name)).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{section.name}.{key}={value} must be a finite number.")


def _check_built(config: RunConfig) -> None:
    kernels = ["auto"]
    kernels.extend(KERNELS)
    if config.parallel.kernel not in kernels:
        raise ConfigError(f"parallel.kernel={config.parallel.kernel!r} is unknown. Try one of {kernels}.")


_EXPERT_OPTIONS = (
    "parallel.expert_tile_tokens",
    "train.recompute_experts",
    "train.record_routing",
    "train.replay_routing",
    "model.balance_scope",
    "model.router_z_loss_weight",
    "model.selection_bias_rate",
    "model.router_jitter",
    "model.capacity_factor",
)
"""Options without effect in a model without experts."""


def _check_routing(config: RunConfig) -> None:
    """Raise ConfigError for expert options without experts, or for a routing folder that is both read and written."""
    # An option without effect is an error: its user expects one.
    if not config.model.num_experts:
        _refuse_expert_options(config)
    folders = {key: getattr(config.train, key) for key in ("record_routing", "replay_routing")}
    for key, folder in folders.items():
        if not folder.strip():
            raise ConfigError(f"train.{key}={folder!r} must name a folder. Try {key}=no to turn it off.")
    # Resolve paths, so that two spellings of one folder compare equal.
    given = [Path(folder).resolve() for folder in folders.values() if folder != "no"]
    if len(given) != len(set(given)):
        raise ConfigError(
            f"train.record_routing and train.replay_routing are the same folder, {folders['record_routing']!r}: each "
            "step would overwrite its own input. Set another folder for train.record_routing."
        )


def _refuse_expert_options(config: RunConfig) -> None:
    defaults = RunConfig(model=ModelSection())
    for name in _EXPERT_OPTIONS:
        value, default = config.value(name), defaults.value(name)
        # "auto" resolves to 0, so a dense run's own config.toml may contain it.
        if name == "parallel.expert_tile_tokens" and not value:
            continue
        if value != default:
            raise ConfigError(
                f"{name}={value} has no effect on a model without experts (model.num_experts=0).\n"
                f"Leave it out ({name}={default}), or set model.num_experts."
            )


_STORES = "Try s3://BUCKET/RUN or gs://BUCKET/RUN."


def store_place(address: str, key: str = "checkpoint.store") -> ObjectPath:
    """Parse a store address, the value of ``key``. Raise ConfigError if it is no store folder."""
    if not is_url(address):
        raise ConfigError(f"{key}={address!r} is not a store URL. {_STORES}")
    try:
        place = locate(address)
    except DataError as error:
        # The address may contain a secret, so it is not shown.
        raise ConfigError(f"{key}: {error}") from None
    if not isinstance(place, ObjectPath):
        raise ConfigError(f"{key}={address} is a local folder, not a store. {_STORES}")
    if not place.key:
        raise ConfigError(f"{key}={address} is a bucket, and a run needs a folder in it. {_STORES}")
    return place


def _number(value: int | Literal["auto"], least: int) -> int:
    """Return the number, or its lower bound ``least`` for "auto"."""
    if value == "auto":
        return least
    return value


def _check_ranges(config: RunConfig) -> None:
    at_least = {
        "data.seq_len": (config.data.seq_len, 1),
        "train.steps": (config.train.steps, 1),
        "train.micro_batch_rows": (config.train.micro_batch_rows, 1),
        "data.prefetch_steps": (config.data.prefetch_steps, 0),
        "data.workers": (config.data.workers, 1),
        "train.stop_after": (config.train.stop_after, 0),
        "train.warmup_steps": (config.train.warmup_steps, 0),
        "train.clip_norm": (config.train.clip_norm, 0),
        "train.weight_decay": (config.train.weight_decay, 0),
        "train.eps": (config.train.eps, 0),
        "train.z_loss": (config.train.z_loss, 0),
        "train.mtp_weight": (config.train.mtp_weight, 0),
        "train.class_weight": (config.train.class_weight, 0),
        "train.skip_steps": (config.train.skip_steps, 0),
        "train.spike_sigmas": (config.train.spike_sigmas, 0),
        "checkpoint.every_steps": (config.checkpoint.every_steps, 0),
        "checkpoint.keep_last": (config.checkpoint.keep_last, 0),
        "checkpoint.keep_every": (config.checkpoint.keep_every, 0),
        "checkpoint.keep_best": (config.checkpoint.keep_best, 0),
        "validation.every_steps": (config.validation.every_steps, 0),
        "validation.rows": (config.validation.rows, 0),
        "validation.sample_tokens": (config.validation.sample_tokens, 0),
        "run.seed": (config.run.seed, 0),
        "run.log_every": (config.run.log_every, 1),
        "run.replicas_every": (config.run.replicas_every, 0),
        "run.audit_every": (config.run.audit_every, 0),
        "parallel.expert_tile_tokens": (_number(config.parallel.expert_tile_tokens, 0), 0),
        "zero.reduce_bucket_size": (config.zero.reduce_bucket_size, 1),
        "zero.prefetch_bucket_size": (config.zero.prefetch_bucket_size, 0),
        "zero.max_live_parameters": (config.zero.max_live_parameters, 0),
        "zero.param_persistence_threshold": (config.zero.param_persistence_threshold, 0),
        "zero.sub_group_size": (_number(config.zero.sub_group_size, 1), 1),
    }
    for name, (value, least) in at_least.items():
        # Not `value < least`, which NaN would pass.
        if not value >= least:
            raise ConfigError(f"{name}={value} must be at least {least}.")
    if not 0 <= config.run.max_seconds < float("inf"):
        raise ConfigError(f"run.max_seconds={config.run.max_seconds} must be a number of seconds, or 0 for no limit.")
    positive = {
        "train.lr": config.train.lr,
        "run.timeout_seconds": config.run.timeout_seconds,
        "run.meet_seconds": config.run.meet_seconds,
        "run.orphan_seconds": config.run.orphan_seconds,
    }
    for name, value in positive.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name}={value} must be a positive number.")
    for name in ("beta1", "beta2", "momentum", "final_lr_ratio", "label_smoothing"):
        value = getattr(config.train, name)
        # Adam divides by 1 − beta^step, and smoothing of 1 removes the target.
        if not 0 <= value <= 1 or (name != "final_lr_ratio" and value == 1):
            raise ConfigError(f"train.{name}={value} must be between 0 and 1.")
    _check_schedule(config.train)


def _check_schedule(train: TrainSection) -> None:
    """Raise ConfigError for a schedule without its starting point, or with options that it does not read."""
    if train.schedule != "inverse_sqrt":
        return
    if not train.warmup_steps:
        raise ConfigError(
            "train.schedule=inverse_sqrt decays after the warm-up, and train.warmup_steps=0.\n"
            "Set it, such as train.warmup_steps=4000."
        )
    if train.final_lr_ratio != TrainSection().final_lr_ratio:
        raise ConfigError(
            f"train.final_lr_ratio={train.final_lr_ratio} is the end of a cosine, and train.schedule=inverse_sqrt has "
            "no end. Leave it out, or set train.schedule=cosine."
        )


def _check_retention(config: RunConfig) -> None:
    """Raise ConfigError for retention rules without effect, or for checkpoints that are never saved."""
    checkpoint, validation = config.checkpoint, config.validation
    for key in ("keep_every", "keep_best"):
        value = getattr(checkpoint, key)
        if value and not checkpoint.keep_last:
            raise ConfigError(
                f"checkpoint.{key}={value} has no effect: checkpoint.keep_last=0 keeps all checkpoints.\n"
                "Try checkpoint.keep_last=1."
            )
    every, steps = checkpoint.keep_every, checkpoint.every_steps
    if every and (not steps or every % steps):
        nearest = 0
        if steps:
            nearest = max(1, round(every / steps)) * steps
        raise ConfigError(
            f"checkpoint.keep_every={every} is not a multiple of checkpoint.every_steps={steps}: no save is at "
            f"such a step. Try checkpoint.keep_every={nearest}."
        )
    if not checkpoint.keep_best:
        return
    if not validation.rows:
        raise ConfigError(
            f"checkpoint.keep_best={checkpoint.keep_best} compares held-out losses, and validation.rows=0 turns "
            "validation off. Try validation.rows=16."
        )
    # At the last step both happen; earlier checkpoints need a validation at their own step.
    if steps and (not validation.every_steps or steps % validation.every_steps):
        raise ConfigError(
            f"checkpoint.keep_best={checkpoint.keep_best} compares held-out losses of saved weights, but "
            f"checkpoint.every_steps={steps} is not a multiple of validation.every_steps={validation.every_steps}.\n"
            f"Try validation.every_steps={steps}."
        )


def _check_step(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError unless tokens_per_step is a multiple of one micro-batch on every data rank."""
    # With tokens_per_rank, micro-batches may differ by a row; ``with_context`` checks that rule.
    if config.parallel.tokens_per_rank:
        return
    data_degree = world_size // config.parallel.context
    unit = config.data.seq_len * config.train.micro_batch_rows * data_degree
    tokens = config.train.tokens_per_step
    if tokens < unit or tokens % unit:
        # With fewer tokens than one micro-batch per rank there is no multiple below.
        below = tokens // unit * unit
        nearest = " or ".join(str(n) for n in (below, below + unit) if n)
        raise ConfigError(
            f"train.tokens_per_step={tokens} is not a multiple of {unit} = data.seq_len {config.data.seq_len} × "
            f"train.micro_batch_rows {config.train.micro_batch_rows} × data degree {data_degree}.\nTry {nearest}."
        )
