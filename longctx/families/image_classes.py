"""Class heads of image models: classes and their names in config.json, and tensor names with and without a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.errors import ConfigError
from longctx.families.spec import ConfigRule, HfConfig, StorageLayout, TensorRule
from longctx.untrusted.strict_json import shown

_MOST_CLASSES = 1 << 20
# transformers' default, for a config.json that leaves the names out.
_TWO_CLASSES = {"0": "LABEL_0", "1": "LABEL_1"}


def classes_of(architecture: str, **head: Any) -> ConfigRule:
    """Return the rule for the class head, which is recognized by the class that saved the folder.

    ``head`` has the further fields of a model with such a head.
    """

    def read(hf: HfConfig) -> dict[str, Any]:
        if hf.get("architectures") != [architecture]:
            return {"classes": 0}
        return {"classes": len(names_of_classes(hf)), **head}

    def write(config: ModelFields) -> dict[str, Any]:
        if not config.classes:
            return {}
        return {"architectures": [architecture], **label_keys(default_names(config.classes))}

    return ConfigRule(keys=("id2label", "label2id"), read=read, write=write)


def of_either_class(ours: str, prefix: str, hf_name: str, *, axes: int = 0) -> tuple[TensorRule, TensorRule]:
    """Return the rules for a tensor in a model with a class head, and in one without, whose names lack the prefix.

    The tensor has ``axes`` more leading axes of size 1 on disk. Names of either class are read.
    """
    names = (hf_name, hf_name.removeprefix(prefix))
    layouts = tuple(StorageLayout(names=(name,), steps=("one_row",) * axes) for name in names)
    return (
        TensorRule(parameters=(ours,), layouts=layouts, condition=lambda config: config.classes > 0),
        TensorRule(parameters=(ours,), layouts=layouts[::-1], condition=lambda config: not config.classes),
    )


def names_of_classes(hf: HfConfig) -> list[str]:
    """Return the classes' names in the order of their outputs; raise ConfigError for a table with gaps."""
    names = hf.get("id2label", _TWO_CLASSES)
    if not isinstance(names, dict) or not 1 <= len(names) <= _MOST_CLASSES:
        raise ConfigError(f"id2label={shown(names)} in config.json must be a table with a name per class.")
    ordered: list[str] = []
    for number in range(len(names)):
        name = names.get(str(number))
        if not isinstance(name, str):
            raise ConfigError(
                f"id2label={shown(names)} in config.json has no name for class {number}; supported: a name for each "
                f"of the classes 0 to {len(names) - 1}."
            )
        ordered.append(name)
    return ordered


def label_keys(names: Sequence[str]) -> dict[str, Any]:
    """Return the config.json keys for classes with these names."""
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def default_names(count: int) -> list[str]:
    """Return transformers' names for classes that have none."""
    return [f"LABEL_{number}" for number in range(count)]
