"""``MergedReader``: a checkpoint of adapters, read as the full model in which they are merged.

Axes: E experts (1 for other projections), O output width, I input width, r rank.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from longctx.architecture.adapter import AdapterShape, factor_names, is_adapter, merged_name
from longctx.checkpoint_format import CheckpointReader
from longctx.config import ModelConfig
from longctx.conversion.tensor_layouts import quantized_layouts
from longctx.kernels.quantized_weights import PackedLayout, fill_rounded


class MergedReader(CheckpointReader):
    """Reader that adds each adapter's update, s·B·A in float32, to its projection's weight.

    The weight is the one that the adapter was trained on: with a quantized base its dequantized values in the run's
    dtype, as PEFT merges into a 4-bit base. So the merged model computes the trained model's values.
    """

    @property
    def model(self) -> dict[str, Any]:
        """ModelConfig fields of a model without adapters."""
        return super().model | {"adapter": dataclasses.asdict(AdapterShape())}

    def names(self) -> list[str]:
        return [name for name in super().names() if not is_adapter(name)]

    def read_range(self, name: str, role: str, start: int, numel: int) -> Tensor:
        values = self._base_range(name, role, start, numel)
        factors = self._factors.get(name)
        if factors is None:
            return values
        a_ErI, b_EOr = (super(MergedReader, self).read(factor) for factor in factors)
        if a_ErI.ndim == 2:
            a_ErI, b_EOr = a_ErI[None], b_EOr[None]
        width, stop = a_ErI.shape[2], start + numel
        size = b_EOr.shape[1] * width
        # Expert after expert: only the rows that the range has a part of.
        for expert in range(start // size, -(-stop // size)):
            first = expert * size
            lo, hi = max(start, first) - first, min(stop, first + size) - first
            rows = slice(lo // width, -(-hi // width))
            update = (b_EOr[expert, rows] @ a_ErI[expert]).flatten()[lo - rows.start * width : hi - rows.start * width]
            values[first + lo - start : first + hi - start].add_(update, alpha=self._scale)
        return values

    def _base_range(self, name: str, role: str, start: int, numel: int) -> Tensor:
        """Read a range of the frozen weights, as forward reads them."""
        layout = self._layouts.get(name)
        if layout is None:
            return super().read_range(name, role, start, numel)

        def read(first: int, out: Tensor) -> None:
            super(MergedReader, self).read_into(name, role, first, out)

        values = torch.empty(numel, dtype=self.dtype)
        fill_rounded(values, layout, read, start=start)
        return values.float()

    def read_into(self, name: str, role: str, start: int, out: Tensor) -> None:
        out.copy_(self.read_range(name, role, start, len(out)))

    @property
    def _config(self) -> ModelConfig:
        return ModelConfig.from_dict(super().model)

    @property
    def _scale(self) -> float:
        return self._config.adapter.scale

    @property
    def _layouts(self) -> dict[str, PackedLayout]:
        return quantized_layouts(self._config)

    @property
    def _factors(self) -> dict[str, tuple[str, str]]:
        """Names of A and B, by the weight to which they belong."""
        weights = dict.fromkeys(merged_name(name) for name in super().names() if is_adapter(name))
        return {weight: factor_names(weight) for weight in weights}


def open_merged(reader: CheckpointReader) -> CheckpointReader:
    """Return a reader for the full model: the same one unless it holds adapters."""
    if reader.base is None:
        return reader
    return MergedReader(reader.folder)
