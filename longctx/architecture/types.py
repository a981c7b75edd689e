"""Every field holds what its annotation says."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args, get_type_hints

from longctx.errors import ConfigError

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
            raise ConfigError(
                f"{where}.{name}={value!r} must be {'a list (in Python a tuple), each entry ' * is_tuple}{noun}."
            )


@cache
def _field_types(cls: type) -> dict[str, tuple[type, bool]]:
    """Each field's type, or its entries' if it is a tuple."""
    hints = get_type_hints(cls)
    return {name: (get_args(hint)[0], True) if get_args(hint) else (hint, False) for name, hint in hints.items()}


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
