"""``EncodedSource``: the source that cross attention reads, in addition to the tokens of the batch itself.

Axes: B rows, s tokens of the source on this rank, M model width, K key/value heads, D head size.
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
    """Hidden states of a source behind the encoder: document n of the batch reads document n of these."""

    hidden_BsM: Tensor
    documents: PackedDocuments
    placement: Any = None
    """Where the source's tokens live (``Batch.placement``)."""
    keys: dict[int, tuple[Tensor, Tensor]] | None = None
    """Keys and values [B, s, K, D] by layer, as layers make them: a generation's later tokens read the same ones. None
    keeps none."""


def joined(sources: Sequence[EncodedSource]) -> EncodedSource:
    """Join several sources, document after document, with the keys that layers have made of them."""
    if len(sources) == 1:
        return sources[0]
    keys: dict[int, tuple[Tensor, Tensor]] = {}
    # Sequences that entered together have no keys of their own: for these layers they are made again.
    kept = [source.keys or {} for source in sources]
    for layer in set(kept[0]).intersection(*kept):
        of_layer = [keys_of[layer] for keys_of in kept]
        keys[layer] = torch.cat([k for k, _ in of_layer], dim=1), torch.cat([v for _, v in of_layer], dim=1)
    lengths = [n for source in sources for n in source.documents.lengths]
    hidden_BsM = torch.cat([source.hidden_BsM for source in sources], dim=1)
    return EncodedSource(hidden_BsM, PackedDocuments.of_lengths(lengths), keys=keys)
