"""Frozen weights in 4 or 8 bits: blocks of codes, each with its own scale, and their values again.

Axes: O output width, I input width, E experts; n units at a time, c columns of FP8 blocks.

* ``nf4``: 64 consecutive values of the flattened matrix share a scale, their absolute maximum in float32, and each is
  the nearest of 16 quantiles of a normal distribution, as in QLoRA (arXiv 2305.14314, appendix E): 4.5 bits per weight.
* ``fp8``: a block of 128 × 128 values shares a float32 scale, its absolute maximum / 448, and each value is rounded to
  float8_e4m3fn, as in DeepSeek-V3's checkpoints (arXiv 2412.19437 §3.3): 8.002 bits per weight.

Codes and scales are computed in float32 from the stored values, and values in float32 from codes and scales, rounded
once to the dtype in which they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longctx.kernels.devices import on_cpu

Read = Callable[[int, Tensor], None]
"""(start, out) fills the flat float32 tensor ``out`` with a weight's values from ``start``."""

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""QLoRA's data type: the codes' values, relative to the block's absolute maximum."""
_NF4_BLOCK, _FP8_BLOCK = 64, 128
_FP8, _FP8_LARGEST = torch.float8_e4m3fn, 448.0
_SCALE_BYTES = 4
_CELLS = 2048
"""Cells between −1 and 1, to find a code; no midpoint of two NF4 values is within rounding of a cell's end."""
_TILE_VALUES, DEVICE_TILE_VALUES = 1 << 20, 1 << 23
"""Values converted at a time on a CPU and on an accelerator; bounds the temporary memory."""
TILE_BYTES = 6
"""Temporary bytes for each: a code as an integer, and a value in float32."""


class _Unit(NamedTuple):
    """Blocks that are stored together: their scales, then their codes."""

    numel: int
    num_bytes: int


# A packed matrix is a sequence of units, each quantized by itself: a block of 64 values in NF4, a row of blocks in FP8.
# All units but the last have equally many bytes, and units follow the order of the values. So any range of bytes needs
# only a range of values: a ZeRO rank quantizes its own part of a weight, and no rank ever holds a full-precision copy.
@dataclass(frozen=True)
class PackedLayout:
    """Where the codes and scales of a quantized weight are in its bytes."""

    kind: str
    """``nf4`` or ``fp8``."""
    shape: tuple[int, ...]
    """[O, I], or [E, O, I] for one matrix per expert."""

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the uint8 tensor that stores the weight: bytes, for each expert."""
        return *self.shape[:-2], self.matrix_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return math.prod(self.packed_shape)

    @property
    def matrix_numel(self) -> int:
        """Number of values in one matrix."""
        return math.prod(self.shape[-2:])

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one matrix."""
        whole, rest = divmod(self.matrix_numel, self.unit.numel)
        return whole * self.unit.num_bytes + self._bytes_of(rest)

    @property
    def unit(self) -> _Unit:
        """Size of a full unit."""
        numel = _NF4_BLOCK
        if self.kind == "fp8":
            numel = _FP8_BLOCK * self.shape[-1]
        return _Unit(numel, self._bytes_of(numel))

    def _bytes_of(self, numel: int) -> int:
        """Return the bytes of a unit, which is smaller at the end of a matrix."""
        if not numel:
            return 0
        if self.kind == "fp8":
            return _SCALE_BYTES * -(-self.shape[-1] // _FP8_BLOCK) + numel
        return _SCALE_BYTES + -(-numel // 2)

    def of_experts(self, num_experts: int) -> PackedLayout:
        """Return the layout for another number of experts."""
        return PackedLayout(self.kind, (num_experts, *self.shape[1:]))

    def of_matrix(self) -> PackedLayout:
        """Return the layout for one expert's matrix."""
        return PackedLayout(self.kind, self.shape[-2:])


def empty_parameter(layout: PackedLayout, device: torch.device) -> nn.Parameter:
    """Return an uninitialized frozen parameter for a quantized weight.

    A parameter, so that ZeRO partitions, gathers and frees it like any weight. Bytes are no floating-point numbers: no
    cast to the run's dtype, no optimizer and no gradient norm touches them.
    """
    return nn.Parameter(torch.empty(layout.packed_shape, dtype=torch.uint8, device=device), requires_grad=False)


def dequantized(weight: Tensor, layout: PackedLayout | None, dtype: torch.dtype) -> Tensor:
    """Return a frozen weight for products in ``dtype``: itself, or the values of a quantized one.

    Every product with a weight that may be quantized gets it here, forward and backward: nothing keeps the values in
    between.
    """
    if layout is None:
        return weight
    return dequantize(weight, layout, dtype)


# -------------------------------------------------------------------------------------------------- to codes and scales


def quantize(weight: Tensor, layout: PackedLayout) -> Tensor:
    """Return a weight's codes and scales, uint8 [``packed_shape``]."""
    flat = weight.detach().reshape(-1)
    packed = torch.empty(layout.num_bytes, dtype=torch.uint8, device=weight.device)

    def read(start: int, out: Tensor) -> None:
        out.copy_(flat[start : start + len(out)])

    fill_packed(packed, layout, read)
    return packed.view(layout.packed_shape)


def fill_packed(out: Tensor, layout: PackedLayout, read: Read, *, start: int = 0) -> None:
    """Fill the flat uint8 tensor ``out`` with a packed weight's bytes from ``start``; read only the values needed."""
    stop = start + len(out)
    for part in _parts(layout, lambda unit: unit.num_bytes, layout.matrix_bytes, start, stop):
        values = torch.empty(part.numel, device=out.device)
        read(part.first_value, values)
        packed = _quantize_units(values.view(part.num_units, -1), layout).view(-1)
        lo, hi = max(start, part.first_byte), min(stop, part.first_byte + len(packed))
        out[lo - start : hi - start] = packed[lo - part.first_byte : hi - part.first_byte]


def fill_rounded(out: Tensor, layout: PackedLayout, read: Read, *, start: int = 0) -> None:
    """Fill the flat tensor ``out`` with a weight's values from ``start``, as they are after quantization."""
    stop, table = start + len(out), _nf4_pairs(out.device)
    for part in _parts(layout, lambda unit: unit.numel, layout.matrix_numel, start, stop):
        values = torch.empty(part.numel, device=out.device)
        read(part.first_value, values)
        packed = _quantize_units(values.view(part.num_units, -1), layout)
        values = _dequantize_units(packed, layout, part.numel // part.num_units, table).view(-1)
        lo, hi = max(start, part.first_value), min(stop, part.first_value + part.numel)
        out[lo - start : hi - start] = values[lo - part.first_value : hi - part.first_value]


class _Part(NamedTuple):
    """A few units of one matrix."""

    first_value: int
    numel: int
    first_byte: int
    num_units: int


def _parts(
    layout: PackedLayout, size_of: Callable[[_Unit], int], matrix_size: int, start: int, stop: int
) -> Iterator[_Part]:
    """Yield the units that a range meets, a few at a time; sizes and range count either bytes or values."""
    unit = layout.unit
    unit_size = size_of(unit)
    at = start
    while at < stop:
        matrix, inside = divmod(at, matrix_size)
        first = inside // unit_size
        last = -(-min(stop - matrix * matrix_size, matrix_size) // unit_size)
        last = min(last, first + max(1, _TILE_VALUES // unit.numel))
        whole = layout.matrix_numel // unit.numel
        # A smaller unit at the end is a part by itself.
        if first < whole:
            last = min(last, whole)
        numel = min(last * unit.numel, layout.matrix_numel) - first * unit.numel
        first_value, first_byte = matrix * layout.matrix_numel, matrix * layout.matrix_bytes
        yield _Part(first_value + first * unit.numel, numel, first_byte + first * unit.num_bytes, last - first)
        at = matrix * matrix_size + min(last * unit_size, matrix_size)


def _quantize_units(values_nX: Tensor, layout: PackedLayout) -> Tensor:
    """Return the bytes of ``n`` equal units with float32 values."""
    if layout.kind == "fp8":
        return _quantize_fp8(values_nX.unflatten(1, (-1, layout.shape[-1])))
    absmax_n1 = values_nX.abs().amax(1, keepdim=True)
    codes_nX = _nearest_nf4(values_nX * (1 / absmax_n1.clamp(min=1e-38)))
    if codes_nX.shape[1] % 2:
        codes_nX = nn.functional.pad(codes_nX, (0, 1))
    # The first of two values is in the upper four bits, as in bitsandbytes.
    pairs_nX = codes_nX[:, ::2] << 4 | codes_nX[:, 1::2]
    return torch.cat((absmax_n1.view(torch.uint8), pairs_nX), dim=1)


def _nf4_levels(device: torch.device) -> Tensor:
    """Return the codes' values, [16]."""
    # Filled on the device: the host would wait for a copy to it.
    return torch.cat([torch.full((1,), value, device=device) for value in NF4_VALUES])


def _nearest_nf4(scaled: Tensor) -> Tensor:
    """Return the code with the nearest value to each number from −1 to 1, uint8; for NaN any code."""
    levels = _nf4_levels(scaled.device)
    midpoints = (levels[1:] + levels[:-1]) / 2
    # A binary search takes seven times as long. Instead the range is cut into equal cells, none with two midpoints: the
    # code is that of the cell's start, or the next one after the midpoint in the cell.
    starts = torch.arange(_CELLS, device=scaled.device) / (_CELLS / 2) - 1
    first = torch.bucketize(starts, midpoints)
    midpoint = nn.functional.pad(midpoints, (0, 1), value=2.0)[first]
    cell = ((scaled + 1) * (_CELLS / 2)).int().clamp_(0, _CELLS - 1).flatten()
    codes = first.to(torch.uint8).index_select(0, cell).view_as(scaled)
    return codes + (scaled > midpoint.index_select(0, cell).view_as(scaled))


def _quantize_fp8(values_nRI: Tensor) -> Tensor:
    width = values_nRI.shape[-1]
    columns = -(-width // _FP8_BLOCK)
    padded_nRI = nn.functional.pad(values_nRI, (0, columns * _FP8_BLOCK - width))
    absmax_nc = padded_nRI.unflatten(2, (columns, _FP8_BLOCK)).abs().amax((1, 3))
    scales_nc = (absmax_nc / _FP8_LARGEST).where(absmax_nc != 0, 1.0)
    codes_nRI = (values_nRI / _of_columns(scales_nc, width)).to(_FP8)
    return torch.cat((scales_nc.view(torch.uint8), codes_nRI.flatten(1).view(torch.uint8)), dim=1)


def _of_columns(scales_nc: Tensor, width: int) -> Tensor:
    """Return the scale for each column of a row of blocks, [n, 1, I]."""
    return scales_nc.repeat_interleave(_FP8_BLOCK, dim=1)[:, None, :width]


# ------------------------------------------------------------------------------------------------------------ to values


def dequantize(packed: Tensor, layout: PackedLayout, dtype: torch.dtype) -> Tensor:
    """Return a quantized weight's values, [``shape``] in ``dtype``."""
    unit = layout.unit
    whole, rest = divmod(layout.matrix_numel, unit.numel)
    at_once = max(1, (_TILE_VALUES if on_cpu(packed) else DEVICE_TILE_VALUES) // unit.numel)
    if torch.compiler.is_compiling():
        # The compiler fuses the conversion; unrolled tiles would only make the graph longer.
        at_once = max(1, whole)
    out, table = torch.empty(layout.shape, dtype=dtype, device=packed.device), _nf4_pairs(packed.device)
    matrices = zip(packed.view(-1, layout.matrix_bytes), out.view(-1, layout.matrix_numel), strict=True)
    for bytes_X, values_X in matrices:
        for first in range(0, whole, at_once):
            last = min(whole, first + at_once)
            units_nX = bytes_X[first * unit.num_bytes : last * unit.num_bytes].view(last - first, -1)
            tile = values_X[first * unit.numel : last * unit.numel].view(last - first, -1)
            tile.copy_(_dequantize_units(units_nX, layout, unit.numel, table))
        if rest:
            units_1X = bytes_X[whole * unit.num_bytes :][None]
            values_X[whole * unit.numel :].copy_(_dequantize_units(units_1X, layout, rest, table)[0])
    return out


def _nf4_pairs(device: torch.device) -> Tensor:
    """Return the two values in each byte of NF4 codes, [256, 2]."""
    levels = _nf4_levels(device)
    return torch.stack((levels[:, None].expand(16, 16), levels.expand(16, 16)), dim=-1).flatten(0, 1)


def _dequantize_units(units_nX: Tensor, layout: PackedLayout, numel: int, pairs_P2: Tensor) -> Tensor:
    """Return the values of equal units, float32 [n, numel]; ``pairs`` are ``_nf4_pairs``."""
    columns = 1
    if layout.kind == "fp8":
        columns = -(-layout.shape[-1] // _FP8_BLOCK)
    # Copied, because a view as float32 needs an aligned address, and ZeRO-3 gathers parameters at any.
    scales_nc = units_nX[:, : _SCALE_BYTES * columns].clone(memory_format=torch.contiguous_format).view(torch.float32)
    codes_nX = units_nX[:, _SCALE_BYTES * columns :]
    if layout.kind == "fp8":
        values_nRI = codes_nX.contiguous().view(_FP8).float().unflatten(1, (-1, layout.shape[-1]))
        return values_nRI.mul_(_of_columns(scales_nc, layout.shape[-1])).flatten(1)
    values_nX = nn.functional.embedding(codes_nX.int(), pairs_P2).flatten(1)
    return values_nX[:, :numel].mul_(scales_nc)
