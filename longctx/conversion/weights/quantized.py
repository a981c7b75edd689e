"""Quantised weights of a Hugging Face folder, read as bfloat16, each tensor once.

    fp8      weight [R, C] float8 E4M3, scale of its block, row or all: bfloat16(float32(weight) · scale). A scale that
             is not float32 multiplies in its own dtype, as in compressed-tensors.
    mxfp4    blocks [E, R, G, 16] of two E2M1 numbers a byte, scales [E, R, G]: number · 2^(scale − 127), the low half
             of a byte first; groups of 32 numbers are along a row, and transformers' unpacked files are [E, G·32, R]

Besides the stored tensor and the result, memory holds some rows in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.conversion.tensor_mismatches import format_names
from longctx.conversion.weights.weights_folder import WeightsFolder
from longctx.errors import CheckpointError
from longctx.families.quantization import Quantization
from longctx.kernels.memory import trim_heap

_ROWS = 1 << 20
"""Values to scale at a time, at least a block of rows."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BLOCKS, _SCALES = "_blocks", "_scales"
_ACTIVATIONS = (".input_scale", ".k_scale", ".v_scale")
"""Activation scales for inference; weights do not need them."""


class DequantizedFolder(WeightsFolder):
    """Folder view that presents quantised tensors as bfloat16. Raise CheckpointError if one has no scale."""

    def __init__(self, disk: WeightsFolder, scheme: Quantization) -> None:
        """Wrap ``disk``, the folder as stored."""
        self.folder, self._disk, self._scheme = disk.folder, disk, scheme
        stored = {name for name in disk.names() if not name.endswith(_ACTIVATIONS)}
        # Names as in an unquantised folder: its readers never ask for scales.
        if scheme.kind == "mxfp4":
            self._scale_of = _mxfp4_scales(disk, stored)
            self._names_read = stored - {name + end for name in self._scale_of for end in (_BLOCKS, _SCALES)}
        else:
            self._scale_of = _fp8_scales(disk, stored, scheme)
            self._names_read = stored - set(self._scale_of.values())
        self._names_read |= set(self._scale_of)

    def files(self) -> set[str]:
        return self._disk.files()

    def names(self) -> set[str]:
        """Return all tensor names, without scales."""
        return set(self._names_read)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._scale_of and self._scheme.kind == "mxfp4":
            shape = self._disk.shape(name + _BLOCKS)
            # Two numbers per byte, and the last two axes swapped, as in transformers' own unpacked files.
            return shape[0], 32 * shape[-2], shape[-3]
        return self._disk.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        if name in self._scale_of:
            return torch.bfloat16
        return self._disk.dtype(name)

    def stored_dtype(self, name: str) -> torch.dtype | None:
        if name in self._scale_of:
            return torch.bfloat16
        return self._disk.stored_dtype(name)

    def read_stored(self, name: str) -> Tensor:
        """Return the tensor, dequantised if needed, in any dtype."""
        if name in self._scale_of:
            return self.read(name)
        return self._disk.read_stored(name)

    def read(self, name: str) -> Tensor:
        """Return the tensor, dequantised if it is stored quantised."""
        scale = self._scale_of.get(name)
        if scale is None:
            return self._disk.read(name)
        # Memory that earlier tensors freed and the C library kept would add to this tensor's peak.
        trim_heap()
        if self._scheme.kind == "mxfp4":
            return _from_mxfp4(self._disk.read_stored(name + _BLOCKS), self._disk.read_stored(scale))
        return _from_fp8(self._disk.read_stored(name), self._disk.read(scale), self._scheme.block)


def _fp8_scales(disk: WeightsFolder, names: set[str], scheme: Quantization) -> dict[str, str]:
    """Return each float8 tensor's scale, checked for the shape that the scheme requires."""
    found, missing, invalid = {}, [], []
    # The files show which weights are quantised: configs name the modules that are not, with their own patterns.
    for name in sorted(names):
        if disk.stored_dtype(name) != torch.float8_e4m3fn:
            continue
        scale = name + scheme.scales
        if scale not in names:
            missing.append(scale)
            continue
        found[name] = scale
        shape, scale_shape = disk.shape(name), disk.shape(scale)
        if len(shape) != 2 or scale_shape not in _scale_shapes(shape, scheme.block):
            invalid.append(f"{scale} {scale_shape} for {shape}")
    if missing:
        raise CheckpointError(f"{disk.folder}: float8 weights without their scales: {format_names(missing)}.")
    if invalid:
        raise CheckpointError(
            f"{disk.folder}: scale shapes do not match the scheme ({scheme}): {format_names(invalid)}."
        )
    unmatched = {name for name in names if name.endswith(scheme.scales)} - set(found.values())
    if unmatched:
        raise CheckpointError(f"{disk.folder}: scales without a float8 weight: {format_names(unmatched)}.")
    return found


def _scale_shapes(shape: tuple[int, ...], block: tuple[int, int] | None) -> set[tuple[int, ...]]:
    """Return the valid shapes for a weight's scales."""
    rows, columns = shape[0], shape[-1]
    if block is None:
        return {(), (1,), (rows,), (rows, 1)}
    return {(-(-rows // block[0]), -(-columns // block[1]))}


def _from_fp8(stored_RC: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    rows, columns = stored_RC.shape
    out_RC = torch.empty(rows, columns, dtype=torch.bfloat16)
    # Full blocks of rows, so that each scale is repeated once.
    step = max(1, _ROWS // columns)
    if block is not None:
        step = block[0] * max(1, step // block[0])
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        factors = _factors(scale, part, rows, columns, block)
        # One multiplication, rounded to bfloat16 once.
        out_RC[part] = stored_RC[part].to(scale.dtype) * factors
    return out_RC


def _factors(scale: Tensor, part: slice, rows: int, columns: int, block: tuple[int, int] | None) -> Tensor:
    """Return the factors for a slice of rows."""
    if block is not None:
        of_blocks = scale[part.start // block[0] : -(-part.stop // block[0])]
        of_rows = of_blocks.repeat_interleave(block[0], 0)[: part.stop - part.start]
        return of_rows.repeat_interleave(block[1], 1)[:, :columns]
    if scale.numel() == 1:
        return scale.reshape(())
    return scale.reshape(rows, 1)[part]


def _mxfp4_scales(disk: WeightsFolder, names: set[str]) -> dict[str, str]:
    """Return each packed weight's scales."""
    found = {}
    for name in sorted(names):
        if not name.endswith(_BLOCKS):
            continue
        base = name.removesuffix(_BLOCKS)
        scale = base + _SCALES
        if scale not in names:
            raise CheckpointError(f"{disk.folder}: {name} lacks its scales {scale}.")
        shape = disk.shape(name)
        is_packed = len(shape) == 4 and shape[-1] == 16 and disk.shape(scale) == shape[:-1]
        if not is_packed or {disk.stored_dtype(name), disk.stored_dtype(scale)} != {torch.uint8}:
            raise CheckpointError(
                f"{disk.folder}: {name} {shape} and {scale} {disk.shape(scale)} must be blocks of 16 bytes with one "
                "scale each."
            )
        found[base] = scale
    unmatched = {n for n in names if n.endswith(_SCALES)} - set(found.values())
    if unmatched:
        raise CheckpointError(f"{disk.folder}: scales without blocks: {format_names(unmatched)}.")
    return found


def _from_mxfp4(blocks_ERG: Tensor, scales_ERG: Tensor) -> Tensor:
    table = torch.tensor(_E2M1, dtype=torch.bfloat16)
    out = torch.empty(*scales_ERG.shape, 32, dtype=torch.bfloat16)
    # One expert at a time: table indices take eight bytes per number.
    for values, packed, exponents in zip(out, blocks_ERG, scales_ERG, strict=True):
        values[..., 0::2] = table[(packed & 15).long()]
        values[..., 1::2] = table[(packed >> 4).long()]
        torch.ldexp(values, (exponents.int() - 127).unsqueeze(-1), out=values)
    return out.flatten(-2).transpose(-1, -2).contiguous()
