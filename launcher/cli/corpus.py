"""Options for verbs that read text: corpus, workers and duplicates."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from launcher.cli.cli_output import byte_rate, human_bytes, note, print_line, progress
from launcher.cli.shared_options import RepeatedValues, flatten_values
from launcher.wording import format_count
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule
    from data_pipeline.prepare.duplicates.outcome import DuplicateReport
    from data_pipeline.prepare.joining import Join
    from data_pipeline.prepare.parts.build_engine import Engine
    from data_pipeline.prepare.sources import TextSource


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """Text to read."""

    source: Annotated[str, arg(metavar="PATH", help_behavior_hint="(required)")] = ""
    """Folder, file or URL (s3://, gs://): text, .json, .jsonl, .ndjson, .csv, .tsv, .parquet, .arrow, also .gz, .bz2,
    .xz, .zst; for pairs also .po, or two texts named by their fields, such as a.en and a.de; or "stdlib", the Python
    source of the standard library."""
    include: Annotated[RepeatedValues, arg(metavar="GLOB [GLOB ...]")] = field(default_factory=list)
    """Read only relative paths that match, e.g. '*.jsonl.gz' (quote it for the shell)."""
    exclude: Annotated[RepeatedValues, arg(metavar="GLOB [GLOB ...]")] = field(default_factory=list)
    """Leave out relative paths that match, e.g. 'test/*'; matching folders are not searched."""
    as_text: Annotated[RepeatedValues, arg(metavar="GLOB [GLOB ...]")] = field(default_factory=list)
    """Read matching files as plain text, regardless of their suffix, e.g. '*.json' among a program's files."""
    as_json: Annotated[RepeatedValues, arg(metavar="GLOB [GLOB ...]")] = field(default_factory=list)
    """Read matching files as JSON (lines, an array or values), regardless of their suffix, e.g. 'part-*'."""
    text_field: str = "text"
    """Field or column with the text in JSON, CSV, Parquet and Arrow; with --source-field, the target's."""
    source_field: Annotated[str, arg(metavar="NAME")] = ""
    """Field or column with the other side of pairs, which an encoder reads: a model with model.encoder_layers learns to
    write --text-field from it."""
    format: Literal["auto", "text", "messages", "conversations", "prompt"] = "auto"
    """Content of JSON, CSV, Parquet and Arrow: texts, or conversations in the field 'messages', 'conversations'
    (ShareGPT) or 'prompt' with 'completion'. auto takes the form that all files share."""
    strict: bool = False
    """Stop at the first unreadable file or record, instead of leaving it out and listing it."""
    min_bytes: int = 0
    """Leave out documents with fewer bytes of text, and list them."""
    max_bytes: int | None = None
    """Leave out documents with more bytes of text, and list them."""
    join: Literal["file", "directory"] = "file"
    """Unit that becomes a document: a text file, or a directory's text files in name order."""
    join_depth: int | None = None
    """Directory levels below the source that form documents; everything deeper is joined. 1 suits a folder of
    repositories. Default: each directory."""
    join_bytes: int | None = None
    """Split a directory between files if its document would have more bytes from them; default: 2^25."""
    join_header: Annotated[str, arg(metavar="TEMPLATE")] = ""
    r"""Text before each file, e.g. '# {path}\n'; also {directory} and {name}. Default: empty."""

    def open(self, *, preferences: bool = False) -> TextSource:
        """Open the source, or one of preferences. Raise DataError if it does not exist, ConfigError if it is unset.

        Print a note if the source is not plain text, because this is detected and the user need not request it.
        """
        from data_pipeline.prepare.detect_format import PREFERENCES, describe_kind
        from data_pipeline.prepare.source_reader import Lengths
        from data_pipeline.prepare.sources import open_source

        if not self.source:
            raise ConfigError("--source is missing: a folder or file of text, its URL, or stdlib.")
        record_format: str = self.format
        if preferences:
            if self.format != "auto":
                raise ConfigError(f"--format {self.format} selects other records than --kind preferences. Choose one.")
            record_format = PREFERENCES
        source = open_source(
            self.source,
            text_field=self.text_field,
            source_field=self.source_field,
            format=record_format,
            include=flatten_values(self.include),
            exclude=flatten_values(self.exclude),
            as_text=flatten_values(self.as_text),
            as_json=flatten_values(self.as_json),
            strict=self.strict,
            join=self._joining(),
            lengths=Lengths(min_bytes=self.min_bytes, max_bytes=self.max_bytes),
        )
        if source.fields.kind == "pairs":
            note(f"{self.source}: pairs, {source.fields.source!r} to {source.fields.text!r}")
        elif preferences:
            note(f"{self.source}: preferences {describe_kind(source.fields.kind)}")
        elif source.fields.kind != "text":
            note(f"{self.source}: conversations {describe_kind(source.fields.kind)}")
        return source

    def arguments(self) -> list[str]:
        """Return the options as the user gave them, for a suggested command line."""
        arguments = ["--source", self.source]
        # Only changed options, so that the suggested command stays short.
        defaults = CorpusOptions(source=self.source)
        for f in fields(self):
            value = getattr(self, f.name)
            if value == getattr(defaults, f.name):
                continue
            arguments.append(f"--{f.name.replace('_', '-')}")
            if isinstance(value, list):
                arguments += flatten_values(value)
            elif value is not True:
                arguments.append(str(value))
        return arguments

    def _joining(self) -> Join | None:
        """Build the file-joining rule; None if each file is a document. Raise ConfigError for unused options."""
        from data_pipeline.prepare.joining import DEFAULT_JOIN_BYTES, Join

        if self.join == "file":
            if self.join_depth is not None or self.join_bytes is not None or self.join_header:
                raise ConfigError(
                    "--join-depth, --join-bytes and --join-header set how files are joined: they need --join directory."
                )
            return None
        depth, most_bytes = 0, DEFAULT_JOIN_BYTES
        if self.join_depth is not None:
            # 0 would mean the same as leaving it out, so an explicit number must be positive.
            if self.join_depth < 1:
                raise ConfigError(
                    f"--join-depth {self.join_depth} must be at least 1; without it, each directory counts."
                )
            depth = self.join_depth
        if self.join_bytes is not None:
            most_bytes = self.join_bytes
        return Join(depth=depth, most_bytes=most_bytes, header=_unescaped(self.join_header))


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Cores or cluster nodes that do the work."""

    workers: int | None = None
    """Cores to use on this machine or in the cluster, about 0.5 GB each; default: all. The result does not depend on
    it."""
    engine: Literal["local", "ray"] = "local"
    """local: processes on this machine. ray: workers across a Ray cluster; its nodes share the file systems of source
    and output."""
    ray_address: Annotated[str | None, arg(metavar="ADDRESS")] = None
    """HOST:PORT of the cluster's head, or "auto". Default: RAY_ADDRESS, then a cluster that includes this machine, then
    this machine alone."""

    @contextlib.contextmanager
    def hired(self) -> Iterator[Engine]:
        """Yield the engine; a cluster stays connected until the ``with`` block ends."""
        # Before any hashing: an unreachable cluster is reported at once.
        if self.engine == "ray":
            from data_pipeline.prepare.parts.cluster import open_cluster

            with open_cluster(self.ray_address, say=note) as engine:
                yield engine
            return
        # An address without the engine would be ignored, and the work would run on this machine alone.
        if self.ray_address is not None:
            raise ConfigError("--ray-address is a Ray cluster's address: it needs --engine ray.")
        from data_pipeline.prepare.parts.pool import LocalEngine

        yield LocalEngine()


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Treatment of texts that occur in the corpus more than once."""

    duplicates: Literal["keep", "together", "exact", "near"] = "keep"
    """keep: no search for duplicates. exact: keep one of several equal texts. near: keep the longest of several similar
    texts. together: keep all, with similar texts on the same side of the validation split (as near does, too)."""
    similarity: float = 0.8
    """Minimum share of common shingles (Jaccard similarity) for near duplicates."""
    shingles: Literal["words", "characters"] = "words"
    """Unit of a shingle. With words, case, spaces and punctuation do not count."""
    shingle_size: int | None = None
    """Shingle length; default: 5 words or 9 characters."""
    permutations: int = 128
    """Values in a MinHash signature: more estimate the similarity better, at 2 bytes per document each."""

    def rule(self) -> DuplicateRule:
        """Build and validate the rule from the options."""
        # Deferred, as in every verb: `--help` must not import the data pipeline.
        from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule

        return DuplicateRule(
            kind=self.duplicates,
            similarity=self.similarity,
            shingles=self.shingles,
            shingle_size=self.shingle_size,
            permutations=self.permutations,
        )


def hash_source(source: TextSource) -> None:
    """Hash a source's files, which takes minutes for a large one."""
    with progress(f"checking {source.spec}", total=source.num_bytes, rate=byte_rate) as update:
        source.fingerprint(progress=update)


def say_left_out(
    counts: Mapping[str, int], examples: Mapping[str, Sequence[str]], file: Path | str | None = None
) -> None:
    """Print the omitted documents: a line per reason with the first names, and the path of the full list."""
    from data_pipeline.prepare.left_out import left_out_lines

    if not counts:
        return
    header = "Left out:"
    if file is not None:
        header = f"Left out (all names in {file}):"
    print_line("\n".join([header] + [f"  {line}" for line in left_out_lines(counts, examples)]))


def duplicate_lines(report: DuplicateReport) -> list[str]:
    """Describe a build's duplicates: the number removed, some examples, and group sizes."""
    counts = report.counts
    # Over all kinds: a threshold that is too low shows as one group as large as the corpus.
    groups = f"{format_count(counts.groups, 'group')} of documents, the largest with {counts.largest_group:,}."
    if report.file is None:
        if not counts.groups:
            return ["Duplicates: none found."]
        return [f"Duplicates: none removed; {groups}"]
    lines = [f"Duplicates removed, about {report.about_tokens:,} tokens (all names in {report.file}):"]
    for kind, documents, text_bytes in (
        ("exact", counts.exact_documents, counts.exact_bytes),
        ("near", counts.near_documents, counts.near_bytes),
    ):
        names = [str(example) for example in report.examples if example.kind == kind]
        # One line per kind: a long list of names must not hide the other kind.
        shown = ""
        if names:
            shown = f": {', '.join(names)}"
        if documents > len(names) > 0:
            shown += ", …"
        if documents:
            lines.append(f"  {documents:,} {kind}, {human_bytes(text_bytes)}{shown}")
    lines.append(f"  {groups}")
    return lines


def read_so_far(documents: int, text_bytes: int) -> str:
    """Format the amount read so far, for progress or results."""
    return f"{format_count(documents, 'document')}, {human_bytes(text_bytes)}"


def _unescaped(template: str) -> str:
    """Replace escaped newlines, tabs and backslashes, which a shell passes on as two characters each."""
    escapes = {r"\\": "\\", r"\n": "\n", r"\t": "\t"}
    return re.sub(r"\\[\\nt]", lambda found: escapes[found[0]], template)
