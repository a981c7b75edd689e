"""Checks of preferences: the loss reads these records, and their reference is the model that it means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from data_pipeline.shards.reader import ShardSet
from launcher.config.resolved import ResolvedConfig
from launcher.evaluation.model_source import find_model, open_reader
from launcher.training.run_origin import Kind
from longctx.errors import ConfigError
from longctx.preference_options import PREFERENCE_LOSSES


def check_replies(config: ResolvedConfig, folders: Sequence[ShardSet], origin: Kind) -> None:
    """Raise ConfigError unless the loss reads this kind of records, with references of the model that it means."""
    if config.train.objective != "preferences":
        return
    name, kind = config.preference.loss, config.preference.kind
    for shards in folders:
        is_labelled = shards.manifest.has_labelled_replies
        if is_labelled == kind.is_paired:
            others = [other for other, of in PREFERENCE_LOSSES.items() if of.is_paired != is_labelled]
            contents = "single replies with labels" if is_labelled else "pairs of replies"
            raise ConfigError(
                f"preference.loss={name} does not read {shards.folder}: it contains {contents}.\nTry --preference.loss "
                f"{others[0]} (one of {', '.join(others)}), or other data."
            )
        if kind.needs_reference:
            _check_reference(config, shards, origin)


def _check_reference(config: ResolvedConfig, shards: ShardSet, origin: Kind) -> None:
    """Raise ConfigError without references, or if they come from weights that the run does not start from."""
    start = config.run.start_from
    command = f"longctx score --references --data {shards.folder} --checkpoint {start}"
    if start == "no":
        command = f"longctx score --references --data {shards.folder} --checkpoint DIR"
    if shards.references is None:
        without = [name for name, of in PREFERENCE_LOSSES.items() if not of.needs_reference]
        raise ConfigError(
            f"preference.loss={config.preference.loss} compares with a reference model, but {shards.folder} has no "
            f"log-likelihoods of one.\nStore them with `{command}`, or try --preference.loss {without[0]}."
        )
    # A run that resumes has moved on from its reference.
    if config.preference.reference == "any" or origin != "started" or start == "no":
        return
    weights = open_reader(find_model(Path(start)))[2]
    origin_of, rope = shards.references.origin, json.loads(json.dumps(asdict(config.model.config().rope)))
    # [model.rope] may stretch what the checkpoint's config says, and only that was scored.
    differing = [name for name, value in rope.items() if origin_of.get("rope", rope).get(name) != value]
    if differing:
        raise ConfigError(
            f"the log-likelihoods in {shards.folder} come from a model with another rope than the run's ([model.rope] "
            f"{', '.join(differing)}): the run would not start at its reference.\nStore them again from a "
            "Hugging Face folder whose config.json has the run's rope, and start from it, or set "
            "preference.reference=any."
        )
    found = origin_of.get("weights")
    if found != weights:
        raise ConfigError(
            f"the log-likelihoods in {shards.folder} come from other weights ({found}, "
            f"{origin_of.get('checkpoint')}) than run.start_from={start} ({weights}).\nStore them again "
            f"with `{command}`, or set preference.reference=any to hold the model near another one."
        )
