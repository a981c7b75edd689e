"""The options that name a corpus: the same for every verb that reads text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import UseAppendAction, arg

from launcher.cli.console import human_bytes, note, say
from launcher.wording import plural
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from data_pipeline.prepare.joining import Join
    from data_pipeline.prepare.sources import Source

Globs = UseAppendAction[list[list[str]]]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where the text comes from."""

    source: Annotated[str, arg(metavar="PATH", help_behavior_hint="(required)")] = ""
    """Folder or file, or its URL (s3://, gs://): text, .json, .jsonl, .ndjson, .csv, .tsv, .parquet, .arrow, also .gz,
    .bz2, .xz, .zst; or "stdlib", the Python source of the standard library."""
    include: Annotated[Globs, arg(metavar="GLOB [GLOB ...]")] = field(default_factory=list)
    """Read only relative paths that match, e.g. '*.jsonl.gz' (quote it for the shell)."""
    exclude: Annotated[Globs, arg(metavar="GLOB [GLOB ...]")] = field(default_factory=list)
    """Leave out relative paths that match, e.g. 'test/*'; a folder that matches is not looked into."""
    as_text: Annotated[Globs, arg(metavar="GLOB [GLOB ...]")] = field(default_factory=list)
    """Read files that match as plain text, whatever their ending, e.g. '*.json' among the files of a program."""
    as_json: Annotated[Globs, arg(metavar="GLOB [GLOB ...]")] = field(default_factory=list)
    """Read files that match as JSON: lines, an array or values, whatever their ending, e.g. 'part-*'."""
    text_field: str = "text"
    """Field or column with the text in JSON, CSV, Parquet and Arrow."""
    format: Literal["auto", "text", "messages", "conversations", "prompt"] = "auto"
    """What JSON, CSV, Parquet and Arrow hold: texts, or conversations by the field 'messages', 'conversations'
    (ShareGPT) or 'prompt' with 'completion'. By default what the files agree on."""
    strict: bool = False
    """Stop at the first file or record that cannot be read, instead of leaving it out and listing it."""
    min_bytes: int = 0
    """Leave out documents with fewer bytes of text, and list them."""
    max_bytes: int | None = None
    """Leave out documents with more bytes of text, and list them."""
    join: Literal["file", "directory"] = "file"
    """What one document is: a text file, or the text files of a directory, in the order of their names."""
    join_depth: int | None = None
    """Directories from the source down that count, all below joined: 1 for a folder of repositories. Each unless
    given."""
    join_bytes: int | None = None
    """Cut a directory between files where its document would have more bytes of them, 2^25 unless given."""
    join_header: Annotated[str, arg(metavar="TEMPLATE")] = ""
    r"""Text before each file, e.g. '# {path}\n'; also {directory} and {name}. Nothing unless given."""

    def open(self) -> Source:
        """The source to read; DataError if there is none, ConfigError if none is named.

        What is not read as text is said: nobody has to have named it.
        """
        from data_pipeline.prepare.reading import Lengths
        from data_pipeline.prepare.recognise import described
        from data_pipeline.prepare.sources import open_source

        if not self.source:
            raise ConfigError("--source is missing: a folder or file of text, its URL, or stdlib.")
        source = open_source(
            self.source,
            text_field=self.text_field,
            format=self.format,
            include=_flat(self.include),
            exclude=_flat(self.exclude),
            as_text=_flat(self.as_text),
            as_json=_flat(self.as_json),
            strict=self.strict,
            join=self._joining(),
            lengths=Lengths(min_bytes=self.min_bytes, max_bytes=self.max_bytes),
        )
        if source.fields.kind != "text":
            note(f"{self.source}: conversations {described(source.fields.kind)}")
        return source

    def arguments(self) -> list[str]:
        """The options as the user gave them, for a command line that we suggest."""
        arguments = ["--source", self.source]
        patterns = {
            "include": self.include,
            "exclude": self.exclude,
            "as-text": self.as_text,
            "as-json": self.as_json,
        }
        for option, globs in patterns.items():
            if globs:
                arguments.append(f"--{option}")
                arguments += _flat(globs)
        if self.text_field != "text":
            arguments += ["--text-field", self.text_field]
        if self.format != "auto":
            arguments += ["--format", self.format]
        if self.strict:
            arguments.append("--strict")
        if self.join != "file":
            arguments += ["--join", self.join]
        others = {
            "min-bytes": self.min_bytes or None,
            "max-bytes": self.max_bytes,
            "join-depth": self.join_depth,
            "join-bytes": self.join_bytes,
            "join-header": self.join_header or None,
        }
        for option, value in others.items():
            if value is not None:
                arguments += [f"--{option}", str(value)]
        return arguments

    def _joining(self) -> Join | None:
        """How files are joined; None where each is a document. ConfigError for options without effect."""
        from data_pipeline.prepare.joining import DEFAULT_JOIN_BYTES, Join

        if self.join == "file":
            if self.join_depth is not None or self.join_bytes is not None or self.join_header:
                raise ConfigError(
                    "--join-depth, --join-bytes and --join-header say how files are joined: they need --join directory."
                )
            return None
        depth, most_bytes = 0, DEFAULT_JOIN_BYTES
        if self.join_depth is not None:
            # 0 is what leaving it out says: a number that is given must count something.
            if self.join_depth < 1:
                raise ConfigError(
                    f"--join-depth {self.join_depth} must be at least 1. Left out, each directory counts."
                )
            depth = self.join_depth
        if self.join_bytes is not None:
            most_bytes = self.join_bytes
        return Join(depth=depth, most_bytes=most_bytes, header=_unescaped(self.join_header))


def say_left_out(
    counts: Mapping[str, int], examples: Mapping[str, Sequence[str]], file: Path | str | None = None
) -> None:
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


def _unescaped(template: str) -> str:
    """A template with its newlines and tabs, which a shell passes on as two characters each."""
    escapes = {r"\\": "\\", r"\n": "\n", r"\t": "\t"}
    return re.sub(r"\\[\\nt]", lambda found: escapes[found[0]], template)


def _flat(lists: list[list[str]]) -> list[str]:
    """Every glob, whichever of the option's uses named it."""
    return [glob for globs in lists for glob in globs]
