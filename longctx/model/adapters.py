"""Adapters in a decoder: low-rank updates at the chosen projections, and everything else frozen."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from longctx.architecture.adapter import AdapterShape, is_adapter
from longctx.errors import ConfigError
from longctx.kernels.quantized_weights import PackedLayout, fill_packed, quantize
from longctx.model.experts.experts import MATRICES, Experts
from longctx.model.layers.initialize import InitialTensor
from longctx.model.layers.linear import Linear


def add_adapters(network: nn.Module, adapter: AdapterShape) -> dict[str, PackedLayout]:
    """Add the adapters to a network, and freeze all its other weights; return the layouts of the quantized ones.

    Raise ConfigError if a target names no projection in the network's blocks.
    """
    modules, chosen = dict(network.named_modules()), set[str]()
    projections = _projections(modules)
    for target in adapter.targets:
        found = {name for name in projections if f".{name}".endswith(f".{target}")}
        if not found:
            raise ConfigError(_no_match(target, projections))
        chosen |= found
    for name in sorted(chosen or projections, key=projections.index):
        module = modules.get(name)
        if isinstance(module, Linear):
            module.add_adapter(adapter)
        else:
            experts, matrix = name.rsplit(".", 1)
            modules[experts].add_adapter(matrix, adapter)  # type: ignore[operator]
    layouts: dict[str, PackedLayout] = {}
    if adapter.is_quantized:
        layouts = _quantize(modules, projections, adapter.quantize_base)
    for name, parameter in network.named_parameters():
        # A quantized weight holds integers, which cannot need a gradient.
        if parameter.is_floating_point():
            parameter.requires_grad_(is_adapter(name))
    return layouts


def _quantize(modules: dict[str, nn.Module], projections: list[str], kind: str) -> dict[str, PackedLayout]:
    """Store the matrices of all projections in 4 or 8 bits, without values yet; return their layouts by name."""
    layouts = {}
    for name in projections:
        module = modules.get(name)
        if not isinstance(module, Linear):
            experts, matrix = name.rsplit(".", 1)
            layouts[name] = modules[experts].quantize_weight(matrix, kind)  # type: ignore[operator]
        # A single row is the shared expert's gate, which stays exact like a router.
        elif module.out_features > 1:
            layouts[f"{name}.weight"] = module.quantize_weight(kind)
    return layouts


def as_stored(layouts: Mapping[str, PackedLayout], name: str, values: Tensor) -> Tensor:
    """Return a weight's values as a decoder with these ``layouts`` stores them: itself, or quantized."""
    if name not in layouts:
        return values
    return quantize(values, layouts[name])


def copy_quantized(initial: InitialTensor, out: Tensor, first: int, layout: PackedLayout | None) -> None:
    """Fill a flat parameter with a tensor's values from ``first``, quantized if it has a layout."""
    if layout is None:
        initial.copy_to(out, first)
    else:
        fill_packed(out, layout, lambda start, values: initial.copy_to(values, first + start))


def with_gradient(x: Tensor) -> Tensor:
    """Return x as a tensor that needs a gradient, which ends there: the first layer's input, from frozen embeddings.

    ZeRO-3 reduces a block's gradients once its input has one, and without any before its backward.
    """
    if x.requires_grad or not torch.is_grad_enabled():
        return x
    return _WithGradient.apply(x, x.new_empty(0).requires_grad_())


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor):  # type: ignore[override]
        return None, None


def _projections(modules: dict[str, nn.Module]) -> list[str]:
    """Return the names of all projections that can have an adapter, in the network's order."""
    found = []
    for name, module in modules.items():
        if ".layers." not in name and ".mtp." not in name:
            continue
        if isinstance(module, Linear):
            found.append(name)
        if isinstance(module, Experts):
            found.extend(f"{name}.{matrix}" for matrix in MATRICES)
    return found


def _no_match(target: str, projections: list[str]) -> str:
    """Return the error message for a target without a projection, with the nearest names."""
    endings = dict.fromkeys(".".join(name.split(".")[-2:]) for name in projections)
    names = list(dict.fromkeys(ending.split(".")[-1] for ending in endings))
    nearest = get_close_matches(target, names + list(endings), n=1, cutoff=0.0) or names
    return (
        f"model.adapter.targets names {target!r}, which no projection in the model's blocks ends with; they are "
        f"{', '.join(endings)}.\nTry --model.adapter.targets {nearest[0]}."
    )
