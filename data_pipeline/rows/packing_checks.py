"""Checks for data that cannot be packed into rows; each error suggests an alternative."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_pipeline.rows.example_rule import ExampleRule
from data_pipeline.rows.examples import num_special_tokens
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.reader import ShardSet
from longctx.errors import ConfigError, DataError

_ONE_FOLDER = "put their sources into one folder CORPUS, and use the output of `longctx data build --source CORPUS …`"


def check_source_seq_len(shards: ShardSet, source_seq_len: int) -> None:
    """Raise ConfigError unless pairs come with a source length, and other documents without one."""
    if shards.manifest.has_sources and not source_seq_len:
        raise ConfigError(
            f"{shards.folder} contains pairs, which require an encoder for their sources. Set data.source_seq_len, the "
            "maximum source tokens per row, and model.encoder_layers."
        )
    if source_seq_len and not shards.manifest.has_sources:
        raise ConfigError(
            f"data.source_seq_len={source_seq_len} requires pairs, but {shards.folder} contains none. Build some: "
            "longctx data build --source-field NAME --text-field NAME …, or set data.source_seq_len=0."
        )


def check_one_folder(mixture: str | Path, examples: ExampleRule | None, source_seq_len: int) -> None:
    """Raise ConfigError if a mixture is used for pairs or for examples made from texts."""
    if examples is not None:
        raise ConfigError(
            f"{examples} require texts from one folder, but {mixture} is a mixture.\n"
            f"Build one folder from all: {_ONE_FOLDER}."
        )
    if source_seq_len:
        raise ConfigError(
            f"data.source_seq_len={source_seq_len} requires pairs, but {mixture} is a mixture, which supports only "
            f"texts and conversations.\nBuild one folder from all pairs: {_ONE_FOLDER}."
        )


def check_no_pairs(mixture: str | Path, sources: Iterable[tuple[str, Manifest]]) -> None:
    """Raise ConfigError if a mixture's source, given as name and manifest, contains pairs."""
    for name, manifest in sources:
        if manifest.has_sources:
            raise ConfigError(
                f"source {name!r} in {mixture} contains pairs, but a mixture supports only texts and conversations.\n"
                f"Build one folder from all pairs: {_ONE_FOLDER}."
            )


def no_row(
    shards: ShardSet,
    examples: ExampleRule | None,
    budgets: tuple[int, int],
    blocks: Iterable[np.ndarray],
    alternative: str,
) -> ConfigError | DataError:
    """Build the error for an epoch without rows, given its documents in blocks, with a suggestion.

    ``budgets`` are the tokens per row for targets and sources; ``alternative`` is another remedy for the message.
    """
    if not shards.num_documents:
        return DataError(f"{shards.folder} contains no documents. Build it again from a source with text.")
    if examples is not None:
        longest = max(shards.longest_document() - sum(num_special_tokens(shards)), 0)
        return ConfigError(
            f"{examples} require texts with at least {examples.least_tokens} tokens, but the longest text in "
            f"{shards.folder} has {longest}.\nUse a folder with longer texts{alternative}."
        )
    if budgets[1]:
        return _no_pair_fits(shards, budgets, blocks, alternative)
    return DataError(f"an epoch of {shards.folder} has no documents: upsample drops them all.")


def _no_pair_fits(
    shards: ShardSet, budgets: tuple[int, int], blocks: Iterable[np.ndarray], alternative: str
) -> ConfigError:
    closest = np.inf
    shortest, wanted = budgets, budgets
    for documents in blocks:
        side_lengths = shards.lengths_of(documents), shards.lengths_of(documents, "source")
        # Factor by which rows would have to grow for each pair to fit.
        factors = np.maximum(side_lengths[0] / budgets[0], side_lengths[1] / budgets[1])
        pair = int(factors.argmin())
        if factors[pair] < closest:
            closest, shortest = factors[pair], (int(side_lengths[0][pair]), int(side_lengths[1][pair]))
        if wanted == budgets:
            # One block suffices to estimate row lengths that hold most pairs.
            wanted = (_roomy(side_lengths[0], budgets[0]), _roomy(side_lengths[1], budgets[1]))
    return ConfigError(
        f"no pair in {shards.folder} fits data.seq_len={budgets[0]} and data.source_seq_len={budgets[1]}: the shortest "
        f"has {shortest[0]:,} tokens and {shortest[1]:,} source tokens.\n"
        f"Try data.seq_len={wanted[0]} and data.source_seq_len={wanted[1]}, which fit most pairs{alternative}."
    )


def _roomy(lengths: np.ndarray, least: int) -> int:
    """Return the smallest power of two that holds nine in ten of these lengths, or ``least`` if that suffices."""
    most = int(np.sort(lengths)[9 * len(lengths) // 10])
    if most <= least:
        return least
    return 1 << (most - 1).bit_length()
