"""Rules between an objective, the side that tokens see, and the data that go with both."""

from __future__ import annotations

from launcher.config.sections import DataSection, RunConfig
from longctx.errors import ConfigError

_MASK_OPTIONS = ("mask_rate", "mask_whole_words", "mask_static")
"""Keys of ``[data]`` that the masked objective alone reads."""


def check_objective(config: RunConfig) -> None:
    """ConfigError for a model that sees what it is to predict, and for options that the objective does not read."""
    objective, causal = config.train.objective, config.model.causal
    if objective == "causal" and not causal:
        raise ConfigError(
            "train.objective=causal predicts the next token, and with model.causal=false every token sees it.\n"
            "Try --train.objective masked, or --model.causal true."
        )
    if objective == "masked" and causal:
        raise ConfigError(
            "train.objective=masked hides tokens, and a causal model sees only what lies before them.\n"
            "Try --model.causal false, or --train.objective causal."
        )
    if objective == "masked":
        # Its own rule of what it may be.
        assert config.mask is not None
        if config.validation.sample_tokens:
            raise ConfigError(
                f"validation.sample_tokens={config.validation.sample_tokens} is text that a model goes on with, and "
                "one that sees both sides continues nothing. Set validation.sample_tokens=0."
            )
        if config.data.fim_rate:
            raise ConfigError(
                f"data.fim_rate={config.data.fim_rate} is for train.objective=causal: what fills a gap is read behind "
                "it. Set data.fim_rate=0."
            )
        return
    for name in _MASK_OPTIONS:
        value, default = getattr(config.data, name), getattr(DataSection(), name)
        if value != default:
            raise ConfigError(
                f"data.{name}={value} means nothing to train.objective={objective}. Leave it out, or set "
                "train.objective=masked."
            )
