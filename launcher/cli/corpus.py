"""The options that name a corpus: the same for every verb that reads text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import UseAppendAction, arg

from launcher.cli.console import human_bytes, say
from launcher.wording import plural

if TYPE_CHECKING:
    from data_pipeline.prepare.sources import Source

Globs = UseAppendAction[list[list[str]]]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where the text comes from."""

    source: Annotated[str, arg(metavar="PATH")]
    """Folder or file: text, .json, .jsonl, .ndjson, .csv, .tsv, .parquet, .arrow, also .gz, .bz2, .xz, .zst; or
    "stdlib", the Python source of the standard library."""
    include: Annotated[Globs, arg(metavar="GLOB [GLOB ...]")] = field(default_factory=list)
    """Read only relative paths that match, e.g. '*.jsonl.gz' (quote it for the shell)."""
    exclude: Annotated[Globs, arg(metavar="GLOB [GLOB ...]")] = field(default_factory=list)
    """Leave out relative paths that match, e.g. 'test/*'; a folder that matches is not looked into."""
    as_text: Annotated[Globs, arg(metavar="GLOB [GLOB ...]")] = field(default_factory=list)
    """Read files that match as plain text, whatever their ending, e.g. '*.json' among the files of a program."""
    text_field: str = "text"
    """Field or column with the text in JSON, CSV, Parquet and Arrow."""
    strict: bool = False
    """Stop at the first file or record that cannot be read, instead of leaving it out and listing it."""

    def open(self) -> Source:
        """The source to read; DataError where there is none."""
        from data_pipeline.prepare.sources import open_source

        return open_source(
            self.source,
            text_field=self.text_field,
            include=_flat(self.include),
            exclude=_flat(self.exclude),
            as_text=_flat(self.as_text),
            strict=self.strict,
        )

    def arguments(self) -> list[str]:
        """The options as the user gave them, for a command line that we suggest."""
        arguments = ["--source", self.source]
        for option, globs in (("include", self.include), ("exclude", self.exclude), ("as-text", self.as_text)):
            if globs:
                arguments.append(f"--{option}")
                arguments += _flat(globs)
        if self.text_field != "text":
            arguments += ["--text-field", self.text_field]
        if self.strict:
            arguments.append("--strict")
        return arguments


def say_left_out(counts: Mapping[str, int], examples: Mapping[str, Sequence[str]], file: Path | None = None) -> None:
    """Print what was left out: a line for each reason, with the first names, and where the whole list lies."""
    from data_pipeline.prepare.left_out import left_out_lines

    if not counts:
        return
    heading = "Left out:"
    if file is not None:
        heading = f"Left out (all names in {file}):"
    say("\n".join([heading] + [f"  {line}" for line in left_out_lines(counts, examples)]))


def read_so_far(documents: int, text_bytes: int) -> str:
    """How much was read, for a line of progress or of results."""
    return f"{plural(documents, 'document')}, {human_bytes(text_bytes)}"


def _flat(lists: list[list[str]]) -> list[str]:
    """Every glob, whichever of the option's uses named it."""
    return [glob for globs in lists for glob in globs]
