"""EncodedSource: the source that cross attention reads, in addition to the batch's own tokens.

Axes: B rows, s source tokens on this rank, M model width, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longctx.batch import PackedDocuments


@dataclass(frozen=True, eq=False)
class EncodedSource:
    """A source's hidden states after the encoder: document n in the batch reads document n here."""

    hidden_BsM: Tensor
    documents: PackedDocuments
    placement: Any = None
    """Location of the source's tokens (``Batch.placement``)."""
    keys: dict[int, tuple[Tensor, Tensor]] | None = None
    """Each layer's keys and values [B, s, K, D], for a generation's later tokens to reuse; None disables this cache."""


def join_sources(sources: Sequence[EncodedSource]) -> EncodedSource:
    """Join several sources, document after document, with the keys that layers have cached for them."""
    if len(sources) == 1:
        return sources[0]
    keys: dict[int, tuple[Tensor, Tensor]] = {}
    # Sequences that entered together have no separate keys, so a layer keeps keys only if every source has them.
    kept = [source.keys or {} for source in sources]
    for layer in set(kept[0]).intersection(*kept):
        of_layer = [keys_of[layer] for keys_of in kept]
        keys[layer] = torch.cat([k for k, _ in of_layer], dim=1), torch.cat([v for _, v in of_layer], dim=1)
    lengths = [n for source in sources for n in source.documents.lengths]
    hidden_BsM = torch.cat([source.hidden_BsM for source in sources], dim=1)
    return EncodedSource(hidden_BsM, PackedDocuments.of_lengths(lengths), keys=keys)
