"""Checks for data that cannot be packed into rows; each error suggests an alternative.

Pairs are documents with two sides: a source for the encoder and a target for the decoder. Examples are made from texts
while packing (span corruption, two segments). A mixture's sources are shard folders, not the source side of pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_pipeline.rows.example_rule import ExampleRule
from data_pipeline.rows.examples import num_special_tokens
from data_pipeline.rows.preferences import PreferenceRule
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.reader import ShardSet
from longctx.errors import ConfigError, DataError

_ONE_FOLDER = "put their sources into one folder CORPUS, and use the output of `longctx data build --source CORPUS …`"
"""Advice if a mixture was given and one shard folder is needed."""


def check_source_seq_len(shards: ShardSet, source_seq_len: int) -> None:
    """Raise ConfigError for pairs without ``source_seq_len`` (source tokens per row; 0: unset), or texts with it."""
    check_kind_of_texts(shards)
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


def check_kind_of_texts(shards: ShardSet) -> None:
    """Raise ConfigError for a folder of preferences, which only training with some objectives reads."""
    if shards.manifest.is_preferences:
        raise ConfigError(
            f"{shards.folder} contains preferences: prompts with two replies to compare. Name a folder of texts or "
            "conversations, or train with a train.objective that compares replies."
        )


def check_mixture_options(mixture: str | Path, examples: ExampleRule | None, source_seq_len: int) -> None:
    """Raise ConfigError if ``mixture``, a mixture file's path, is used for pairs or for examples made from texts."""
    if isinstance(examples, PreferenceRule):
        if source_seq_len:
            raise ConfigError(f"data.source_seq_len={source_seq_len} does not apply to {examples}. Leave it out.")
        return
    # Rules for examples have a text of their own, in the plural: "pairs of segments (nsp)".
    if examples is not None:
        raise ConfigError(
            f"{examples} require data from one folder, but {mixture} is a mixture.\n"
            f"Build one folder from all: {_ONE_FOLDER}."
        )
    if source_seq_len:
        raise ConfigError(
            f"data.source_seq_len={source_seq_len} requires pairs, but {mixture} is a mixture, which supports only "
            f"texts and conversations.\nBuild one folder from all pairs: {_ONE_FOLDER}."
        )


def check_mixture_sources(mixture: str | Path, sources: Iterable[tuple[str, Manifest]]) -> None:
    """Raise ConfigError if a mixture's source contains pairs; ``sources`` are its names and manifests."""
    for name, manifest in sources:
        if manifest.has_sources:
            raise ConfigError(
                f"source {name!r} in {mixture} contains pairs, but a mixture supports only texts and conversations.\n"
                f"Build one folder from all pairs: {_ONE_FOLDER}."
            )


def no_rows_error(
    shards: ShardSet,
    examples: ExampleRule | None,
    blocks: Iterable[np.ndarray],
    *,
    seq_len: int,
    source_seq_len: int,
    alternative: str,
) -> ConfigError | DataError:
    """Build the error for an epoch without rows, for the caller to raise.

    ConfigError if documents do not suit the requested rows or examples, DataError if the epoch has no documents.
    ``blocks`` are the epoch blocks' document indices, int64 [n] each, read only if they are pairs. ``alternative`` is
    another remedy that continues the message's last sentence: ", or …", or empty.
    """
    if not shards.num_documents:
        return DataError(f"{shards.folder} contains no documents. Build it again from a source with text.")
    if isinstance(examples, PreferenceRule):
        return ConfigError(
            f"no record of {shards.folder} fits into a row of data.seq_len={seq_len} tokens. Rows contain complete "
            f"records ({examples}): increase data.seq_len{alternative}."
        )
    if examples is not None:
        longest = max(shards.longest_document() - sum(num_special_tokens(shards)), 0)
        return ConfigError(
            f"{examples} require texts with at least {examples.least_tokens} tokens, but the longest text in "
            f"{shards.folder} has {longest}.\nUse a folder with longer texts{alternative}."
        )
    if source_seq_len:
        return _no_pair_fits(shards, seq_len, source_seq_len, blocks, alternative)
    return DataError(f"an epoch of {shards.folder} has no documents: upsample drops them all.")


def _no_pair_fits(
    shards: ShardSet, seq_len: int, source_seq_len: int, blocks: Iterable[np.ndarray], alternative: str
) -> ConfigError:
    """Build the error with the pair that is closest to fitting, and row lengths that hold most pairs."""
    min_factor = np.inf
    closest = suggested = (seq_len, source_seq_len)
    for block, documents in enumerate(blocks):
        lengths, source_lengths = shards.lengths_of(documents), shards.lengths_of(documents, "source")
        # Factor by which rows would have to grow for each pair to fit; the longer side decides.
        factors = np.maximum(lengths / seq_len, source_lengths / source_seq_len)
        pair = int(factors.argmin())
        if factors[pair] < min_factor:
            min_factor, closest = factors[pair], (int(lengths[pair]), int(source_lengths[pair]))
        # One epoch block is a large enough sample for the suggestion; the closest pair may be in any of them.
        if block == 0:
            suggested = (_length_for_most(lengths, seq_len), _length_for_most(source_lengths, source_seq_len))
    return ConfigError(
        f"no pair in {shards.folder} fits data.seq_len={seq_len} and data.source_seq_len={source_seq_len}: the "
        f"shortest has {closest[0]:,} tokens and {closest[1]:,} source tokens.\n"
        f"Try data.seq_len={suggested[0]} and data.source_seq_len={suggested[1]}, which fit most pairs{alternative}."
    )


def _length_for_most(lengths: np.ndarray, minimum: int) -> int:
    """Return the smallest power of two that holds nine in ten of these lengths, or ``minimum`` if that suffices."""
    percentile_90 = int(np.sort(lengths)[9 * len(lengths) // 10])
    if percentile_90 <= minimum:
        return minimum
    return 1 << (percentile_90 - 1).bit_length()
