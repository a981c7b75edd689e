"""Measurements beyond rates: one rank's slice of a row, waits during computation, single documents, packing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import xxhash

from benchmarks.delivering.contenders import SHARDS, whole
from data_pipeline.loader import Loader, build_loader, open_order
from data_pipeline.rows.micro_batches import MicroBatches, balanced
from data_pipeline.rows.row_batches import Place, Share, lengths_of
from data_pipeline.shards.reader import ShardSet, Side, shard_tokens
from launcher.training.step_prefetch import StepPrefetcher
from longctx.batch import PackedDocuments
from parallel.layout.sequence import SequenceLayout

PAGE_BYTES = 4096
DEGREE, SLICED_TOKENS = 16, 1 << 20
"""Context ranks, and the row that they split."""
ROUNDS = 5
RANDOM_DOCUMENTS = 20_000
WAITED_TOKENS, WAITED_STEPS, COMPUTED_SECONDS = 1 << 18, 300, 0.02
"""Row length for waits, their number, and how long the main thread computes between two of them."""
DATA_RANKS, MICRO_BATCHES = 8, 8
LINEAR_TOKENS = 61_000
"""Length at which attention costs as much as all other operations in an 8-billion-parameter Llama."""


# --- a slice of a row -----------------------------------------------------------------------------------------


class CountingShards(ShardSet):
    """A shard folder that records the file pages with requested tokens."""

    def count_pages(self) -> set[int]:
        """Start counting: the page numbers go into this set."""
        self._pages: set[int] = set()
        return self._pages

    def slices(self, pieces: Iterable[tuple[int, int, int]], side: Side = "target") -> list[np.ndarray]:
        """Return documents' tokens, as ``ShardSet.slices`` does."""
        found = super().slices(pieces, side)
        for tokens in found:
            if tokens.nbytes:
                first = tokens.__array_interface__["data"][0]
                self._pages.update(range(first // PAGE_BYTES, (first + tokens.nbytes - 1) // PAGE_BYTES + 1))
        return found


def zigzag(rank: int, documents: PackedDocuments) -> Share:
    """Return one rank's tokens among ``DEGREE`` context ranks: two slices, one from each half of the row."""
    layout = SequenceLayout.build("zigzag", documents.num_tokens, DEGREE, documents)
    return Share(documents, layout.rank_runs(rank), layout)


def measure_slices(
    corpus: Path, seq_len: int = SLICED_TOKENS, num_rows: int = 8, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Compare a rank's slice with the full row: seconds, pages of tokens, bytes with verified checksums.

    Seconds are those of ``Loader.take`` after planning and verification, the mean over ranks and rows.
    """
    shards = ShardSet.open(corpus / SHARDS)
    for number in range(len(shards.manifest.shards)):
        shard_tokens(shards, number)
    places: list[Place] = [partial(zigzag, rank) for rank in range(DEGREE)]
    sliced = min(_seconds_a_row(shards, seq_len, num_rows, places) for _ in range(rounds))
    at_once = min(_seconds_a_row(shards, seq_len, num_rows, [whole]) for _ in range(rounds))
    parts = [_touched(corpus, seq_len, number, place) for number in range(num_rows) for place in places]
    wholes = [_touched(corpus, seq_len, number, whole) for number in range(num_rows)]
    pages, checked = (np.array([part[n] for part in parts]).mean() for n in (0, 1))
    whole_pages, whole_checked = (np.array([of[n] for of in wholes]).mean() for n in (0, 1))
    return {
        "seq_len": seq_len,
        "degree": DEGREE,
        "slice_us": round(1e6 * sliced, 1),
        "row_us": round(1e6 * at_once, 1),
        "slice_page_bytes": round(pages * PAGE_BYTES),
        "row_page_bytes": round(whole_pages * PAGE_BYTES),
        "touched_share": round(float(pages / whole_pages), 4),
        "slice_checked_bytes": round(checked),
        "row_checked_bytes": round(whole_checked),
        "checked_share": round(float(checked / max(whole_checked, 1)), 4),
    }


def _seconds_a_row(shards: ShardSet, seq_len: int, num_rows: int, places: Sequence[Place]) -> float:
    """Return a take's CPU seconds, the mean over these places and this many rows."""
    spent = 0.0
    for place in places:
        loader = build_loader(shards, seq_len=seq_len, rows_per_step=1)
        # The epoch block is planned with the first row.
        loader.take(place)
        began = time.process_time()
        for _ in range(num_rows):
            loader.take(place)
        spent += time.process_time() - began
    return spent / (len(places) * num_rows)


def _touched(corpus: Path, seq_len: int, number: int, place: Place) -> tuple[int, int]:
    """Return the pages with a slice's tokens in one row, and the bytes of checksum blocks that reading it verifies."""
    shards = CountingShards.open(corpus / SHARDS)
    assert isinstance(shards, CountingShards)
    loader = build_loader(shards, seq_len=seq_len, rows_per_step=1)
    # All documents' lengths are read with the plan: their checksum blocks do not count for a row.
    loader.pack_report()
    _skip(loader, number)
    pages, checked = shards.count_pages(), 0
    digest = xxhash.xxh3_64_intdigest

    def counting(block: memoryview) -> int:
        nonlocal checked
        checked += len(block)
        return digest(block)

    with mock.patch.object(xxhash, "xxh3_64_intdigest", counting):
        loader.take(place)
    return len(pages), checked


def _skip(loader: Loader, rows: int) -> None:
    """Skip this many rows without reading them."""
    state = loader.state_dict()
    loader.load_state_dict(state | {"rows_consumed": rows, "epoch_row": rows, "block_row": rows})


# --- waits ----------------------------------------------------------------------------------------------------


def measure_waits(corpus: Path, seq_len: int = WAITED_TOKENS, steps: int = WAITED_STEPS) -> dict[str, Any]:
    """Measure the wait for ``next_step`` while the main thread computes between two steps: median, p99, maximum.

    ``own`` excludes the time in which the loader had no core, or the main thread had none while it waited: other
    programs' time.
    """
    loader = build_loader(ShardSet.open(corpus / SHARDS), seq_len=seq_len, rows_per_step=1)
    feed = StepPrefetcher(loader, whole, num_steps=steps + 1, device=torch.device("cpu"))
    try:
        feed.next_step()
        waited, own = [], []
        main = threading.get_native_id()
        for _ in range(steps):
            before = _seconds_without_core()
            _compute(COMPUTED_SECONDS)
            # For the main thread, only the time it lost while it waited counts.
            before[main] = _seconds_without_core()[main]
            seconds = feed.next_step()[1]
            lost = sum(lost - before.get(thread, 0.0) for thread, lost in _seconds_without_core().items())
            waited.append(seconds)
            own.append(max(0.0, seconds - lost))
    finally:
        feed.close()
    median, p99 = np.quantile(waited, [0.5, 0.99])
    return {
        "seq_len": seq_len,
        "steps": steps,
        "median_ms": round(1000 * float(median), 3),
        "p99_ms": round(1000 * float(p99), 3),
        "worst_ms": round(1000 * max(waited), 3),
        "own_p99_ms": round(1000 * float(np.quantile(own, 0.99)), 3),
    }


def _seconds_without_core() -> dict[int, float]:
    """Return each Python thread's total time ready to run without a core, by thread number."""
    found = {}
    for thread in threading.enumerate():
        path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        try:
            found[thread.native_id] = int(path.read_text().split()[1]) / 1e9
        except OSError:  # it has ended meanwhile
            continue
    return found


def _compute(seconds: float) -> None:
    """Multiply matrices, as a model would."""
    x = torch.ones(256, 256)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(x, x)


# --- single documents -----------------------------------------------------------------------------------------


def measure_documents(corpus: Path, count: int = RANDOM_DOCUMENTS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure CPU microseconds per view of a document's tokens, in random document order, and per view of a plain
    array.
    """
    shards = ShardSet.open(corpus / SHARDS)
    for number in range(len(shards.manifest.shards)):
        shard_tokens(shards, number)
    numbers = np.random.default_rng(0).integers(0, shards.num_documents, count).tolist()
    document, tokens, starts = shards.document, shard_tokens(shards, 0), (np.array(numbers) % 1000).tolist()
    seconds, of_views = [], []
    for _ in range(rounds):
        began = time.process_time()
        for number in numbers:
            document(number)
        seconds.append((time.process_time() - began) / count)
        began = time.process_time()
        for start in starts:
            tokens[start : start + 100]
        of_views.append((time.process_time() - began) / count)
    return {
        "documents": count,
        "document_us": round(1e6 * min(seconds), 3),
        "view_us": round(1e6 * min(of_views), 3),
    }


# --- packing and balance --------------------------------------------------------------------------------------


def cost(lengths: Sequence[int]) -> int:
    """Return a row's work in an arbitrary unit: attention and all other operations."""
    return sum(length * (LINEAR_TOKENS + length) for length in lengths)


@dataclass(frozen=True)
class Work:
    """Work per rank in a step."""

    most: float
    mean: float
    least: float
    """The busiest rank's minimum: ranks have equally many rows, and one of them has the costliest."""
    lockstep: float
    """The busiest rank's work per micro-batch, summed over micro-batches."""

    @classmethod
    def of(cls, costs: Sequence[int], places: Iterable[int], dealt: MicroBatches) -> Work:
        """Return the work for rows at these places."""
        placed, ascending = list(places), sorted(costs)
        loads = np.array(
            [
                [sum(costs[placed[row]] for row in dealt.rows(number, rank)) for rank in range(dealt.data_degree)]
                for number in range(len(dealt))
            ],
            np.float64,
        )
        sums = loads.sum(0)
        beside = len(costs) // dealt.data_degree - 1
        least = max(sums.mean(), ascending[-1] + sum(ascending[:beside]))
        return cls(float(sums.max()), float(sums.mean()), float(least), float(loads.max(1).sum()))


def measure_packing(corpus: Path, seq_len: int, steps: int = 8) -> dict[str, Any]:
    """Measure padding in an epoch's rows, and the factor by which the busiest data rank delays the others.

    The factor is the busiest ranks' work over all steps divided by the mean rank's: for rows in order, and as assigned
    by the loader. In lockstep it uses the busiest ranks of all micro-batches.
    """
    shards = ShardSet.open(corpus / SHARDS)
    _, order = open_order(shards, seq_len)
    report = order.report(order.start(), documents=shards.num_documents)
    lengths = shards.lengths_of(np.arange(shards.num_documents))
    least = -(-shards.num_tokens // seq_len) * seq_len - shards.num_tokens
    dealt = MicroBatches.assign(DATA_RANKS * MICRO_BATCHES, most_rows=1, data_degree=DATA_RANKS)
    as_they_come, as_dealt, as_they_meet, at = [], [], [], order.start()
    for _ in range(steps):
        rows, at = order.rows(at, DATA_RANKS * MICRO_BATCHES)
        costs = [cost(*of) for of in lengths_of(rows, seq_len)]
        as_they_come.append(Work.of(costs, range(len(costs)), dealt))
        as_dealt.append(Work.of(costs, balanced(costs, dealt), dealt))
        as_they_meet.append(Work.of(costs, balanced(costs, dealt, sync_per_micro_batch=True), dealt))
    return {
        "seq_len": seq_len,
        "rows": report.rows,
        "padding_share": report.padding_share,
        "least_padding_share": least / (report.rows * seq_len),
        "documents_cut": report.documents_cut,
        "documents_longer": int((lengths > seq_len).sum()),
        "truncated_tokens": report.truncated_tokens,
        "straggler_as_they_come": _factor(as_they_come),
        "straggler": _factor(as_dealt),
        "straggler_least": sum(work.least for work in as_dealt) / sum(work.mean for work in as_dealt),
        "straggler_worst": max(work.most / work.mean for work in as_dealt),
        "lockstep_as_they_come": _waited(as_they_come),
        "lockstep": _waited(as_they_meet),
    }


def _factor(steps: Sequence[Work]) -> float:
    return sum(work.most for work in steps) / sum(work.mean for work in steps)


def _waited(steps: Sequence[Work]) -> float:
    return sum(work.lockstep for work in steps) / sum(work.mean for work in steps)
