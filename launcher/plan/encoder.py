"""The encoder's cost in a run, planned as an encoder-only run on the same ranks."""

from __future__ import annotations

from dataclasses import fields
from functools import cache

from launcher.config.config_sections import ModelSection
from launcher.config.resolved import ResolvedConfig
from longctx.architecture.fields import ModelFields, encoder_of
from longctx.batch import PackedDocuments
from parallel.layout.sequence import num_parts


def encoder_run(config: ResolvedConfig) -> ResolvedConfig | None:
    """Return a run with the encoder as its decoder and the sources as its rows; None without an encoder."""
    source = config.data.source_seq_len
    if not config.model.encoder_layers or not source:
        return None
    changed = {f"model.{name}": value for name, value in _changes(config.model).items()}
    # Keep the number of rows per step.
    changed |= {
        "data.seq_len": source,
        "data.source_seq_len": 0,
        "train.tokens_per_step": config.rows_per_step * source,
    }
    return config.changed(changed)


@cache
def _changes(section: ModelSection) -> dict[str, object]:
    """Return the fields in which the encoder's config differs from the model's."""
    model = section.config()
    encoder = encoder_of(model)
    names = [field.name for field in fields(ModelFields)]
    return {name: getattr(encoder, name) for name in names if getattr(encoder, name) != getattr(model, name)}


def num_source_tokens(config: ResolvedConfig) -> int:
    """Return source tokens per micro-batch on each rank; 0 without an encoder."""
    if not config.model.encoder_layers:
        return 0
    parallel, total = config.parallel, config.data.source_seq_len * config.train.micro_batch_rows
    parts = num_parts(parallel.layout, parallel.context, parallel.ulysses)
    # Padded to divide among the ranks (``launcher.training.task_builder``).
    return -(-total // parts) * parts // parallel.context


def source_documents(config: ResolvedConfig, count: int) -> PackedDocuments:
    """Divide a micro-batch's full source rows, padded for the ranks, into ``count`` equal documents."""
    total = num_source_tokens(config) * config.parallel.context
    return PackedDocuments(tuple(number * total // count for number in range(count + 1)))
