"""The cost of looking for duplicates: the pass that hashes texts, and the decision over many documents.

    python -m benchmarks.duplicates [--source stdlib] [--documents 2_000_000]

One process. The first line is the pass over ``--source``, files and all, in CPU time. The second is the decision over
``--documents`` signatures that are made up, a tenth of them near duplicates of others: CPU time, and the most memory
that it had beyond the imports, pages of files not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline.prepare.duplicates.corpus import SignedCorpus
from data_pipeline.prepare.duplicates.decide import decide
from data_pipeline.prepare.duplicates.rule import DuplicateRule
from data_pipeline.prepare.duplicates.signatures import band_keys
from data_pipeline.prepare.duplicates.signed import FACTS, SignedPart, SignedWriter
from data_pipeline.prepare.sources import open_source

PARTS = 10
_CHANGED = 0.05
"""Share of a near duplicate's values that are not those of its original."""


def measure_pass(spec: str, rule: DuplicateRule, folder: Path) -> tuple[int, int, float]:
    """Documents, bytes of text and CPU seconds of the pass over a source."""
    source = open_source(spec)
    started = time.process_time()
    writer = SignedWriter(folder, rule)
    for document in source:
        writer.add(document.name, document.text)
    record = writer.finish()
    return record.documents, record.text_bytes, time.process_time() - started


def measure_decision(documents: int, rule: DuplicateRule, folder: Path) -> tuple[int, float, int]:
    """Documents removed, CPU seconds and bytes of memory of a decision over made-up signatures."""
    corpus = _make_corpus(documents // PARTS, rule, folder)
    before, watch = _anonymous_bytes(), _Watch()
    with watch:
        started = time.process_time()
        found = decide(corpus, rule, 0.05)
        seconds = time.process_time() - started
    return len(found.removal.documents), seconds, watch.most - before


def _make_corpus(count: int, rule: DuplicateRule, folder: Path) -> SignedCorpus:
    """``PARTS`` parts of ``count`` documents; a tenth of each resembles documents of the first part."""
    random = np.random.default_rng(0)
    originals = None
    parts = []
    for number in range(PARTS):
        path = folder / str(number)
        path.mkdir()
        signatures = random.integers(0, 1 << 16, (count, rule.permutations), dtype=np.uint16)
        if originals is None:
            originals = signatures[: count // 10].copy()
        near = signatures[: count // 10]
        near[:] = originals
        near[random.random(near.shape) < _CHANGED] += 1
        signatures.tofile(path / "signatures.bin")
        band_keys(signatures, *rule.bands()).T.copy().tofile(path / "bands.bin")
        facts = np.zeros(count, dtype=FACTS)
        facts["low"] = facts["hash"] = random.integers(0, 1 << 63, count)
        facts["text_bytes"] = random.integers(100, 10_000, count)
        facts.tofile(path / "documents.bin")
        parts.append(SignedPart(path, count, rule))
    return SignedCorpus(parts)


class _Watch:
    """The most memory that the process has within the block."""

    def __enter__(self) -> None:
        self.most, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self.most = max(self.most, _anonymous_bytes())


def _anonymous_bytes() -> int:
    """Memory of this process that no file holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both, and print a line each."""
    parser = argparse.ArgumentParser(description="The cost of looking for duplicates.")
    parser.add_argument("--source", default="stdlib")
    parser.add_argument("--documents", type=int, default=2_000_000)
    chosen = parser.parse_args(arguments)
    rule = DuplicateRule(kind="near")
    with tempfile.TemporaryDirectory() as folder:
        documents, text_bytes, seconds = measure_pass(chosen.source, rule, Path(folder) / "pass")
        print(
            f"pass: {documents:,} documents, {text_bytes / 1e6:.1f} MB in {seconds:.2f} s of CPU: "
            f"{documents / seconds:,.0f} documents/s, {text_bytes / 1e6 / seconds:.0f} MB/s"
        )
        (Path(folder) / "decision").mkdir()
        removed, seconds, memory = measure_decision(chosen.documents, rule, Path(folder) / "decision")
        print(
            f"decision: {chosen.documents:,} documents in {seconds:.1f} s of CPU, {removed:,} removed, "
            f"{memory / 1e6:.0f} MB of memory, {memory / chosen.documents:.0f} bytes a document"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
