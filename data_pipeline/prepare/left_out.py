"""Skipped records from a source: counts, a few names per reason, and the full list in a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import xxhash

from data_pipeline.prepare.source_items import Skip
from data_pipeline.stores.urls import Location

LEFT_OUT_FILE = "left_out.jsonl"
_EXAMPLES = 3


class LeftOut:
    """Counts by reason, with the first few names."""

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
        """Add the counts and examples from later skips."""
        self.counts.update(counts)
        for reason, names in examples.items():
            known = self.examples.setdefault(reason, [])
            known += names[: _EXAMPLES - len(known)]

    def lines(self) -> list[str]:
        """Return one line per reason with its count and first names."""
        return left_out_lines(self.counts, self.examples)


def left_out_lines(counts: Mapping[str, int], examples: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one line per reason with its count and known names."""
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
        # Details may contain lone surrogates, which UTF-8 cannot encode.
        line = json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        self._write(line)

    def append(self, path: Path) -> None:
        """Append another list's lines."""
        with path.open("rb") as lines:
            while block := lines.read(1 << 20):
                self._write(block)

    def close(self) -> str:
        """Close the file and return its xxh3_128 checksum; empty if nothing was left out."""
        if self._file is None:
            return ""
        self._file.close()
        return self._digest.hexdigest()

    def _write(self, content: bytes) -> None:
        # Write immediately: a list with every null in a large corpus would not fit into memory.
        if self._file is None:
            self._file = self._path.open("wb")
        self._digest.update(content)
        self._file.write(content)


def read_left_out(folder: Location) -> LeftOut:
    """Return the skips listed in a shard folder's file; empty if the file does not exist."""
    path = folder / LEFT_OUT_FILE
    if not path.exists():
        return LeftOut()
    with path.open("rb") as lines:
        return LeftOut(Skip(**json.loads(line)) for line in lines)
