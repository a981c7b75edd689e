"""Mapping between tensors on disk and a decoder's parameters, in both directions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce

import torch
from torch import Tensor

from longctx.config import ModelConfig
from longctx.conversion.tensor_mismatches import raise_mismatches
from longctx.conversion.weights.weights_folder import WeightsFolder
from longctx.families.config_json import family_of
from longctx.families.spec import Family, MtpStorage, StorageLayout, TensorRule
from longctx.kernels.quantized_weights import PackedLayout

EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor in a Hugging Face file."""

    name: str
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class DiskLayout:
    """One way to store a parameter on disk, alone or together with others."""

    parts: tuple[StoredTensor, ...]
    """Tensors on disk; their flattened values in sequence form the combined tensor. Without parts, it is zero."""
    combined_shape: Shape
    """Shape of all members, concatenated along their first axis, before the steps."""
    steps: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    """Parameters in the combined tensor, in order."""
    rows: tuple[int, int] = (0, 0)
    """This parameter's range along the combined tensor's first axis."""
    row_order: Tensor | None = field(default=None, compare=False)
    """Row on disk for each row of the combined tensor; None for the same order."""
    swaps_halves: bool = False
    """True if the two halves of each row are exchanged on disk."""

    @property
    def is_plain(self) -> bool:
        """True if the values on disk are the members' values in order."""
        return not self.steps and self.row_order is None and not self.swaps_halves

    @property
    def is_shared(self) -> bool:
        """True if other parameters are stored in the same tensors."""
        return len(self.members) > 1


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A decoder parameter (or buffer) and its layouts on disk: the first is written, all are read."""

    name: str
    shape: Shape
    layouts: tuple[DiskLayout, ...]


@dataclass(frozen=True, kw_only=True)
class LayoutStep:
    """Reordering of values: two views, of the disk tensor and of ours, that match element by element."""

    disk_view: Callable[[Tensor], Tensor]
    our_view: Callable[[Tensor], Tensor]
    shape: Callable[[Shape], Shape]
    """Disk shape for one of our shapes."""


# Views cost nothing, and one copy between the two views is the conversion, in either direction.
LAYOUT_STEPS: dict[str, LayoutStep] = {
    # [in, out] on disk.
    "transposed": LayoutStep(
        disk_view=lambda x: x.mT,
        our_view=lambda x: x,
        shape=lambda shape: (*shape[:-2], shape[-1], shape[-2]),
    ),
    # [1, V]: a vector as a one-row matrix.
    "one_row": LayoutStep(
        disk_view=lambda x: x.squeeze(0),
        our_view=lambda x: x,
        shape=lambda shape: (1, *shape),
    ),
    # [1, 1, H, 1]: one number per head.
    "per_head": LayoutStep(
        disk_view=lambda x: x.flatten(),
        our_view=lambda x: x,
        shape=lambda shape: (1, 1, *shape, 1),
    ),
    # [E, 2F, …]: gate and up rows alternate on disk; in the decoder all gate rows come first.
    "alternating": LayoutStep(
        disk_view=lambda x: x.unflatten(1, (-1, 2)).transpose(1, 2),
        our_view=lambda x: x.unflatten(1, (2, -1)),
        shape=lambda shape: shape,
    ),
}


def tensor_specs(config: ModelConfig, *, model_type: str | None = None) -> list[TensorSpec]:
    """Return every decoder parameter and buffer in model order, each with its layouts on disk.

    ``model_type`` selects one family if several can express the model; raise ConfigError if none can.
    """
    family = family_of(config, model_type=model_type)
    shapes = parameter_shapes(config)
    rules: dict[str, list[TensorRule]] = {}
    for rule in family.tensors:
        if rule.condition(config):
            for name in rule.parameters:
                rules.setdefault(name, []).append(rule)
    return [_spec(name, rules, shapes, config, family) for name in shapes]


@lru_cache(maxsize=32)
def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every decoder parameter and buffer, in model order.

    This allocates no weights and needs no family.
    """
    # Only the decoder itself lists its parameters; on the meta device that costs no memory.
    from longctx.model.decoder import Decoder

    # A quantized weight holds bytes, in a flat parameter; files have its values.
    config = replace(config, adapter=config.adapter.without_quantization())
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Decoder(config, seed=None).state_dict().items()}


@lru_cache(maxsize=32)
def quantized_layouts(config: ModelConfig) -> dict[str, PackedLayout]:
    """Return the layout of every weight that a decoder stores in 4 or 8 bits; empty without a quantized base."""
    from longctx.model.decoder import Decoder

    if not config.adapter.is_quantized:
        return {}
    with torch.device("meta"):
        return Decoder(config, seed=None).layouts


def each_once(tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors; raise CheckpointError unless they match ``shapes``, each exactly once."""
    remaining = dict(shapes)
    for name, tensor in tensors:
        if name not in remaining:
            raise_mismatches("the model", missing=(), unexpected=[f"{name} (unknown, or given twice)"])
        expected_shape = remaining.pop(name)
        if tuple(tensor.shape) != expected_shape:
            mismatched = [f"{name} {tuple(tensor.shape)} instead of {expected_shape}"]
            raise_mismatches("the model", missing=(), unexpected=(), mismatched=mismatched)
        yield name, tensor
    raise_mismatches("the model", missing=remaining, unexpected=())


def is_passthrough(name: str, family: Family, config: ModelConfig, mtp_layers: int) -> bool:
    """Return True if a tensor on disk belongs to a part that the decoder does not have.

    ``mtp_layers`` is the number of multi-token prediction blocks in the file.
    """
    if config.mtp_layers:
        # All multi-token prediction blocks belong to the decoder.
        return False
    # Such blocks are numbered after the last layer, and differ from it only by number.
    found = re.match(r"model\.layers\.(\d{1,6})\.", name)
    if found is not None and 0 <= int(found[1]) - config.num_layers < mtp_layers:
        return True
    return matches(family.passthrough_tensors, name)


def mtp_duplicates(family: Family, config: ModelConfig) -> dict[str, str]:
    """Return duplicate names on disk, in multi-token prediction blocks, mapped to the model's own parameters."""
    if family.mtp is None:
        return {}
    # A tied model has no head of its own: the duplicate equals the embedding table.
    head = EMBEDDINGS
    if not config.tie_embeddings:
        head = HEAD
    duplicates = {}
    for layer in range(config.num_layers, config.depth):
        for name, parameter in zip(family.mtp.copies, (EMBEDDINGS, head), strict=False):
            duplicates[name.format(layer=layer)] = parameter
    return duplicates


def matches(patterns: Iterable[str], name: str) -> bool:
    """Return True if a full name matches one of the patterns."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def assemble_parameter(spec: TensorSpec, layout: DiskLayout, disk: WeightsFolder) -> Tensor:
    """Read the parameter from disk. Memory also holds one tensor, or the group of parameters stored with it."""
    whole = _read_parts(layout.parts, disk)
    if layout.is_plain and not layout.is_shared:
        return whole.view(spec.shape)
    start, stop = layout.rows
    # One copy between two views applies all steps at once.
    out = torch.empty(spec.shape, dtype=whole.dtype)
    on_disk = _disk_view(whole.view(_disk_shape(layout)), layout.steps)
    if layout.row_order is None:
        part = on_disk[start:stop]
    else:
        part = on_disk[layout.row_order[start:stop]]
    if layout.swaps_halves:
        part = _swap_halves(part)
    _our_view(out, layout.steps).copy_(part)
    return out


def disassemble_layout(layout: DiskLayout, members: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the disk names and values of a layout's members, in its order; views if possible."""
    if len(members) == 1 and layout.is_plain:
        whole = members[0]
    else:
        whole = _combine(layout, members)
    sizes = [math.prod(part.shape) for part in layout.parts]
    for part, values in zip(layout.parts, whole.reshape(-1).split(sizes), strict=True):
        yield part.name, values.reshape(part.shape)


def _combine(layout: DiskLayout, members: list[Tensor]) -> Tensor:
    """Return all members as one tensor in disk order."""
    # Members may have different dtypes; the promoted one holds all their values.
    dtype = reduce(torch.promote_types, (member.dtype for member in members))
    whole = torch.empty(_disk_shape(layout), dtype=dtype)
    view = _disk_view(whole, layout.steps)
    start = 0
    for member in members:
        stop = start + member.shape[0]
        values = _our_view(member, layout.steps)
        if layout.swaps_halves:
            values = _swap_halves(values)
        # Writing through the index avoids a reordered copy in memory.
        if layout.row_order is None:
            view[start:stop].copy_(values)
        else:
            view[layout.row_order[start:stop]] = values.to(dtype)
        start = stop
    return whole


def _swap_halves(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1)


def _disk_view(x: Tensor, steps: tuple[str, ...]) -> Tensor:
    """Return a view of the disk tensor in our order; steps are undone in reverse."""
    return reduce(lambda view, step: LAYOUT_STEPS[step].disk_view(view), reversed(steps), x)


def _our_view(x: Tensor, steps: tuple[str, ...]) -> Tensor:
    """Return a view of our tensor that matches the disk tensor's view."""
    return reduce(lambda view, step: LAYOUT_STEPS[step].our_view(view), steps, x)


def _read_parts(parts: tuple[StoredTensor, ...], disk: WeightsFolder) -> Tensor:
    """Read the parts, flattened and concatenated, in the narrowest dtype that holds all their values."""
    if len(parts) == 1:
        return disk.read(parts[0].name).reshape(-1)
    dtype = reduce(torch.promote_types, (disk.dtype(part.name) for part in parts))
    out = torch.empty(sum(math.prod(part.shape) for part in parts), dtype=dtype)
    start = 0
    for part in parts:
        stop = start + math.prod(part.shape)
        out[start:stop] = disk.read(part.name).reshape(-1)
        start = stop
    return out


def _disk_shape(layout: DiskLayout) -> Shape:
    """Return the shape of all members in disk order."""
    return reduce(lambda shape, step: LAYOUT_STEPS[step].shape(shape), layout.steps, layout.combined_shape)


def _spec(
    name: str, rules: dict[str, list[TensorRule]], shapes: dict[str, Shape], config: ModelConfig, family: Family
) -> TensorSpec:
    """Return a parameter's layouts by the family's rule; without a rule, it has its own name on disk."""
    pattern, layer = _split_name(name, config)
    rule = TensorRule(parameters=(pattern,), layouts=(StorageLayout(names=(pattern,)),))
    # The last matching rule wins.
    for one in rules.get(pattern, ()):
        # A parameter outside the layers has no layer to match.
        if not layer or one.layer_condition(config, int(layer)):
            rule = one
    members = tuple(_format_name(member, layer, config) for member in rule.parameters)
    layouts = tuple(_layout(on_disk, members, name, shapes, layer, config) for on_disk in rule.layouts)
    if layer and int(layer) >= config.num_layers and family.mtp is not None:
        layouts = tuple(_mtp_layout(layout, int(layer), config, family.mtp) for layout in layouts)
    return TensorSpec(name=name, shape=shapes[name], layouts=layouts)


def _layout(
    on_disk: StorageLayout,
    members: tuple[str, ...],
    name: str,
    shapes: dict[str, Shape],
    layer: str,
    config: ModelConfig,
) -> DiskLayout:
    """Return a family's layout for ``members``, with this layer's names and the rows of the parameter ``name``."""
    # Members are concatenated along their first axis (GPT-2's queries, keys and values).
    rows = [shapes[member][0] for member in members]
    start = sum(rows[: members.index(name)])
    whole = (sum(rows), *shapes[name][1:])
    layout = DiskLayout(
        parts=(),
        combined_shape=whole,
        steps=on_disk.steps,
        members=members,
        rows=(start, start + shapes[name][0]),
        swaps_halves=on_disk.swaps_halves,
    )
    parts = tuple(_parts(on_disk, _disk_shape(layout), layer, config))
    # An index, not a view: parts with different widths alternate on disk, which strides cannot express.
    order = None
    if on_disk.rows is not None:
        order = torch.tensor(on_disk.rows(config))
    return replace(layout, parts=parts, row_order=order)


def _parts(on_disk: StorageLayout, shape: Shape, layer: str, config: ModelConfig) -> Iterator[StoredTensor]:
    """Yield one layout's tensors: slices along the first axis, or along the second for one tensor per expert."""
    names = on_disk.names
    if not any("{expert}" in name for name in names):
        widths: Sequence[int] = [shape[0] // max(1, len(names))] * len(names)
        if on_disk.widths is not None:
            widths = on_disk.widths(config)
        for name, width in zip(names, widths, strict=True):
            yield StoredTensor(name=name.format(layer=layer), shape=(width, *shape[1:]))
        return
    # The first axis counts experts.
    expert_shape = (shape[1] // len(names), *shape[2:])
    for expert in range(config.num_experts):
        for name in names:
            yield StoredTensor(name=name.format(layer=layer, expert=expert), shape=expert_shape)


def _mtp_layout(layout: DiskLayout, layer: int, config: ModelConfig, mtp: MtpStorage) -> DiskLayout:
    """Return a layout with the names that multi-token prediction blocks have on disk."""
    layer_prefix, mtp_prefix = f"model.layers.{layer}.", mtp.block.format(layer=layer, k=layer - config.num_layers)
    parts = []
    for part in layout.parts:
        name = part.name
        if name.startswith(layer_prefix):
            name = mtp_prefix + name.removeprefix(layer_prefix)
        parts.append(replace(part, name=name))
    return replace(layout, parts=tuple(parts))


def _format_name(pattern: str, layer: str, config: ModelConfig) -> str:
    """Return a layer's or multi-token prediction block's parameter name: the inverse of ``_split_name``."""
    if not layer or pattern.startswith("encoder.") or int(layer) < config.num_layers:
        return pattern.format(layer=layer)
    number = int(layer) - config.num_layers
    return pattern.replace(_LAYERS, f"model.mtp.{number}.block.").replace(_MTP, f"model.mtp.{number}.")


_LAYERS, _MTP = "model.layers.{layer}.", "model.mtp.{layer}."


def _split_name(name: str, config: ModelConfig) -> tuple[str, str]:
    """Split ``model.layers.7.x`` into (``model.layers.{layer}.x``, ``7``), and the same for an encoder.

    Multi-token prediction blocks are numbered after the layers, as on disk, and otherwise named like a layer.
    """
    mtp_match = re.match(r"model\.mtp\.(\d+)\.(block\.)?", name)
    if mtp_match is not None:
        prefix = _LAYERS if mtp_match[2] else _MTP
        return prefix + name[mtp_match.end() :], str(config.num_layers + int(mtp_match[1]))
    # A hierarchical model's layers are numbered within their stage.
    layer_match = re.match(r"(model|encoder|model\.stages\.\d+)\.layers\.(\d+)\.", name)
    if layer_match is None:
        return name, ""
    return f"{layer_match[1]}.layers.{{layer}}.{name[layer_match.end() :]}", layer_match[2]
