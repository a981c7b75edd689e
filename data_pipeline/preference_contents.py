"""Contents of a folder of preferences as plain values: its labels, its references, and the first record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_pipeline.shards.marked import marked_text
from data_pipeline.shards.reader import ShardSet, shard_labels

_SHOWN_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class PreferenceContents:
    """Statistics on a folder's records, and the start of the first one as text."""

    has_labels: bool
    """True if records are single replies with labels, and their second reply belongs to another prompt."""
    undesirable: int
    """Records labelled 0; 0 without labels."""
    reference: Mapping[str, Any] | None
    """Origin of the reference log-likelihoods; None without them."""
    prompt: str
    first: str
    """Chosen reply, or the single one."""
    second: str
    """Rejected reply, or one to another prompt."""
    label: int
    """1, or 0 for an undesirable single reply."""


def preference_contents(shards: ShardSet) -> PreferenceContents:
    """Return a folder's statistics and its first record. Reads all labels, 4 bytes per record."""
    has_labels, undesirable = shards.manifest.has_labelled_replies, 0
    if has_labels:
        num_shards = len(shards.manifest.shards)
        undesirable = sum(int((shard_labels(shards, number) == 0).sum()) for number in range(num_shards))
    reference = None
    if shards.references is not None:
        reference = dict(shards.references.origin)
    texts, label = ["", "", ""], 1
    if shards.num_documents:
        second, label = int(shards.second_starts(np.zeros(1, np.int64))[0]), shards.label(0)
        ids = shards.slices([(0, 0, _SHOWN_TOKENS)], "source")
        ids += shards.slices([(0, 0, min(second, _SHOWN_TOKENS)), (0, second, second + _SHOWN_TOKENS)])
        tokenizer = shards.tokenizer()
        texts = [marked_text(part, tokenizer, np.zeros(len(part), bool)) for part in ids]
    prompt, first, other = texts
    return PreferenceContents(
        has_labels=has_labels,
        undesirable=undesirable,
        reference=reference,
        prompt=prompt,
        first=first,
        second=other,
        label=label,
    )
