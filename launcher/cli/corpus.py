"""The options that name a corpus: the same for every verb that reads text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from tyro.conf import UseAppendAction, arg

if TYPE_CHECKING:
    from data_pipeline.prepare.sources import Source


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where the text comes from."""

    source: Annotated[str, arg(metavar="PATH")]
    """Folder, text file, .jsonl (.gz, .zst) or .parquet; or "stdlib", the Python source of the standard library."""
    exclude: Annotated[UseAppendAction[list[list[str]]], arg(metavar="GLOB [GLOB ...]")] = field(default_factory=list)
    """Leave out relative paths that match, e.g. 'test/*' (quote it for the shell)."""
    text_field: str = "text"
    """Field with the text in JSON Lines and Parquet."""

    def open(self) -> Source:
        """The source to read; DataError where there is none."""
        from data_pipeline.prepare.sources import open_source

        return open_source(self.source, text_field=self.text_field, exclude=self._globs())

    def arguments(self) -> list[str]:
        """The options as the user gave them, for a command line that we suggest."""
        arguments = ["--source", self.source]
        if self.exclude:
            arguments.append("--exclude")
            arguments += self._globs()
        if self.text_field != "text":
            arguments += ["--text-field", self.text_field]
        return arguments

    def _globs(self) -> list[str]:
        """Every glob, whichever ``--exclude`` named it."""
        return [glob for globs in self.exclude for glob in globs]
