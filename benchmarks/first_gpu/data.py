"""Step data: a corpus of source files with its tokenizer, and rows with one random document each, by length."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.first_gpu.checks import ROOT, Job, Sheet, run_step
from benchmarks.first_gpu.commands import LAUNCHER
from benchmarks.first_gpu.commands import run as run_command
from benchmarks.plan_runs import write_shards

LENGTHS = {"32K": 1 << 15, "128K": 1 << 17, "1M": 1 << 20}
"""Tokens per row, by the name used in checks."""
DRY_LENGTHS = {"32K": 1 << 8, "128K": 1 << 9, "1M": 1 << 11}
_ROWS = 6


def length_of(job: Job, name: str) -> int:
    """Return the tokens per row for this name."""
    return job.pick(LENGTHS, DRY_LENGTHS)[name]


def rows_folder(job: Job, name: str) -> Path:
    """Return the shard folder for rows with one document of this length."""
    return job.scratch / "rows" / f"documents_{length_of(job, name)}"


def corpus_folder(job: Job) -> Path:
    """Return the demo's shard folder."""
    return job.scratch / "corpus"


def run(job: Job, sheet: Sheet) -> None:
    """Write the selected data: rows, which need seconds, and the demo's corpus."""
    if "rows" in job.which:
        with sheet.attempt("rows"):
            folder = job.scratch / "rows"
            folder.mkdir(exist_ok=True)
            for length in job.pick(LENGTHS, DRY_LENGTHS).values():
                write_shards(folder, length, tokens=_ROWS * length)
            sheet.add("rows", float(_ROWS), unit="documents of each length")
    if "corpus" in job.which:
        with sheet.attempt("corpus"):
            source = ["--source", *job.pick(["stdlib"], [str(ROOT / "docs")])]
            tokenizer = job.scratch / "tokenizer.model"
            vocabulary = ["--vocab-size", str(job.pick(4096, 600))]
            train = [*LAUNCHER, "tokenizer", "train", *source, *vocabulary, "--output", str(tokenizer)]
            run_command(train, seconds=job.pick(40, 300))
            build = [*LAUNCHER, "data", "build", *source, "--tokenizer", str(tokenizer)]
            # Enough documents that some are held out, for any choice.
            build += ["--validation-fraction", str(job.pick(0.05, 0.3))]
            run_command([*build, "--output", str(corpus_folder(job))], seconds=job.pick(40, 300))
            sheet.add("corpus", unit=str(vocabulary[1]) + " words")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step as a command."""
    return run_step(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
