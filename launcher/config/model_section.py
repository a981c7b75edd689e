"""The ``[model]`` section: the base model under its fields, the allowed changes, and the required keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from pathlib import Path
from typing import Any

from launcher.config.config_sections import AUTO, NEWEST, NO_PRESET, PLAIN, ModelSection, RunConfig
from longctx.config import PRESETS, ModelConfig
from longctx.errors import CheckpointError, ConfigError
from longctx.files import MANIFEST, list_checkpoints

SHAPE_OF_ROPE = ("partial", "interleaved")
"""Keys in ``rope`` that weights have learned: the channels that are rotated, and their pairing."""

RESOLUTION = ("height", "width")
"""Keys in ``image`` that may change: learned positions of patches are interpolated
(``longctx/model/position_grid.py``)."""

CLASS_HEAD = ("classes", "class_pool", "class_bias", "token_head")
"""Keys that may change for another task: a new class head, with or without the token head."""

_KEPT_BY_ANOTHER_KIND = ("theta", "original_max_positions", *SHAPE_OF_ROPE)
"""Keys in ``rope`` that every kind reads; the others configure one kind's scaling."""

MAY_CHANGE = (
    "A run that starts from it may change model.max_positions, model.window, the scaling in model.rope, the height and "
    "width of images in patches, and the class head; and it may add adapters (model.adapter) to a model without."
)


def is_hf_model_folder(folder: Path) -> bool:
    """Return True if a folder contains a Hugging Face model and no checkpoint of ours."""
    return (folder / "config.json").is_file() and not (folder / MANIFEST).is_file()


def lay_over(model: dict[str, Any], base: ModelConfig | None) -> dict[str, Any]:
    """Return every field in the section: the given ones over those in the preset, ``base`` or ``PLAIN``."""
    preset = model.get("preset", NO_PRESET)
    if not isinstance(preset, str) or preset not in (NO_PRESET, *PRESETS):
        raise ConfigError(f"model.preset={preset!r} is unknown. Try one of {sorted(PRESETS)}, or {NO_PRESET}.")
    under = base or PLAIN
    if preset != NO_PRESET:
        under = PRESETS[preset]
    values = dataclasses.asdict(under) | model | {"preset": preset}
    # A table within the section is merged too: setting one rope key leaves the others.
    rope = model.get("rope")
    if isinstance(rope, dict):
        values["rope"] = _rope_under(under, rope) | rope
    for table in ("image", "adapter"):
        given = model.get(table)
        if isinstance(given, dict):
            values[table] = dataclasses.asdict(getattr(under, table)) | given
    return values


def _rope_under(under: ModelConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the base model's rope keys that remain under the given ones."""
    values = dataclasses.asdict(under.rope)
    # One kind's scaling keys do not apply to another: a new kind starts with its own defaults.
    if rope.get("kind", under.rope.kind) != under.rope.kind:
        values = {name: values[name] for name in _KEPT_BY_ANOTHER_KIND}
    return values


# ------------------------------------------------------------------------------------------------- the model's source


def find_base(values: dict[str, Any], *, use_mtp: bool = False) -> ModelConfig | None:
    """Return the model that the file and the early flags take from a checkpoint; None without one.

    This is the checkpoint that the run resumes from, or otherwise the one it starts from. If the run ``use_mtp``,
    a Hugging Face folder's blocks for multi-token prediction are part of the model. Raise ConfigError for a preset
    together with run.start_from.
    """
    run = values.get("run", {})
    preset = values.get("model", {}).get("preset", NO_PRESET)
    resume, start_from = run.get("resume", "no"), run.get("start_from", "no")
    # Values with other types are rejected later, by name, with all other keys.
    if not isinstance(resume, str) or not isinstance(start_from, str):
        return None
    output_dir = Path(str(run.get("output_dir", RunConfig().run.output_dir)))
    if _resumes(output_dir, resume):
        if preset != NO_PRESET:
            return None
        return _resumed_model(output_dir, resume)
    if start_from == "no":
        return None
    if preset != NO_PRESET:
        raise ConfigError(
            f"model.preset={preset!r} and run.start_from={start_from!r} both set the model.\n"
            f"Leave model.preset out (on the command line: --model.preset {NO_PRESET}): the checkpoint's model is "
            "used, and [model] sets only changes."
        )
    return started_model(start_from, mtp=use_mtp)


def find_start(start_from: str) -> Path:
    """Return the checkpoint that ``run.start_from`` names (in a run folder, its newest), or a Hugging Face folder."""
    from longctx.checkpoint_format import find_checkpoint  # imports torch, which a run's start avoids

    folder = Path(start_from)
    if is_hf_model_folder(folder):
        return folder
    try:
        return find_checkpoint(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"run.start_from={start_from!r}: {error}\n"
            "Give the folder of a checkpoint, a run or a downloaded Hugging Face model. "
            "A plan reads no weights: a folder with the model's config.json is enough for it."
        ) from error


def started_model(start_from: str, *, mtp: bool = False) -> ModelConfig:
    """Return the model in ``run.start_from``; ``mtp`` is passed to ``ModelConfig.from_hf``."""
    folder = find_start(start_from)
    try:
        if is_hf_model_folder(folder):
            # Deferred because it is slow and seldom needed.
            from longctx.conversion.image_processor import model_of_folder
            from longctx.conversion.weights.json_files import read_checkpoint_json

            return model_of_folder(folder, read_checkpoint_json(folder / "config.json"), mtp=mtp)
        return _own_model(folder)
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"run.start_from={start_from!r}: {error}") from error


def _own_model(folder: Path) -> ModelConfig:
    from longctx.checkpoint_format import CheckpointReader, model_config

    return model_config(CheckpointReader(folder))


def _resumes(output_dir: Path, resume: str) -> bool:
    """Return True if a run takes its model from its own checkpoint."""
    if resume == AUTO:
        # A first start names its model; so does a later one with checkpoints only in a store.
        return bool(list_checkpoints(output_dir))
    return resume != "no"


def _resumed_model(output_dir: Path, resume: str) -> ModelConfig | None:
    """Return the model in the checkpoint that a run resumes from; None without one, which the start reports."""
    # Only the model is needed here: loading validates the checkpoint itself.
    candidates = [Path(resume)]
    if resume in NEWEST:
        candidates = list_checkpoints(output_dir)[::-1]
    for folder in candidates:
        # A run's checkpoints all have the same model, so a damaged newest one can be skipped.
        try:
            return _own_model(folder)
        except (CheckpointError, ConfigError):
            continue
    return None


# ------------------------------------------------------------------------------------ allowed changes at a run's start


def model_changes(saved: ModelConfig, current: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return every field in which the run's model differs from the checkpoint's: name -> (theirs, ours)."""
    changes = _changed_fields(saved, current)
    for table in ("rope", "image", "adapter"):
        if table in changes:
            del changes[table]
            within = _changed_fields(getattr(saved, table), getattr(current, table))
            changes.update({f"{table}.{name}": values for name, values in within.items()})
    return changes


def fixed_differences(saved: ModelConfig, current: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the differences that a checkpoint's weights do not allow."""
    fixed = saved.differences(current)
    fixed.pop("window", None)
    # A base gets adapters; adapters stay what they are.
    if not saved.adapter.is_used:
        fixed.pop("adapter", None)
    if "rope" in fixed:
        del fixed["rope"]
        for name in SHAPE_OF_ROPE:
            values = getattr(saved.rope, name), getattr(current.rope, name)
            if values[0] != values[1]:
                fixed[f"rope.{name}"] = values
        # The rotary share of channels differs for a proportional rope.
        kinds = saved.rope.kind, current.rope.kind
        if current.rope.partial != 1 and (kinds[0] == "proportional") != (kinds[1] == "proportional"):
            fixed["rope.kind"] = kinds
    # A class head with other classes is initialized anew, and a head that the model lacks is not read.
    for name in CLASS_HEAD:
        fixed.pop(name, None)
    if "image" in fixed:
        del fixed["image"]
        for name, values in _changed_fields(saved.image, current.image).items():
            # Colors of a palette have no channels, so the weights fix only the patches'.
            if name not in RESOLUTION and (current.image.patch or name != "channels"):
                fixed[f"image.{name}"] = values
    # A table of learned positions is a weight with one row per position; for patches it is interpolated.
    if current.position == "learned" and not current.image.patch and saved.max_positions != current.max_positions:
        fixed["max_positions"] = saved.max_positions, current.max_positions
    return fixed


def describe_change(name: str, saved: Any, current: Any) -> str:
    """Format a change like ``rope.theta 500000 → 1000000``."""
    return f"{name} {_plain(saved)} → {_plain(current)}"


def _plain(value: Any) -> str:
    """Format a value as in TOML, integral floats without their point."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, tuple):
        return str(list(value))
    return str(value)


def _changed_fields(saved: Any, current: Any) -> dict[str, tuple[Any, Any]]:
    pairs = {f.name: (getattr(saved, f.name), getattr(current, f.name)) for f in dataclasses.fields(saved)}
    return {name: (mine, other) for name, (mine, other) in pairs.items() if mine != other}


# ---------------------------------------------------------------------------------------- required keys of the section


def resolve_model(config: RunConfig, base: ModelConfig | None, named: Set[str]) -> RunConfig:
    """Return the config with its model resolved. Raise ConfigError for forbidden changes or missing keys.

    ``named`` are the keys given in the file or by a flag, such as ``model.hidden_size``.
    """
    # Checked at the run's first start; loading compares the model with the checkpoint.
    if _resumes(Path(config.run.output_dir), config.run.resume):
        return config
    if base is not None:
        _check_changes(config, base)
        _check_rate(config, named)
        return config
    if config.model.preset == NO_PRESET:
        config = dataclasses.replace(config, model=_complete(config.model, named))
    if config.model.config().has_constant_gates:
        raise ConfigError(
            "model.experts_per_token=1 with model.normalize_gates=true makes every gate 1: the routers of a new model "
            "would get no gradient from its loss.\nTry --model.normalize_gates false, or --model.experts_per_token 2."
        )
    return config


def _check_changes(config: RunConfig, base: ModelConfig) -> None:
    fixed = fixed_differences(base, config.model.config())
    if fixed:
        lines = [f"run.start_from={config.run.start_from!r} has a different model:"]
        lines.extend(
            f"  model.{name}: checkpoint {saved!r}, run {current!r}" for name, (saved, current) in fixed.items()
        )
        lines.append(f"{MAY_CHANGE} Leave the other fields out: the checkpoint sets them.")
        raise ConfigError("\n".join(lines))


def _check_rate(config: RunConfig, named: Set[str]) -> None:
    """Raise ConfigError unless the learning rate was chosen: the default for new weights would undo trained ones."""
    if "train.lr" not in named:
        raise ConfigError(
            f"run.start_from={config.run.start_from!r} starts from trained weights, and train.lr is not set; "
            f"its default, {config.train.lr:g}, is for new weights.\nSet it, such as --train.lr 2e-5."
        )


def _complete(model: ModelSection, named: Set[str]) -> ModelSection:
    """Return a plain decoder with the named sizes and Llama's heads. Raise ConfigError if a size is missing."""
    sizes = ["vocab_size", "hidden_size", "num_layers", "num_heads"]
    if not model.num_experts or model.dense_layers:
        sizes.append("ffn_size")
    if model.num_experts:
        sizes.append("expert_ffn_size")
    # As in Llama: heads fill the hidden size, with one key head per query head unless set.
    derived: dict[str, int] = {}
    if "model.num_kv_heads" not in named:
        derived["num_kv_heads"] = model.num_heads
    if "model.head_dim" not in named and not model.is_latent and not model.hidden_size % model.num_heads:
        derived["head_dim"] = model.hidden_size // model.num_heads
    elif "model.head_dim" not in named:
        sizes.append("head_dim")
    missing = [f"model.{name}" for name in sizes if f"model.{name}" not in named]
    if missing:
        raise ConfigError(
            "The config defines no model: without model.preset and run.start_from, [model] must set its sizes. "
            f"Missing: {', '.join(missing)}.\n"
            f"Set them, or use a preset (--model.preset {' | '.join(sorted(PRESETS))}), or a checkpoint's model "
            "(--run.start_from DIR)."
        )
    return dataclasses.replace(model, **derived)
