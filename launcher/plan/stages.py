"""A hierarchical image model's stages, each planned as a run of its own on the same ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache

from launcher.config.config_sections import ModelSection
from launcher.config.resolved import ResolvedConfig
from longctx.architecture.fields import ModelFields
from longctx.architecture.image_stages import stage_configs
from longctx.batch import PackedDocuments


def stage_runs(config: ResolvedConfig) -> list[ResolvedConfig]:
    """Return runs with one stage's layers and tokens each; only the config's own if it has at most one stage."""
    depths = config.model.image.depths
    if len(depths) < 2:
        return [config]
    runs = []
    for number in range(len(depths)):
        changed = {f"model.{name}": value for name, value in _changes(config.model, number).items()}
        # Each stage has a quarter of the tokens before it; rows per step stay.
        seq_len = config.data.seq_len // 4**number
        changed |= {"data.seq_len": seq_len, "train.tokens_per_step": config.rows_per_step * seq_len}
        runs.append(config.changed(changed))
    return runs


def stage_documents(config: ResolvedConfig, documents: PackedDocuments) -> Iterator[PackedDocuments]:
    """Yield a micro-batch's images as each of ``stage_runs`` has them."""
    for number in range(max(1, len(config.model.image.depths))):
        yield PackedDocuments(tuple(bound // 4**number for bound in documents.bounds))


@cache
def _changes(section: ModelSection, number: int) -> dict[str, object]:
    """Return the fields in which a stage's config differs from the model's."""
    model = section.config()
    stage = stage_configs(model)[number]
    names = [field.name for field in fields(ModelFields)]
    return {name: getattr(stage, name) for name in names if getattr(stage, name) != getattr(model, name)}
