"""Which of a folder's files are read, by glob patterns on their relative paths."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Glob patterns, where ``*`` also crosses folders and a folder's own path stands for all below it."""

    include: Sequence[str] = ()
    """Only what matches one of these is read; empty: everything."""
    exclude: Sequence[str] = ()
    as_text: Sequence[str] = ()
    """Files that are read as plain text, whatever their ending says."""
    as_json: Sequence[str] = ()
    """Files that are read as JSON: lines, an array or values, unless they are read as text."""
    _used: set[str] = field(default_factory=set, init=False, compare=False)
    _excluded_folders: list[str] = field(default_factory=list, init=False, compare=False)

    def includes(self, name: str) -> bool:
        """Whether the file is one of those that are asked for."""
        return not self.include or self._matches(name, self.include)

    def excludes(self, name: str) -> bool:
        """Whether the file is left out."""
        return self._matches(name, self.exclude)

    def excludes_folder(self, name: str) -> bool:
        """Whether the folder is left out with all below it."""
        is_excluded = self._matches(name, self.exclude)
        if is_excluded:
            self._excluded_folders.append(name)
        return is_excluded

    def read_as(self, name: str) -> str:
        """How the file is read, ``text`` or ``json``; empty if its ending says it."""
        if self._matches(name, self.as_text):
            return "text"
        if self._matches(name, self.as_json):
            return "json"
        return ""

    def unused(self) -> list[str]:
        """Patterns that matched nothing so far: most often a typing error."""
        patterns = (*self.include, *self.exclude, *self.as_text, *self.as_json)
        return [pattern for pattern in patterns if pattern not in self._used and not self._lies_below(pattern)]

    def _matches(self, name: str, patterns: Sequence[str]) -> bool:
        """Whether a pattern names a file, or a folder above it."""
        found = [pattern for pattern in patterns if _match(name, pattern)]
        self._used.update(found)
        return bool(found)

    def _lies_below(self, pattern: str) -> bool:
        """Whether the pattern may mean something in a folder that was left out, and so never looked into."""
        return any(pattern.startswith(("*", f"{folder}/")) for folder in self._excluded_folders)


def _match(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern.rstrip("/") + "/*")
