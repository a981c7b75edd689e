"""Dtype of each converted tensor. Bits are lost only on request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from longctx.checkpoint_format import CheckpointReader, is_buffer
from longctx.errors import CheckpointError
from longctx.kernels.memory import trim_heap

_BLOCK = 4 * 2**20
"""Checkpoint values to read at a time: pages that were read stay resident until the file is closed."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def own_dtypes(reader: CheckpointReader) -> dict[str, torch.dtype]:
    """Return a lossless dtype per tensor: float32, or its own if the model was imported and not trained since."""
    origin = reader.manifest["training"].get("imported")
    if origin is None:
        return dict.fromkeys(reader.names(), torch.float32)
    # An import's manifest lists only tensors with a dtype other than the default.
    default = origin.get("dtype", reader.manifest["dtype"])
    return {name: getattr(torch, origin.get("dtypes", {}).get(name, default)) for name in reader.names()}


def export_dtypes(reader: CheckpointReader, requested: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the export dtype per tensor: as requested now or at import, otherwise as in ``own_dtypes``.

    A router's correction bias is never narrowed.
    """
    own = own_dtypes(reader)
    origin = reader.manifest["training"].get("imported")
    if origin is not None and requested is None:
        # The import may have requested a dtype other than the model's own.
        default = reader.manifest["dtype"]
        if default != origin.get("dtype", default):
            requested = reader.dtype
    if requested is None:
        return own
    return own | {name: requested for name in own if not is_buffer(name)}


def lossy_casts(before: Mapping[str, torch.dtype], after: Mapping[str, torch.dtype]) -> dict[str, int]:
    """Count tensors cast to a dtype that cannot hold all their values, by ``"float32 → bfloat16"``."""
    casts = Counter((before[name], after[name]) for name in before)
    # A dtype holds all values of another if the two promote to it.
    return {
        f"{dtype_name(old)} → {dtype_name(new)}": count
        for (old, new), count in casts.items()
        if torch.promote_types(old, new) != new
    }


def read_master(reader: CheckpointReader, name: str, dtype: torch.dtype, *, is_exact: bool = False) -> Tensor:
    """Read a checkpoint tensor, cast to ``dtype``; in addition to the result, memory holds one range of its values.

    Raise CheckpointError if a value would become infinite, or if ``is_exact`` is set and a value would change.
    """
    shape = reader.shape(name)
    if math.prod(shape) >= _BLOCK:
        # Memory that earlier tensors freed and the C library kept would add to this tensor's peak.
        trim_heap()
    tensor = torch.empty(shape, dtype=dtype)
    flat = tensor.view(-1)
    for start in range(0, len(flat), _BLOCK):
        values = reader.read_range(name, "master", start, min(_BLOCK, len(flat) - start))
        result = values.to(dtype)
        if dtype == torch.float16 and not torch.equal(result.isfinite(), values.isfinite()):
            raise CheckpointError(f"{name} has values beyond float16's 65504. Choose bfloat16 or float32.")
        # Compare bits, not values: −0 equals 0, and NaN does not equal itself.
        if is_exact and not torch.equal(result.to(torch.float32).view(torch.int32), values.view(torch.int32)):
            raise CheckpointError(f"{name} cannot be stored as {dtype_name(dtype)} without losing bits.")
        flat[start : start + len(values)] = result
    return tensor
