"""The parts of a family's table. Every entry serves both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from longctx.architecture.fields import ModelFields

HfConfig = Mapping[str, Any]
"""A parsed config.json."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Keys of config.json and the fields of ModelFields that they mean."""

    keys: tuple[str, ...]
    """Every key that the rule looks at; a key that no rule of a family names is refused."""
    read: Callable[[HfConfig], dict[str, Any]]
    """Fields of ModelFields; ConfigError where the keys ask for what the decoder cannot do."""
    write: Callable[[ModelFields], dict[str, Any]]
    """Keys for this config. Reading them back finds what they cannot say."""


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """One way in which parameters are stored in files.

    The parameters, one after the other along their first axis, go through ``steps`` (``tensors.STEPS``) and are then
    cut, flat, into the tensors of these names.
    """

    names: tuple[str, ...]
    """``{layer}`` is the layer's number; names with ``{expert}`` are repeated for every expert."""
    steps: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """Parameters whose names or layouts differ from the decoder's own."""

    parameters: tuple[str, ...]
    layouts: tuple[OnDisk, ...]
    """The first is written, all are read."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything in which one Hugging Face architecture differs from another."""

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    tensors: tuple[TensorRule, ...] = ()
    """Parameters without a rule have the decoder's names on disk."""
    ignored_keys: frozenset[str] = frozenset()
    """Keys of config.json without a meaning in a decoder."""
    ignored_tensors: tuple[str, ...] = ()
    """Patterns of whole names: buffers that old versions of transformers saved."""
    extra_layers_key: str = ""
    """Key that says how many layers of another kind follow the decoder's own on disk; they are left out, and logged."""
    forces_own_tokenizer: bool = False
    """Whether transformers 5 loads the family's own tokenizer class, whatever tokenizer_config.json says."""
