"""Records that a source left out: counts, a few names for each reason, and the full list in a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import xxhash

from data_pipeline.prepare.documents import Skip
from data_pipeline.stores.urls import Location

LEFT_OUT_FILE = "left_out.jsonl"
_EXAMPLES = 3


class LeftOut:
    """Counts by reason, and the first few names."""

    def __init__(self, skips: Iterable[Skip] = ()) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        for skip in skips:
            self.add(skip)

    def add(self, skip: Skip) -> None:
        """Count one skip."""
        self.counts[skip.reason] += 1
        names = self.examples.setdefault(skip.reason, [])
        if len(names) < _EXAMPLES:
            shown = skip.name
            if skip.detail:
                shown += f" ({skip.detail})"
            names.append(shown)

    def merge(self, counts: Mapping[str, int], examples: Mapping[str, Sequence[str]]) -> None:
        """Add the counts and examples of later skips."""
        self.counts.update(counts)
        for reason, names in examples.items():
            known = self.examples.setdefault(reason, [])
            known += names[: _EXAMPLES - len(known)]

    def lines(self) -> list[str]:
        """Return a line for each reason: its count and first names."""
        return left_out_lines(self.counts, self.examples)


def left_out_lines(counts: Mapping[str, int], examples: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each reason: its count and known names."""
    lines = []
    for reason, count in sorted(counts.items()):
        line = f"{count:,} {reason}"
        names = examples.get(reason, ())
        if names:
            line += f": {', '.join(names)}"
            if count > len(names):
                line += ", …"
        lines.append(line)
    return lines


class LeftOutFile:
    """Writer that streams skips into ``left_out.jsonl``; the file exists only if there are any."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEFT_OUT_FILE
        self._digest = xxhash.xxh3_128()
        self._file = None

    def add(self, skip: Skip) -> None:
        """Write one line."""
        entry = {"name": skip.name, "reason": skip.reason}
        if skip.detail:
            entry["detail"] = skip.detail
        line = json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        self._write(line)

    def append(self, path: Path) -> None:
        """Append the lines of another list of skips."""
        with path.open("rb") as lines:
            while block := lines.read(1 << 20):
                self._write(block)

    def close(self) -> str:
        """Close the file and return its xxh3_128; empty if nothing was left out."""
        if self._file is None:
            return ""
        self._file.close()
        return self._digest.hexdigest()

    def _write(self, content: bytes) -> None:
        # Immediately, not at the end: a list of every null of a large corpus would not fit into memory.
        if self._file is None:
            self._file = self._path.open("wb")
        self._digest.update(content)
        self._file.write(content)


def read_left_out(folder: Location) -> LeftOut:
    """Return the skips listed in a shard folder's file; empty if it has no such file."""
    path = folder / LEFT_OUT_FILE
    if not path.exists():
        return LeftOut()
    with path.open("rb") as lines:
        return LeftOut(Skip(**json.loads(line)) for line in lines)
