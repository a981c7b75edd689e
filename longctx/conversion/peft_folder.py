"""PEFT's adapter folders (adapter_config.json and adapter_model.safetensors), in both directions.

PEFT names a factor by its module in transformers, ``base_model.model.MODULE.lora_A.weight``. Experts are parameters of
one module there (``target_parameters``): all their A are one matrix [E·r, I], expert after expert, and all their B one
matrix [O, r·E], in which the expert counts fastest; with adapters on both matrices the module's name has ``base_layer``
for the first.

Axes: E experts, r rank, I input width, O output width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from longctx.architecture.adapter import FACTORS, AdapterShape, factor_names, is_adapter, merged_name
from longctx.checkpoint_format import CheckpointReader, model_config
from longctx.config import ModelConfig
from longctx.conversion.auxiliary_files import auxiliary_names
from longctx.conversion.checkpoint_checks import check_folders, open_verified_checkpoint
from longctx.conversion.checkpoint_writer import save_master_weights
from longctx.conversion.tensor_layouts import (
    LAYOUT_STEPS,
    DiskLayout,
    TensorSpec,
    parameter_shapes,
    tensor_specs,
)
from longctx.conversion.tensor_mismatches import raise_mismatches
from longctx.conversion.weights.json_files import read_checkpoint_json, write_json
from longctx.conversion.weights.weights_folder import WeightsFolder
from longctx.errors import CheckpointError, ConfigError
from longctx.files import staged_folder
from longctx.model.experts.experts import is_expert_weight
from longctx.untrusted.strict_json import shown

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MATRICES = ("gate_up_proj", "down_proj")
"""Experts' matrices in the order in which PEFT wraps them."""
_DEFAULTS: dict[str, Any] = {
    "bias": "none", "use_dora": False, "lora_bias": False, "modules_to_save": None, "layer_replication": None,
    "rank_pattern": {}, "alpha_pattern": {}, "use_qalora": False, "use_bdlora": None, "trainable_token_indices": None,
    "alora_invocation_tokens": None, "lora_dropout": 0.0,
}  # fmt: skip
"""Keys whose other values change the function; the dropout only its training."""


@dataclass(frozen=True)
class _Location:
    """Where one projection's factors are in a folder."""

    weight: str
    """The decoder's parameter that they update."""
    module: str
    """The module in transformers, as PEFT names it."""
    layout: DiskLayout
    experts: int = 0
    """Experts whose factors are stored together; 0 for a plain projection."""

    def key(self, factor: str) -> str:
        return f"{_PREFIX}{self.module}.{factor}.weight"


# ------------------------------------------------------------------------------------------------------------- writing


def export_peft(checkpoint: str | Path, output: Path) -> Path:
    """Write a checkpoint's (or a run's newest) adapters as a folder for ``PeftModel.from_pretrained``, in float32.

    Return the folder. Raise ConfigError if the checkpoint has none, or if the family stores several projections as one
    matrix, to which PEFT gives a single A.
    """
    check_folders(checkpoint, output)
    reader = open_verified_checkpoint(checkpoint)
    config, model_type = model_config(reader), _model_type(reader)
    if not config.adapter.is_used:
        raise ConfigError(f"{reader.folder} has no adapters (model.adapter.rank=0). Use convert --to hf.")
    weights = list(dict.fromkeys(merged_name(name) for name in reader.names() if is_adapter(name)))
    locations = _locations(config, weights, model_type)
    tensors = {}
    for location in locations:
        a, b = map(reader.read, factor_names(location.weight))
        tensors |= zip(map(location.key, FACTORS), _to_peft(location, a, b), strict=True)
    with staged_folder(output, error=CheckpointError) as staging:
        save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(staging / CONFIG_FILE, _config(config.adapter, locations))
    return output


def _model_type(reader: CheckpointReader) -> str | None:
    """Return the Hugging Face type that a model was imported from; None if it was not."""
    training = (reader.base or reader).manifest["training"]
    return training.get("imported", training).get("model_type")


def _config(adapter: AdapterShape, locations: list[_Location]) -> dict[str, Any]:
    modules = [location.module for location in locations if not location.experts]
    parameters = [
        f"{_experts_module(location.module)}.{_matrix(location.weight)}" for location in locations if location.experts
    ]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.rank_stabilized,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "fan_in_fan_out": any("transposed" in location.layout.steps for location in locations if not location.experts),
        "inference_mode": True,
        "init_lora_weights": True,
        **_DEFAULTS,
    }


def _to_peft(location: _Location, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    b = _reordered(location.layout, b, to_disk=True)
    if not location.experts:
        return a.contiguous(), b.contiguous()
    # [E, r, I] to [E·r, I], and [E, O, r] to [O, r·E].
    return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1).contiguous()


# ------------------------------------------------------------------------------------------------------------- reading


def import_peft(folder: str | Path, output: Path, base: str | Path) -> Path:
    """Write a PEFT folder as a step-0 checkpoint of adapters on ``base``, a checkpoint of ours; return its folder."""
    check_folders(folder, output)
    reader = open_verified_checkpoint(base)
    config = model_config(reader)
    if config.adapter.is_used:
        raise ConfigError(f"--base {base} holds adapters itself. Merge them first: convert --to hf, then --from hf.")
    adapter, tensors = read_peft(Path(folder), config, model_type=_model_type(reader))
    tokenizer = {name: reader.folder / name for name in auxiliary_names(reader)}
    config = replace(config, adapter=adapter)
    options: dict[str, Any] = {"dtype": reader.dtype, "training": {}, "auxiliary_files": tokenizer, "base": reader}
    return save_master_weights(config, tensors.items(), output, **options)


def read_peft(
    folder: Path, base: ModelConfig, *, model_type: str | None = None
) -> tuple[AdapterShape, dict[str, Tensor]]:
    """Read a PEFT folder's adapters for a model; return their shape, and the tensors by the decoder's names.

    Raise CheckpointError for another kind of adapter, and for tensors that do not fit the model.
    """
    values = read_checkpoint_json(folder / CONFIG_FILE)
    adapter = _shape(folder, values)
    disk = WeightsFolder(folder)
    keys = set(disk.names())
    modules = {match[1] for key in keys if (match := re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_A\.weight", key))}
    possible = [name for name in parameter_shapes(base) if name.endswith((".weight", *_MATRICES))]
    locations, left = [], set(modules)
    for location in _candidates(base, possible, model_type):
        if location.module in modules:
            locations.append(location)
            left.discard(location.module)
    if left or not locations:
        raise CheckpointError(
            f"{folder} has adapters on {sorted(left)[:6] or 'nothing'}, which are no projections of this model. "
            "Was it trained on another base?"
        )
    targets = tuple(dict.fromkeys(_target(location.weight) for location in locations))
    adapter = replace(adapter, targets=targets)
    shapes = parameter_shapes(replace(base, adapter=adapter))
    tensors = {}
    for location in locations:
        a, b = (disk.read(location.key(factor)).float() for factor in FACTORS)
        keys.difference_update(map(location.key, FACTORS))
        tensors |= zip(factor_names(location.weight), _from_peft(location, a, b, adapter.rank), strict=True)
    wanted = {name: shape for name, shape in shapes.items() if is_adapter(name)}
    raise_mismatches(
        str(folder),
        missing=wanted.keys() - tensors.keys(),
        unexpected=(tensors.keys() - wanted.keys()) | keys,
        mismatched=[
            f"{name} {tuple(x.shape)} instead of {wanted[name]}"
            for name, x in tensors.items()
            if name in wanted and tuple(x.shape) != tuple(wanted[name])
        ],
    )
    return adapter, tensors


def _shape(folder: Path, values: Mapping[str, Any]) -> AdapterShape:
    if values.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{folder / CONFIG_FILE} has peft_type={shown(values.get('peft_type'))}; only LORA is supported. Merge it "
            "with its base in peft, and import the result."
        )
    for key, default in _DEFAULTS.items():
        # A dropout only affected the training that is over.
        if key != "lora_dropout" and values.get(key, default) not in (default, None):
            raise CheckpointError(
                f"{folder / CONFIG_FILE} has {key}={shown(values[key])}, which is not supported; supported: "
                f"{shown(default)}. Merge it with its base in peft, and import the result."
            )
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(f"{folder / CONFIG_FILE}: r={shown(rank)} and lora_alpha={shown(alpha)} must be numbers.")
    return AdapterShape(rank=rank, alpha=float(alpha), rank_stabilized=bool(values.get("use_rslora", False)))


def _from_peft(location: _Location, a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    if location.experts:
        if a.shape[0] != location.experts * rank or b.ndim != 2 or b.shape[1] != location.experts * rank:
            return a, b  # the caller names the mismatch
        a = a.unflatten(0, (location.experts, rank))
        b = b.unflatten(1, (rank, location.experts)).permute(2, 0, 1)
    return a, _reordered(location.layout, b, to_disk=False).contiguous()


# --------------------------------------------------------------------------------------------------------------- names


def _locations(config: ModelConfig, weights: list[str], model_type: str | None) -> list[_Location]:
    """Return the locations for these weights; raise ConfigError for one without a location."""
    found = {location.weight: location for location in _candidates(config, weights, model_type)}
    for weight in weights:
        if weight not in found:
            raise ConfigError(
                f"PEFT has a single A for {_disk_names(config, weight, model_type)}, and the adapters on its parts "
                f"({weight}, …) have one each. Merge them: longctx convert --to hf."
            )
    return [found[weight] for weight in weights]


def _disk_names(config: ModelConfig, weight: str, model_type: str | None) -> str:
    layout = _specs(config, model_type)[weight].layouts[0]
    return ", ".join(part.name for part in layout.parts[:1])


def _candidates(config: ModelConfig, weights: list[str], model_type: str | None) -> Iterator[_Location]:
    """Yield each weight's location, if PEFT can have one for it."""
    specs = _specs(config, model_type)
    both = {name.rpartition(".")[0] for name in weights if name.endswith(f".{_MATRICES[1]}") and is_expert_weight(name)}
    for weight in weights:
        layout = specs[weight].layouts[0]
        if is_expert_weight(weight):
            if not weight.endswith(_MATRICES):
                continue
            # transformers has one parameter in memory, whatever its files have.
            module = weight.rpartition(".")[0]
            if _matrix(weight) == _MATRICES[0] and module in both:
                module = f"{module}.base_layer"
            yield _Location(weight, module, layout, experts=config.num_experts)
        elif len(layout.parts) == 1 and not layout.is_shared and not layout.swaps_halves:
            yield _Location(weight, layout.parts[0].name.removesuffix(".weight"), layout)


def _specs(config: ModelConfig, model_type: str | None) -> dict[str, TensorSpec]:
    plain = replace(config, adapter=AdapterShape())
    return {spec.name: spec for spec in tensor_specs(plain, model_type=model_type)}


def _matrix(weight: str) -> str:
    return weight.rpartition(".")[2]


def _target(weight: str) -> str:
    """Return the entry in ``model.adapter.targets`` for a weight."""
    parts = weight.removesuffix(".weight").split(".")
    return ".".join(parts[-2:])


def _experts_module(module: str) -> str:
    return module.removesuffix(".base_layer")


def _reordered(layout: DiskLayout, b: Tensor, *, to_disk: bool) -> Tensor:
    """Return B with its rows in the order of the weight's rows on disk, or the other way around."""
    steps = [step for step in layout.steps if step != "transposed"]
    for step in steps if to_disk else reversed(steps):
        out = torch.empty_like(b)
        views = LAYOUT_STEPS[step].disk_view, LAYOUT_STEPS[step].our_view
        target, source = views if to_disk else views[::-1]
        target(out).copy_(source(b))
        b = out
    if layout.row_order is None:
        return b
    out = torch.empty_like(b)
    if to_disk:
        out[layout.row_order] = b
    else:
        out[:] = b[layout.row_order]
    return out
