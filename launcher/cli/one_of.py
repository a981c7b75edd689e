"""An option that takes one of several words."""

from __future__ import annotations

from tyro.constructors import PrimitiveConstructorSpec


def one_of(*choices: str, bare: str | None = None) -> PrimitiveConstructorSpec[str | None]:
    """An option that takes one of ``choices``; ``bare`` is what it means without a value."""

    def read(given: list[str]) -> str | None:
        if given:
            return given[0]
        return bare

    nargs = 1
    if bare is not None:
        nargs = (0, 1)
    # Not a Literal: tyro cannot take one without a value (`--verify` alone).
    return PrimitiveConstructorSpec(
        nargs=nargs,
        metavar="{" + ",".join(choices) + "}",
        instance_from_str=read,
        is_instance=lambda value: value is None or value in choices,
        str_from_instance=lambda value: [str(value)],
        choices=choices,
    )
