"""The options that say how the next token is chosen, and when a continuation ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from tyro.conf import UseAppendAction, arg

from longctx.errors import ConfigError

if TYPE_CHECKING:
    from longctx.generation.beams import Beams
    from longctx.generation.penalties import Penalties
    from longctx.generation.sampling import Greedy, Sample

Strings = UseAppendAction[list[str]]


@dataclass(frozen=True, kw_only=True)
class Choosing:
    """Greedy without an option; drawn with one of the first five; searched for with --beams."""

    temperature: float | None = None
    """Below 1 sharper, above 1 flatter, 0 greedy; 1 where another option of sampling is given."""
    top_k: int | None = None
    """Draw from this many likeliest tokens."""
    top_p: float | None = None
    """Draw from the likeliest tokens that reach this probability together."""
    min_p: float | None = None
    """Draw from tokens at least so many times as likely as the likeliest."""
    seed: int | None = None
    """The same seed draws the same tokens; 0 unless given."""
    beams: int | None = None
    """Search with so many beams; the text comes when the search is over."""
    length_penalty: float | None = None
    """Beams are compared by log-likelihood over length to this power; 1 unless given, more favours long ones."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that the prompt or the continuation has (multiplies those below 0)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the continuation has."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the continuation has it."""
    stop: Annotated[Strings, arg(metavar="TEXT")] = field(default_factory=list)
    """End before this text; may be given several times."""

    def strategy(self) -> Greedy | Sample | Beams:
        """Beams or sampling as soon as an option of theirs is given; ConfigError where an option would do nothing."""
        from longctx.generation.beams import Beams
        from longctx.generation.sampling import Greedy, Sample

        sampling = _given(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed
        )
        searching = _given(num_beams=self.beams, length_penalty=self.length_penalty)
        if self.beams is not None:
            _refuse(sampling, f"--beams {self.beams} draws no token")
            return Beams(**searching)
        _refuse(searching, "without --beams nothing is searched for")
        # A temperature of 0 is the usual word for greedy.
        if sampling.get("temperature") == 0:
            del sampling["temperature"]
            _refuse(sampling, "--temperature 0 is greedy")
            return Greedy()
        if not sampling:
            return Greedy()
        return Sample(**sampling)

    def penalties(self) -> Penalties:
        """The penalties."""
        from longctx.generation.penalties import Penalties

        return Penalties(
            repetition=self.repetition_penalty, presence=self.presence_penalty, frequency=self.frequency_penalty
        )


def _given(**options: float | None) -> dict:
    return {name: value for name, value in options.items() if value is not None}


def _refuse(options: Mapping[str, float], why: str) -> None:
    """ConfigError where options are given that would do nothing."""
    if options:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise ConfigError(f"{why}, so {names} would do nothing. Leave one out.")
