"""Rules between objectives, class heads and images."""

from __future__ import annotations

import math

from launcher.config.config_sections import RunConfig
from longctx.errors import ConfigError
from parallel.layout.layout_choice import AUTO
from parallel.layout.sequence import KINDS, num_parts


def check_images(config: RunConfig) -> None:
    """Raise ConfigError if the objective trains no head of the model, or for options that do not apply to images."""
    _check_heads(config)
    if not config.model.image.is_used:
        if config.data.flip:
            raise ConfigError(
                "data.flip=true mirrors images, but the model reads texts (model.image.height=0). Set data.flip=false."
            )
        return
    for name, wanted, why in (
        ("data.fim_rate", 0, "fill-in-the-middle is for texts"),
        ("data.packing", "best_fit", "images must be complete"),
        ("data.min_rest_tokens", 1, "images must be complete"),
        ("data.mask_whole_words", False, "images have no words"),
        ("validation.sample_tokens", 0, "samples are texts"),
    ):
        value = config.value(name)
        if value != wanted and (name, value) != ("data.packing", "one_document"):
            raise ConfigError(f"{name}={value} does not work with images (model.image): {why}. Set {name}={wanted}.")
    assert config.examples is not None
    config.examples.most_tokens(config.data.seq_len, 0)
    if config.model.image.window:
        _check_windows(config)


def _check_windows(config: RunConfig) -> None:
    """Raise ConfigError if a row cuts an image, or if ranks cannot share a micro-batch of complete images."""
    parallel, seq_len, rows = config.parallel, config.data.seq_len, config.train.micro_batch_rows
    if parallel.tokens_per_rank:
        raise ConfigError(
            f"parallel.tokens_per_rank={parallel.tokens_per_rank} does not work with windows (model.image.window="
            f"{config.model.image.window}): a micro-batch's padding would cut an image.\nTry "
            "--parallel.tokens_per_rank 0, and --parallel.context for the ranks that share an image."
        )
    unit, image_tokens = complete_images(config), config.model.image.num_tokens
    if not seq_len % unit:
        return
    below = seq_len // unit * unit
    nearest = " or ".join(str(n) for n in (below, below + unit) if n)
    why = f"windows need complete images of {image_tokens} tokens"
    if unit > image_tokens:
        why += (
            f", and data.seq_len × train.micro_batch_rows={rows} must split into {_num_parts(config)} equal parts "
            f"(parallel.context={parallel.context}, parallel.layout={parallel.layout})"
        )
    raise ConfigError(f"data.seq_len={seq_len} is not a multiple of {unit}: {why}.\nTry data.seq_len={nearest}.")


def complete_images(config: RunConfig) -> int:
    """Return the number of tokens that must divide a row, so that ranks can share a micro-batch of complete images."""
    parts, rows = _num_parts(config), config.train.micro_batch_rows
    return math.lcm(config.model.image.num_tokens, parts // math.gcd(parts, rows))


def _num_parts(config: RunConfig) -> int:
    """Return the number of equal parts into which the layout cuts a micro-batch."""
    parallel = config.parallel
    # An invalid layout or degree is rejected later.
    if parallel.layout not in (AUTO, *KINDS) or parallel.context % parallel.ulysses:
        return 1
    return num_parts(parallel.layout, parallel.context, parallel.ulysses)


def _check_heads(config: RunConfig) -> None:
    """Raise ConfigError unless the objective trains every head of the model, and no other."""
    objective, classes, weight = config.train.objective, config.model.classes, config.train.class_weight
    predicts_tokens = config.model.predicts_tokens
    if objective == "classes" and not classes:
        raise ConfigError(
            "train.objective=classes needs a class head, but model.classes=0. Set model.classes to the number of "
            "classes in the data."
        )
    if objective == "classes" and predicts_tokens:
        raise ConfigError(
            "train.objective=classes would not train the token head.\nSet model.token_head=false, or "
            "train.objective=causal with train.class_weight=1 to train both."
        )
    if objective != "classes" and not predicts_tokens:
        raise ConfigError(
            f"train.objective={objective} predicts tokens, but the model has no token head "
            f"(model.vocab_size={config.model.vocab_size}, model.token_head={str(config.model.token_head).lower()}).\n"
            "Try --train.objective classes."
        )
    has_both = predicts_tokens and classes > 0
    if weight and not has_both:
        raise ConfigError(
            f"train.class_weight={weight} weights a class head beside a token head (model.classes={classes}, "
            f"train.objective={objective}). Set train.class_weight=0."
        )
    if not has_both:
        return
    if not weight:
        raise ConfigError(
            f"model.classes={classes}: only the loss of train.class_weight trains the class head beside the token "
            "head, and it is 0.\nTry --train.class_weight 1, or model.classes=0."
        )
