"""Type validation: every dataclass field must match its annotation."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, get_args, get_type_hints

from longctx.errors import ConfigError
from longctx.untrusted.strict_json import shown

_LARGEST = int(sys.float_info.max)
_KINDS_OF_VALUE = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def check_types(config: Any, section: str) -> None:
    """Raise ConfigError unless every dataclass field matches its annotation; an integer is valid for a float.

    Messages start with the section's dotted path. ``true`` is not a number, and ``4096.0`` is not an integer.
    """
    for name, (kind, is_tuple) in _field_types(type(config)).items():
        value = getattr(config, name)
        if is_tuple:
            fits = isinstance(value, tuple) and all(_is_a(entry, kind) for entry in value)
        else:
            fits = _is_a(value, kind)
        if not fits:
            unit = _KINDS_OF_VALUE.get(kind, f"a table of {kind.__name__}'s keys")
            if is_tuple:
                unit = f"a list (in Python a tuple), each entry {unit}"
            raise ConfigError(f"{section}.{name}={shown(value)} must be {unit}.")


@cache
def _field_types(cls: type) -> dict[str, tuple[type, bool]]:
    """Return each field's type; for a tuple, its entries' type."""
    types: dict[str, tuple[type, bool]] = {}
    for name, hint in get_type_hints(cls).items():
        # ``tuple[int, ...]`` has the entry type as its first argument; plain types have no arguments.
        entries = get_args(hint)
        if entries:
            types[name] = entries[0], True
        else:
            types[name] = hint, False
    return types


def _is_a(value: Any, kind: type) -> bool:
    """Return True if a value has this type; a bool is not a number, and an integer is a valid float."""
    # First, because bool is a subclass of int.
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        # Python integers are unbounded; later arithmetic converts the value to a float, which overflows.
        return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _LARGEST)
    return isinstance(value, kind)
