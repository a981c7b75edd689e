"""Rules for saved activations and for layers in chunks; candidates for train.chunk_tokens=auto."""

from __future__ import annotations

from launcher.config.config_sections import LEAST_CHUNK, RunConfig
from launcher.config.tokens_per_rank_rules import C, padded_tokens
from longctx.architecture.model_rules import is_read
from longctx.errors import ConfigError
from parallel.mesh import closest_value

_CHUNKS = (16384, 8192, 4096, 2048, LEAST_CHUNK)
_GROUP_FACTORS = (1, 2, 4, 8, 16)
"""Factors on the configured number of head groups."""


def check_kept(config: RunConfig) -> None:
    """Raise ConfigError for activation settings, including their storage, that are impossible or have no effect."""
    train = config.train
    if train.chunk_tokens == "auto":
        _check_either(config)
        return
    if (train.keep != "all" or train.chunk_tokens) and train.recompute_experts == "none":
        key, value = "keep", train.keep
        if train.chunk_tokens:
            key, value = "chunk_tokens", str(train.chunk_tokens)
        raise ConfigError(
            f"train.recompute_experts=none has no effect with train.{key}={value}: blocks are recomputed, with "
            "their experts.\nLeave it out, or set train.keep=all and train.chunk_tokens=0."
        )
    _check_chunks(config)
    if train.store == "device":
        return
    if config.model.num_layers < 2 and not train.chunk_tokens:
        raise ConfigError(
            f"train.store={train.store} has no effect on a one-layer model: the last layer's activations stay on the "
            "device for the backward.\nTry train.store=device."
        )
    if not config.zero.pin_memory:
        raise ConfigError(
            f"train.store={train.store} copies to page-locked memory, and zero.pin_memory=False "
            "turns it off.\nTry train.store=device, or zero.pin_memory=true (ulimit -l)."
        )


def _check_either(config: RunConfig) -> None:
    """Raise ConfigError if neither full rows nor chunks are allowed; a plan chooses among those that are."""
    try:
        check_kept(config.changed({"train.chunk_tokens": 0}))
    except ConfigError:
        check_kept(config.changed({"train.chunk_tokens": LEAST_CHUNK}))


def _check_chunks(config: RunConfig) -> None:
    train, model = config.train, config.model
    if train.chunk_tokens != "auto" and train.chunk_tokens < 0:
        raise ConfigError(
            f"train.chunk_tokens={train.chunk_tokens} must be at least 0. Try 8192, 0 for full rows, or auto."
        )
    if bool(train.store_path) != (train.store == "disk"):
        raise ConfigError(
            f"train.store={train.store} and train.store_path={train.store_path!r} conflict: train.store=disk needs a "
            "folder, other stores use none.\nTry --train.store disk --train.store_path /local/disk, or leave both out."
        )
    if not train.chunk_tokens:
        if train.store == "disk":
            raise ConfigError("train.store=disk needs layers by chunks.\nTry --train.chunk_tokens 8192.")
        if train.head_groups != 1:
            raise ConfigError(
                f"train.head_groups={train.head_groups} needs layers by chunks.\nTry --train.chunk_tokens 8192."
            )
        return
    key_heads = model.num_kv_heads
    # Latent attention computes one key head per query head.
    if model.is_latent:
        key_heads = model.num_heads
    ulysses = config.parallel.ulysses
    # Up to the number of query heads: several groups may share a key head and read its keys one after the other.
    fits = [n for n in range(1, model.num_heads + 1) if model.num_heads % (n * ulysses) == 0]
    fits = [n for n in fits if key_heads % n == 0 or n % key_heads == 0]
    if is_read(model, "global_kv_heads") and model.global_kv_heads:
        fits = [n for n in fits if model.global_kv_heads % n == 0 or n % model.global_kv_heads == 0]
    if not fits:
        divisors = [n for n in range(1, model.num_heads + 1) if model.num_heads % n == 0]
        raise ConfigError(
            f"train.chunk_tokens={train.chunk_tokens} needs parallel.ulysses={ulysses} to divide the "
            f"{model.num_heads} query heads.\nTry parallel.ulysses={closest_value(ulysses, divisors)} (any of "
            f"{divisors}), "
            "or train.chunk_tokens=0."
        )
    if train.head_groups not in fits:
        raise ConfigError(
            f"train.head_groups={train.head_groups} must divide the {key_heads} key heads, or split each one's query "
            f"heads evenly, and parallel.ulysses={ulysses} must divide each group's query heads.\n"
            f"Try train.head_groups={closest_value(train.head_groups, fits)} (any of {fits})."
        )


def chunk_choices(config: C) -> list[C]:
    """Return the candidates for "auto", fastest and largest first: full rows, then chunks with rising head groups.

    Chunks are shorter than a rank's tokens, except the smallest size. Raise ConfigError if no candidate fits the other
    settings.
    """
    tokens = padded_tokens(config, config.data.seq_len * config.train.micro_batch_rows) // config.parallel.context
    chunks = [n for n in _CHUNKS if n < tokens] or [LEAST_CHUNK]
    groups = [n * config.train.head_groups for n in _GROUP_FACTORS]
    by_chunks = [
        config.changed({"train.chunk_tokens": n, "train.head_groups": num_groups})
        for n in chunks
        for num_groups in groups
    ]
    # Invalid combinations are dropped silently: the user did not ask for them. If all are invalid, the first one's
    # error explains the conflict.
    found = [choice for choice in (config.changed({"train.chunk_tokens": 0}), *by_chunks) if _is_valid(choice)]
    if not found:
        check_kept(by_chunks[0])
    return found


def _is_valid(config: RunConfig) -> bool:
    try:
        check_kept(config)
    except ConfigError:
        return False
    return True
