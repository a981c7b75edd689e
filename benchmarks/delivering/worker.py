"""One contender in its own process: it waits for orders, and answers in lines of JSON.

    PYTHON -m benchmarks.delivering.worker NAME CORPUS

``contest`` starts it, perhaps with another Python than ours: from this project it imports only modules without
dependencies except NumPy, unless the contender is our own.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from benchmarks.delivering.contender import Contender
from benchmarks.delivering.peers import PEERS

TOKENS_A_LOOK = 1 << 18
"""Tokens between two clock reads."""


def find(name: str) -> Contender:
    """Return the contender with this name."""
    of_name = {contender.name: contender for contender in PEERS}
    if name not in of_name:
        # Our own contenders need this project's dependencies.
        from benchmarks.delivering.contenders import HERE

        of_name |= {contender.name: contender for contender in HERE}
    return of_name[name]


def anonymous_bytes() -> int:
    """Return resident memory that is backed by no file, without freed memory."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


class Worker:
    """A contender and its corpus."""

    def __init__(self, contender: Contender, corpus: Path) -> None:
        self._contender, self._corpus = contender, corpus
        self._before = 0

    def missing(self) -> str:
        """Return the package that is not installed; "" if all are."""
        for name in self._contender.imports:
            package = name.split(".")[0]
            if importlib.util.find_spec(package) is None:
                return package
        return ""

    def prepare(self, own: str, seq_len: int) -> dict[str, Any]:
        """Write the corpus in the contender's format."""
        Path(own).mkdir(parents=True)
        self._contender.prepare(self._corpus, Path(own), seq_len)
        return {}

    def drop(self, own: str) -> dict[str, Any]:
        """Remove written files."""
        shutil.rmtree(own)
        return {}

    def measure(self, own: str, seq_len: int, most_tokens: int, most_seconds: float) -> dict[str, Any]:
        """Open the corpus and take rows until either limit is reached; return time and memory."""
        burst = self._contender.burst
        if not self._before:
            # The first call is not measured: it imports.
            next(self._contender.open(self._corpus, Path(own), seq_len).rows)
            self._before = anonymous_bytes()
        began = time.process_time()
        delivery = self._contender.open(self._corpus, Path(own), seq_len)
        row = next(delivery.rows)
        opened = time.process_time() - began
        for _ in range(burst - 1):
            row = next(delivery.rows)
        row_tokens = seq_len * delivery.rows_at_once
        look = -(-max(TOKENS_A_LOOK // row_tokens, 1) // burst) * burst
        count, seconds = 0, 0.0
        began = time.process_time()
        while seconds < most_seconds and (count * row_tokens < most_tokens or not count):
            for _ in range(look):
                row = next(delivery.rows)
            count += look
            seconds = time.process_time() - began
        memory = anonymous_bytes() - self._before
        del row
        return {
            "tokens": count * row_tokens,
            "cpu_seconds": seconds,
            "first_cpu_seconds": opened,
            "memory_bytes": memory,
            "state_bytes": len(json.dumps(delivery.state(), default=repr)),
        }


def serve(worker: Worker, orders: TextIO, answers: TextIO) -> None:
    """Carry out order after order."""
    for line in orders:
        order = json.loads(line)
        try:
            answer = getattr(worker, order.pop("do"))(**order)
        except Exception as error:  # any peer's error is its row's answer
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            traceback.print_exc()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serve the contender that the command line names."""
    # Libraries print to stdout, which carries the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, corpus = sys.argv[1:]
    worker = Worker(find(name), Path(corpus))
    answers.write(json.dumps({"missing": worker.missing()}) + "\n")
    answers.flush()
    serve(worker, sys.stdin, answers)


if __name__ == "__main__":
    main()
