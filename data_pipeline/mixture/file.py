"""``Mixture``: several shard folders in one run, each with its share of the tokens. Read from a TOML file.

    [[sources]]
    name = "web"
    path = "data/web"          # a shard folder, relative to this file unless it is absolute or a URL (s3://, gs://)
    weight = 66

    [[sources]]
    name = "books"
    path = "data/books"
    weight = 34
    epochs = 2                                               # at most
    upsample = [{ min_tokens = 32768, factor = 4.0 }]

    [[stages]]                                               # from here on: shorter rows, other weights
    from_tokens = 10_000_000_000
    row_tokens = 65536
    weights = { web = 40, books = 60 }

Weights are shares of tokens and need not add up to any particular sum.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from data_pipeline.rows.fim import FimRule
from data_pipeline.rows.pack import MAX_FACTOR, Upsampling
from data_pipeline.shards.manifest import VALIDATION_FOLDER
from data_pipeline.stores.urls import Location, below, is_url, locate
from longctx.errors import ConfigError
from longctx.files import read_toml

MIXTURE_SUFFIX = ".toml"

_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Temperature = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_AtLeastOne = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One shard folder of a mixture."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    path: str
    """Its folder, or the URL of one (s3://, gs://)."""
    weight: _Weight | None = None
    """Its share of the tokens, beside those of the others; None: as many as it has."""
    epochs: _AtLeastOne | None = None
    """Epochs at most; after them the others go on without it. None: no end."""
    upsample: tuple[Upsampling, ...] = ()
    fim_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of its documents whose middle is to be filled in; None: the run's (``data.fim_rate``)."""

    def fim_rule(self, of_run: FimRule | None) -> FimRule | None:
        """Return the fill-in-the-middle rule of this source, given the run's rule."""
        if self.fim_rate is None:
            return of_run
        return replace(of_run or FimRule(0), rate=self.fim_rate)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Settings that apply from a given number of tokens on."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    from_tokens: int = 0
    """Tokens of the run, padding included; the stage begins with the first row behind them."""
    row_tokens: _AtLeastOne | None = None
    """Documents are cut and packed at this length, several such rows to one of the run's; None: the run's."""
    weights: dict[str, _Weight] = field(default_factory=dict)
    """By name, in place of the sources' own; a source that is not named keeps its own."""
    temperature: _Temperature | None = None
    """In place of the mixture's."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sources, and the changes of their shares and of the row length."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    sources: tuple[Source, ...]
    stages: tuple[Stage, ...] = ()
    temperature: _Temperature = 1.0
    """Shares are weights to the power of 1/temperature: above 1 they are more even, 1 leaves them alone."""

    @classmethod
    def load(cls, path: str | Path) -> Mixture:
        """Read a mixture's file; raise ConfigError that names the problem if it is invalid."""
        path = Path(path)
        values = read_toml(path, str(path))
        try:
            # Strict JSON accepts tables for dataclasses and whole numbers for floats, and no other conversions.
            mixture = TypeAdapter(cls).validate_json(json.dumps(values, default=str), strict=True)
        except ValidationError as error:
            raise ConfigError(f"{path}: {_first_problem(error)}\n{_KEYS}") from error
        for problem in _problems(mixture):
            raise ConfigError(f"{path}: {problem}")
        return mixture

    def folders(self, beside: Path) -> list[Location]:
        """Return the sources' shard folders; relative paths are resolved against ``beside``."""
        return [_place(beside, source.path) for source in self.sources]

    def held_out(self, beside: Path) -> Mixture:
        """Return the mixture of the sources' held-out documents, once each, in the initial shares.

        Relative paths are resolved against ``beside``. The mixture may have no sources.
        """
        sources = [
            Source(name=source.name, path=below(source.path, VALIDATION_FOLDER), weight=source.weight, epochs=1)
            for source in self.sources
            if source.weight != 0 and (_place(beside, source.path) / VALIDATION_FOLDER).is_dir()
        ]
        return Mixture(sources=tuple(sources), temperature=self.temperature)

    def to_validate(self) -> Mixture:
        """Return the mixture of the same folders, once each, in the initial shares and in rows of the run's length."""
        sources = [
            Source(name=source.name, path=source.path, weight=source.weight, epochs=1) for source in self.sources
        ]
        return Mixture(sources=tuple(sources), temperature=self.temperature)

    def shares(self, number: int, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return the sources' shares in stage ``number`` (-1: before the first), which add up to 1.

        ``tokens`` holds the number of tokens of each source.
        """
        own, temperature = {}, self.temperature
        if number >= 0:
            own = self.stages[number].weights
            temperature = self.stages[number].temperature or temperature
        # Sources without a weight are weighted by their tokens, so that alone they are read as one folder would
        # be.
        powers = []
        for source, count in zip(self.sources, tokens, strict=True):
            weight = own.get(source.name, source.weight)
            if weight is None:
                weight = float(count)
            powers.append(weight ** (1 / temperature) if weight else 0.0)
        total = sum(powers)
        return tuple(power / total for power in powers)

    def stage_at(self, tokens: int) -> int:
        """Return the number of the stage in effect after ``tokens`` tokens; -1 before the first."""
        return sum(stage.from_tokens <= tokens for stage in self.stages) - 1

    def row_tokens(self, number: int, seq_len: int) -> int:
        """Return the length of packed rows in a stage of a run whose rows have ``seq_len`` tokens."""
        if number < 0:
            return seq_len
        return self.stages[number].row_tokens or seq_len

    def row_lengths(self, seq_len: int) -> list[int]:
        """Return all lengths of packed rows of a run whose rows have ``seq_len`` tokens."""
        return [self.row_tokens(number, seq_len) for number in range(-1, len(self.stages))]

    def check_lengths(self, seq_len: int, where: str | Path) -> None:
        """Raise ConfigError if a stage has rows whose length does not divide ``seq_len``."""
        for number, stage in enumerate(self.stages):
            wanted = stage.row_tokens
            if wanted is not None and seq_len % wanted:
                nearest = min(
                    (seq_len // n for n in range(1, seq_len + 1) if not seq_len % n), key=lambda n: abs(n - wanted)
                )
                raise ConfigError(
                    f"{where}: stages.{number}.row_tokens={wanted} does not divide data.seq_len={seq_len}: rows of a "
                    f"stage are laid end to end in one of the run's. Try {nearest}."
                )


def _place(beside: Path, path: str) -> Location:
    """Return a source's folder; raise DataError for a URL that names none."""
    if is_url(path):
        return locate(path)
    return beside / path


_KEYS = (
    "A mixture has sources (name, path, weight, epochs, upsample = [{min_tokens, factor}], fim_rate), stages "
    "(from_tokens, row_tokens, weights, temperature) and temperature."
)


def _first_problem(error: ValidationError) -> str:
    """Return the first problem: an unknown key, with the nearest known one, takes precedence over all others."""
    first = min(error.errors(), key=lambda found: found["type"] != "unexpected_keyword_argument")
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "unexpected_keyword_argument":
        known = [field.name for kind in (Mixture, Source, Stage, Upsampling) for field in fields(kind)]
        nearest = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0)
        return f"{where} is no key. Did you mean {nearest[0]}?"
    return f"{where}={first['input']!r}: {first['msg']}."


def is_mixture(path: str | Path) -> bool:
    """Return whether a path names a mixture's file rather than a shard folder."""
    return str(path).endswith(MIXTURE_SUFFIX)


def _problems(mixture: Mixture) -> Iterator[str]:
    """Yield the inconsistencies between values, a sentence each with advice."""
    if not mixture.sources:
        yield "there is no [[sources]]. Name at least one shard folder."
    names = [source.name for source in mixture.sources]
    for number, source in enumerate(mixture.sources):
        if not source.name or names.index(source.name) != number:
            yield f"sources.{number}.name={source.name!r} is empty or taken. Give each source a name of its own."
        for rule in source.upsample:
            if rule.min_tokens < 0 or not 0 <= rule.factor <= MAX_FACTOR:
                yield (
                    f"sources.{number} ({source.name}): upsample = [{{ min_tokens = {rule.min_tokens}, factor = "
                    f"{rule.factor} }}] needs min_tokens of at least 0 and a factor from 0 to {MAX_FACTOR:g}."
                )
    last = -1
    for number, stage in enumerate(mixture.stages):
        if stage.from_tokens <= last:
            yield f"stages.{number}.from_tokens={stage.from_tokens} must be at least {last + 1}: stages ascend."
        last = stage.from_tokens
        for name in stage.weights:
            if name not in names:
                nearest = difflib.get_close_matches(name, names, n=1, cutoff=0)
                yield f"stages.{number}.weights names {name!r}, which is no source. Did you mean {nearest[0]}?"
    for weights in ({}, *(stage.weights for stage in mixture.stages)):
        if not any(weights.get(source.name, source.weight) != 0 for source in mixture.sources):
            yield "every weight is 0. Give at least one source a share."
