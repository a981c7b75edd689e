"""Options shared by several verbs: a choice between words, repeated values, and a decoder's ranks and device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

ShardFolder = Annotated[Positional[str], arg(metavar="DIR")]
"""The folder that a verb reads."""
RepeatedValues = UseAppendAction[list[list[str]]]
"""Option that takes one or more values and may be repeated."""


def flatten_values(given: RepeatedValues) -> list[str]:
    """Collect all values, over all uses of the option."""
    return [value for values in given for value in values]


def choice_option(*choices: str, bare: str | None = None) -> PrimitiveConstructorSpec[str | None]:
    """Build the spec for an option limited to ``choices``; ``bare`` is its meaning without a value."""

    def read(given: list[str]) -> str | None:
        if given:
            return given[0]
        return bare

    nargs = 1
    if bare is not None:
        nargs = (0, 1)
    # Not a Literal: tyro requires a value for one, and `--verify` alone must work.
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
    """Device, memory, and the ranks that deepspeed or torchrun starts."""

    chunk_tokens: int = 4096
    """Tokens read at a time, for any number of ranks."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype for weights and computation; bfloat16 takes half the memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses GPUs if there are any; each rank then needs one."""
    context: Annotated[int, arg(name="parallel.context")] = 0
    """Ranks that share a prompt; 0 means all."""
    expert: Annotated[int, arg(name="parallel.expert")] = 1
    """Ranks that share the experts; must divide parallel.context."""
    hostfile: Annotated[str, arg(name="run.hostfile")] = "launcher"
    """Host file to check, as in a run: launcher takes the deepspeed command's --hostfile, none disables the check."""
    timeout_seconds: float = 1800.0
    """Seconds that a rank waits for another."""

    def values(self) -> dict[str, Any]:
        """Return the fields as arguments for ``Computation``."""
        return asdict(self)
