"""``Mixture``: several shard folders in one training run, each with its share of the tokens. Read from a TOML file.

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

Weights are token shares and need not add up to any particular sum.
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
class MixtureSource:
    """One shard folder in a mixture."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    path: str
    """Shard folder, or its URL (s3://, gs://)."""
    weight: _Weight | None = None
    """Token weight relative to the other sources; None: the source's own token count."""
    epochs: _AtLeastOne | None = None
    """Maximum number of epochs, after which the other sources continue; None: no limit."""
    upsample: tuple[Upsampling, ...] = ()
    fim_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of documents with fill-in-the-middle; None: the run's ``data.fim_rate``."""

    def fim_rule(self, of_run: FimRule | None) -> FimRule | None:
        """Return this source's fill-in-the-middle rule, given the run's rule."""
        if self.fim_rate is None:
            return of_run
        return replace(of_run or FimRule(0), rate=self.fim_rate)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Settings that apply after a given number of tokens."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    from_tokens: int = 0
    """Tokens in the run, including padding; the stage starts at the first row after them."""
    row_tokens: _AtLeastOne | None = None
    """Length at which documents are cut and packed; several such rows fill one row of the training run. None: the run's
    row length.
    """
    weights: dict[str, _Weight] = field(default_factory=dict)
    """Weights by source name; an unlisted source keeps its own."""
    temperature: _Temperature | None = None
    """Replaces the mixture's temperature."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sources, and stages that change their token shares or the row length."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    sources: tuple[MixtureSource, ...]
    stages: tuple[Stage, ...] = ()
    temperature: _Temperature = 1.0
    """Exponent 1/temperature applied to weights: values above 1 even out the token shares, 1 keeps the weights."""

    @classmethod
    def load(cls, path: str | Path) -> Mixture:
        """Read a mixture file; raise ConfigError with the first problem if it is invalid."""
        path = Path(path)
        values = read_toml(path, str(path))
        try:
            # Strict JSON accepts tables for dataclasses and integers for floats, and no other conversions.
            mixture = TypeAdapter(cls).validate_json(json.dumps(values, default=str), strict=True)
        except ValidationError as error:
            raise ConfigError(f"{path}: {_first_problem(error)}\n{_KEYS}") from error
        for problem in mixture._problems():
            raise ConfigError(f"{path}: {problem}")
        return mixture

    def folders(self, base_folder: Path) -> list[Location]:
        """Return the sources' shard folders; relative paths are resolved against the mixture file's folder."""
        return [_place(base_folder, source.path) for source in self.sources]

    def held_out(self, base_folder: Path) -> Mixture:
        """Return the mixture over the sources' held-out documents, one epoch each, with the initial token shares.

        Relative paths are resolved against the mixture file's folder. The mixture may have no sources.
        """
        sources = [
            MixtureSource(name=source.name, path=below(source.path, VALIDATION_FOLDER), weight=source.weight, epochs=1)
            for source in self.sources
            if source.weight != 0 and (_place(base_folder, source.path) / VALIDATION_FOLDER).is_dir()
        ]
        return Mixture(sources=tuple(sources), temperature=self.temperature)

    def to_validate(self) -> Mixture:
        """Return the mixture over the same folders, one epoch each, with the initial token shares and row length."""
        sources = [
            MixtureSource(name=source.name, path=source.path, weight=source.weight, epochs=1) for source in self.sources
        ]
        return Mixture(sources=tuple(sources), temperature=self.temperature)

    def shares(self, number: int, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return the sources' token shares in stage ``number`` (-1: before the first stage); they add up to 1.

        ``tokens`` holds each source's token count.
        """
        # p_i ∝ w_i^(1/T), the temperature-scaled sampling used for multilingual corpora ("XLM-R", Conneau et al., 2020,
        # arXiv 1911.02116, with α = 1/T).
        own, temperature = {}, self.temperature
        if number >= 0:
            own = self.stages[number].weights
            temperature = self.stages[number].temperature or temperature
        # A source without a weight uses its token count, so a mixture without weights samples like one concatenated
        # folder.
        powers = []
        for source, count in zip(self.sources, tokens, strict=True):
            weight = own.get(source.name, source.weight)
            if weight is None:
                weight = float(count)
            powers.append(weight ** (1 / temperature) if weight else 0.0)
        total = sum(powers)
        return tuple(power / total for power in powers)

    def stage_at(self, tokens: int) -> int:
        """Return the index of the stage in effect after ``tokens`` tokens; -1 before the first stage."""
        return sum(stage.from_tokens <= tokens for stage in self.stages) - 1

    def row_tokens(self, number: int, seq_len: int) -> int:
        """Return a stage's packed row length in a run with rows of ``seq_len`` tokens."""
        if number < 0:
            return seq_len
        return self.stages[number].row_tokens or seq_len

    def row_lengths(self, seq_len: int) -> list[int]:
        """Return all packed row lengths in a run with rows of ``seq_len`` tokens, stage by stage."""
        return [self.row_tokens(number, seq_len) for number in range(-1, len(self.stages))]

    def check_lengths(self, seq_len: int, where: str | Path) -> None:
        """Raise ConfigError if a stage's row length does not divide ``seq_len``."""
        for number, stage in enumerate(self.stages):
            wanted = stage.row_tokens
            if wanted is not None and seq_len % wanted:
                nearest = min(
                    (seq_len // n for n in range(1, seq_len + 1) if not seq_len % n), key=lambda n: abs(n - wanted)
                )
                raise ConfigError(
                    f"{where}: stages.{number}.row_tokens={wanted} must divide data.seq_len={seq_len}: each training "
                    f"row concatenates full stage rows. Try {nearest}."
                )

    def _problems(self) -> Iterator[str]:
        """Yield inconsistencies between values, one sentence each with a fix."""
        if not self.sources:
            yield "[[sources]] is missing. Add at least one shard folder."
        names = [source.name for source in self.sources]
        for number, source in enumerate(self.sources):
            if not source.name or names.index(source.name) != number:
                yield f"sources.{number}.name={source.name!r} is empty or already used. Give each source a unique name."
            for rule in source.upsample:
                if rule.min_tokens < 0 or not 0 <= rule.factor <= MAX_FACTOR:
                    yield (
                        f"sources.{number} ({source.name}): upsample = [{{ min_tokens = {rule.min_tokens}, factor = "
                        f"{rule.factor} }}] needs min_tokens of at least 0 and a factor from 0 to {MAX_FACTOR:g}."
                    )
        last = -1
        for number, stage in enumerate(self.stages):
            if stage.from_tokens <= last:
                yield f"stages.{number}.from_tokens={stage.from_tokens} must be at least {last + 1}: stages ascend."
            last = stage.from_tokens
            for name in stage.weights:
                if name not in names:
                    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0)
                    yield f"stages.{number}.weights names {name!r}, which is not a source. Did you mean {nearest[0]}?"
        # Check the initial weights and those in effect in each stage: a stage replaces weights only for the sources it
        # lists.
        for weights in ({}, *(stage.weights for stage in self.stages)):
            if not any(weights.get(source.name, source.weight) != 0 for source in self.sources):
                yield "all weights are 0. Give at least one source a positive weight."


def _place(base_folder: Path, path: str) -> Location:
    """Resolve a source's path; raise DataError for an invalid URL."""
    if is_url(path):
        return locate(path)
    return base_folder / path


_KEYS = (
    "A mixture has sources (name, path, weight, epochs, upsample = [{min_tokens, factor}], fim_rate), stages "
    "(from_tokens, row_tokens, weights, temperature) and temperature."
)


def _first_problem(error: ValidationError) -> str:
    """Return the first problem; an unknown key comes before all others and is reported with the closest known key."""
    first = min(error.errors(), key=lambda found: found["type"] != "unexpected_keyword_argument")
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "unexpected_keyword_argument":
        known = [field.name for kind in (Mixture, MixtureSource, Stage, Upsampling) for field in fields(kind)]
        nearest = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0)
        return f"{where} is not a valid key. Did you mean {nearest[0]}?"
    return f"{where}={first['input']!r}: {first['msg']}."


def is_mixture(path: str | Path) -> bool:
    """Return whether a path names a mixture file and not a shard folder."""
    return str(path).endswith(MIXTURE_SUFFIX)
