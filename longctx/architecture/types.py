"""Check that every field of a dataclass holds what its annotation says."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, get_args, get_type_hints

from longctx.errors import ConfigError
from longctx.untrusted.reading import shown

_LARGEST = int(sys.float_info.max)
_KINDS_OF_VALUE = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def check_types(config: Any, where: str) -> None:
    """ConfigError unless every field of a dataclass holds what its annotation says; a float may be a whole number.

    ``where`` is the dotted path of the section, for the message. ``true`` is no number, and ``4096.0`` is not whole.
    """
    for name, (kind, is_tuple) in _field_types(type(config)).items():
        value = getattr(config, name)
        if is_tuple:
            fits = isinstance(value, tuple) and all(_is_a(entry, kind) for entry in value)
        else:
            fits = _is_a(value, kind)
        if not fits:
            noun = _KINDS_OF_VALUE.get(kind, f"a table of {kind.__name__}'s keys")
            if is_tuple:
                noun = f"a list (in Python a tuple), each entry {noun}"
            raise ConfigError(f"{where}.{name}={shown(value)} must be {noun}.")


@cache
def _field_types(cls: type) -> dict[str, tuple[type, bool]]:
    """Each field's type, or its entries' if it is a tuple."""
    types: dict[str, tuple[type, bool]] = {}
    for name, hint in get_type_hints(cls).items():
        # Of ``tuple[int, ...]`` the first argument is the entries' type; plain types have no arguments.
        entries = get_args(hint)
        if entries:
            types[name] = entries[0], True
        else:
            types[name] = hint, False
    return types


def _is_a(value: Any, kind: type) -> bool:
    """Whether a value is of a kind, where a bool is no number and a whole number is a float."""
    # First, because in Python a bool is an int.
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        # Python's whole numbers have no bound; a float, which all arithmetic with it makes of it, has.
        return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _LARGEST)
    return isinstance(value, kind)
