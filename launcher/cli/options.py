"""Options shared by several verbs: one of several words, repeated values, and the ranks and device of a decoder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from tyro.conf import UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

Several = UseAppendAction[list[list[str]]]
"""An option with one value or more, which may be given more than once."""


def flat(given: Several) -> list[str]:
    """Return all values, over all uses of the option."""
    return [value for values in given for value in values]


def one_of(*choices: str, bare: str | None = None) -> PrimitiveConstructorSpec[str | None]:
    """Return the spec of an option that takes one of ``choices``; ``bare`` is its meaning without a value."""

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


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """Device, memory, and ranks that deepspeed or torchrun starts."""

    chunk_tokens: int = 4096
    """Tokens that are read at a time, on however many ranks."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights and of the computation; bfloat16 takes half the memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs if there are any, and then each rank needs one."""
    context: Annotated[int, arg(name="parallel.context")] = 0
    """Ranks that share a prompt; 0 is all."""
    expert: Annotated[int, arg(name="parallel.expert")] = 1
    """Ranks that share the experts; a divisor of parallel.context."""
    hostfile: Annotated[str, arg(name="run.hostfile")] = "launcher"
    """As of a run: launcher checks the --hostfile of the deepspeed command, none checks nothing."""
    timeout_seconds: float = 1800.0
    """How long a rank waits for another."""

    def values(self) -> dict[str, Any]:
        """Return the fields of ``Computation``."""
        return asdict(self)
