"""Building a corpus from text to shards, compared with SentencePiece alone: rate, and memory over all processes.

    python -m benchmarks.build [--quick]

The text is this Python's own source, repeated in two JSON Lines files, each too large for one worker to get both; some
texts are joined into documents of 8 MB. ``longctx data build`` makes shards from them on all cores, with a tokenizer of
8,000 ids. SentencePiece alone encodes the same documents on as many threads, from memory and without output. Both are
measured again if a bound is missed. CPU seconds are those of all processes, including startup; memory is their peak
sum, with shared file pages counted once (proportional set size, sampled ten times a second).

With ``--quick`` the text is a fifth: a single source part for the builder, which then uses threads and no worker
processes. Saved in ``benchmarks/results/KIND/build.json``; exit code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece as spm

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.ranks import run_ranks
from data_pipeline.prepare.parts.pool import usable_cores
from data_pipeline.prepare.sources import open_source
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from data_pipeline.shards.manifest import Manifest

FILES, FILE_BYTES = 2, 150_000_000
"""Text files: two of them exceed the maximum size of a source part."""
QUICK_BYTES = 30_000_000
LONG_BYTES = 8 << 20
"""Bytes of a document joined from others."""
LONG_SHARE = 4
"""In each pass, every this many documents one is also joined into a long one."""
VOCABULARY, SAMPLE_BYTES = 8000, 4 << 20
GROUP_BYTES = 1 << 24
"""Text given to SentencePiece per call."""
LEAST_RATE, MOST_MB = 0.9, 1500
_LOOK_SECONDS = 0.1
PRELOAD = ("data_pipeline.prepare.build_shards",)


def write_corpus(folder: Path, file_bytes: int, files: int = FILES, source: str = "stdlib") -> list[Path]:
    """Write JSON Lines files of about this many bytes each."""
    folder.mkdir()
    paths = []
    for number in range(files):
        paths.append(folder / f"{number}.jsonl")
        with paths[-1].open("w") as file:
            for text in _texts(source):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                if file.tell() > file_bytes:
                    break
    return paths


def _texts(source: str) -> Iterator[str]:
    """Yield a source's documents again and again, and long ones joined from some of them."""
    while True:
        parts: list[str] = []
        size = 0
        for number, document in enumerate(open_source(source)):
            yield document.text
            if number % LONG_SHARE:
                continue
            parts.append(document.text)
            size += len(document.text.encode())
            if size >= LONG_BYTES:
                yield "".join(parts)
                parts, size = [], 0


# --- SentencePiece alone --------------------------------------------------------------------------------------


def encode_alone(model: Path, files: Sequence[Path], threads: int) -> dict[str, float]:
    """Encode all documents, group by group; return the time and sizes without reading."""
    processor = spm.SentencePieceProcessor(model_file=str(model))
    seconds, cpu_seconds, text_bytes, tokens = 0.0, 0.0, 0, 0
    for group in _groups(files):
        began, cpu_began = time.perf_counter(), time.process_time()
        found = processor.encode(group, num_threads=threads, return_type="numpy")
        seconds += time.perf_counter() - began
        cpu_seconds += time.process_time() - cpu_began
        tokens += sum(map(len, found))
        text_bytes += sum(len(text.encode()) for text in group)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "text_bytes": text_bytes, "tokens": tokens}


def _groups(files: Sequence[Path]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for path in files:
        with path.open() as lines:
            for line in lines:
                group.append(json.loads(line)["text"])
                size += len(line)
                if size >= GROUP_BYTES:
                    yield group
                    group, size = [], 0
    if group:
        yield group


# --- the build ------------------------------------------------------------------------------------------------


def build(corpus: Path, tokenizer: Path, output: Path, threads: int) -> dict[str, float]:
    """Run ``longctx data build``; return its time and sizes, and the peak memory over all its processes."""
    command = [sys.executable, "-m", "launcher", "data", "build", "--source", str(corpus), "--tokenizer"]
    command += [str(tokenizer), "--output", str(output), "--workers", str(threads), "--validation-fraction", "0"]
    began, cpu_began = time.perf_counter(), _cpu_of_children()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with _Watch(process.pid) as watch:
        code = process.wait()
    seconds = time.perf_counter() - began
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with code {code}")
    manifest = Manifest.load(output)
    return {
        "seconds": seconds,
        "cpu_seconds": _cpu_of_children() - cpu_began,
        "peak_mb": watch.most / 1e6,
        "processes": watch.processes,
        "text_bytes": manifest.text_bytes,
        "tokens": manifest.tokens,
    }


def _cpu_of_children() -> float:
    """Return the CPU seconds of all child processes that have ended, with their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Watch:
    """Thread that tracks the peak memory of a process and all its descendants together."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.most = self.processes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            family = list(_family(self._pid))
            self.processes = max(self.processes, len(family))
            self.most = max(self.most, sum(map(_proportional_bytes, family)))


def _family(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:  # it has ended meanwhile
            continue
        for child in children:
            yield from _family(int(child))


def _proportional_bytes(pid: int) -> int:
    """Return a process's resident memory, with shared pages divided by the number of their users."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended meanwhile
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


# --- both -----------------------------------------------------------------------------------------------------


def measure(folder: Path, file_bytes: int) -> dict[str, Any]:
    """Measure both, and their ratios."""
    threads = usable_cores()
    files = write_corpus(folder / "text", file_bytes)
    model = folder / "tokenizer.model"
    train_tokenizer(open_source("stdlib"), model, vocab_size=VOCABULARY, max_text_bytes=SAMPLE_BYTES)
    (alone,) = run_ranks(encode_alone, 1, model, files, threads, preload=PRELOAD)
    print({"alone": alone}, flush=True)
    built = build(folder / "text", model, folder / "shards", threads)
    print({"built": built}, flush=True)
    assert built["text_bytes"] == alone["text_bytes"], "the two encoded different texts"
    return {
        "threads": threads,
        "alone": alone,
        "built": built,
        "rate_ratio": alone["seconds"] / built["seconds"],
        "cpu_ratio": alone["cpu_seconds"] / built["cpu_seconds"],
    }


def bounds_of(result: dict[str, Any]) -> list[Bound]:
    """Return the bounds on the results."""
    return [
        Bound("text a second of CPU over SentencePiece's", result["cpu_ratio"], LEAST_RATE, at_least=True, again=()),
        Bound("text a second over SentencePiece's", result["rate_ratio"], LEAST_RATE, at_least=True, again=()),
        Bound("MB of all processes", result["built"]["peak_mb"], MOST_MB),
    ]


def main() -> int:
    """Print and save the results; return 1 if one is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse(parser, "a fifth of the text")
    file_bytes = FILE_BYTES
    if options.quick:
        file_bytes = QUICK_BYTES
    with tempfile.TemporaryDirectory(prefix="longctx-build-") as folder:
        result = measure(Path(folder), file_bytes)
    return conclude("build", result, bounds_of(result), options)


if __name__ == "__main__":
    sys.exit(main())
