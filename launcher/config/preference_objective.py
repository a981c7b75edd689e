"""Rules between preferences, the model and the data."""

from __future__ import annotations

from dataclasses import fields

from launcher.config.config_sections import AUTO, RunConfig
from longctx.errors import ConfigError
from longctx.preference_options import PREFERENCE_LOSSES

_SHARED = ("loss", "reference", "beta", "nll_weight")
"""Options that all losses read, or their data."""


def check_preference_objective(config: RunConfig) -> None:
    """Raise ConfigError for a model or data that preferences cannot train, or for options without effect."""
    _check_options(config)
    share, objective = config.data.share_prompts, config.train.objective
    if objective != "preferences":
        if share != AUTO:
            raise ConfigError(
                f"data.share_prompts={share} has no effect with train.objective={objective}. Leave it out, or set "
                "train.objective=preferences."
            )
        return
    for name, wanted, why in (
        ("model.causal", True, "replies are generated from left to right"),
        ("model.encoder_layers", 0, "records have no source text"),
        ("model.mtp_layers", 0, "a preference has no loss for tokens further ahead"),
        ("model.pair_head", "none", "records are no segments"),
        ("model.classes", 0, "records have no class"),
        ("train.z_loss", 0, "it is a sum over tokens"),
        ("train.label_smoothing", 0, "it is a sum over tokens"),
        ("data.fim_rate", 0, "replies must be complete"),
        ("data.packing", "best_fit", "records must be complete"),
        ("data.min_rest_tokens", 1, "records must be complete"),
    ):
        value = config.value(name)
        if value != wanted and (name, value) != ("data.packing", "one_document"):
            raise ConfigError(
                f"{name}={_text(value)} does not work with train.objective=preferences: {why}. Set {name}="
                f"{_text(wanted)}."
            )
    if config.model.image.is_used:
        raise ConfigError(
            f"train.objective=preferences compares texts, but model.image.height={config.model.image.height} makes a "
            "model of images. Set model.image.height=0."
        )

    if share == "on" and not config.can_share_prompts:
        raise ConfigError(
            "data.share_prompts=on needs all tokens of a row on one rank, without parallel.deterministic, and causal "
            f"softmax attention in all layers (parallel.context={config.parallel.context}, parallel.tokens_per_rank="
            f"{config.parallel.tokens_per_rank}).\nSet data.share_prompts=auto: replies then have copies of the prompt."
        )


def _check_options(config: RunConfig) -> None:
    """Raise ConfigError for options in [preference] that the objective or the loss does not read."""
    options, objective = config.preference, config.train.objective
    for field in fields(options):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        if objective != "preferences":
            raise ConfigError(
                f"preference.{field.name}={value} has no effect with train.objective={objective}. Leave it out, or "
                "set train.objective=preferences."
            )
        if field.name not in _SHARED and field.name not in options.kind.coefficients:
            reader = next(name for name, kind in PREFERENCE_LOSSES.items() if field.name in kind.coefficients)
            raise ConfigError(
                f"preference.{field.name}={value} has no effect with preference.loss={options.loss}. Leave it out, or "
                f"set preference.loss={reader}."
            )


def _text(value: object) -> str:
    """Return a value as in a TOML file."""
    return str(value).lower() if isinstance(value, bool) else str(value)
