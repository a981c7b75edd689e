"""What a rate does not show: one rank's slice of a row, waits beside a computing thread, single documents, packing."""

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
"""Context ranks, and the row that they share."""
ROUNDS = 5
RANDOM_DOCUMENTS = 20_000
WAITED_TOKENS, WAITED_STEPS, COMPUTED_SECONDS = 1 << 18, 300, 0.02
"""Rows that are waited for, how many of them, and how long the main thread computes between two of them."""
DATA_RANKS, MICRO_BATCHES = 8, 8
LINEAR_TOKENS = 61_000
"""Length at which attention costs as much as everything else: of a model of 8 billion parameters in Llama's shape."""


# --- a slice of a row -----------------------------------------------------------------------------------------


class CountingShards(ShardSet):
    """A shard folder that knows which pages of its files hold the tokens that were asked for."""

    def count_pages(self) -> set[int]:
        """Begin to count: the set that the numbers of pages will be in."""
        self._pages: set[int] = set()
        return self._pages

    def slices(self, pieces: Iterable[tuple[int, int, int]], side: Side = "target") -> list[np.ndarray]:
        """Tokens of documents, as ever."""
        found = super().slices(pieces, side)
        for tokens in found:
            if tokens.nbytes:
                first = tokens.__array_interface__["data"][0]
                self._pages.update(range(first // PAGE_BYTES, (first + tokens.nbytes - 1) // PAGE_BYTES + 1))
        return found


def zigzag(rank: int, documents: PackedDocuments) -> Share:
    """The tokens of one of ``DEGREE`` context ranks: two chunks, one from each half of the row."""
    layout = SequenceLayout.build("zigzag", documents.num_tokens, DEGREE, documents)
    return Share(documents, layout.rank_runs(rank), layout)


def measure_slices(
    corpus: Path, seq_len: int = SLICED_TOKENS, num_rows: int = 8, rounds: int = ROUNDS
) -> dict[str, Any]:
    """A rank's slice beside the whole row: seconds, pages of tokens, bytes whose checksums are compared.

    Seconds are those of ``Loader.take`` where the row is planned and all is checked, the mean over ranks and rows.
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
    """CPU seconds of a take, the mean of these places and so many rows."""
    spent = 0.0
    for place in places:
        loader = build_loader(shards, seq_len=seq_len, rows_per_step=1)
        # The block is planned with the first row.
        loader.take(place)
        began = time.process_time()
        for _ in range(num_rows):
            loader.take(place)
        spent += time.process_time() - began
    return spent / (len(places) * num_rows)


def _touched(corpus: Path, seq_len: int, number: int, place: Place) -> tuple[int, int]:
    """Pages that hold the tokens of a part of one row, and bytes of blocks that reading it compares."""
    shards = CountingShards.open(corpus / SHARDS)
    assert isinstance(shards, CountingShards)
    loader = build_loader(shards, seq_len=seq_len, rows_per_step=1)
    # Lengths of all documents are read with the plan: what their blocks take is not a row's.
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
    """Go on behind so many rows, of which nothing is read."""
    state = loader.state_dict()
    loader.load_state_dict(state | {"rows_consumed": rows, "epoch_row": rows, "block_row": rows})


# --- waits ----------------------------------------------------------------------------------------------------


def measure_waits(corpus: Path, seq_len: int = WAITED_TOKENS, steps: int = WAITED_STEPS) -> dict[str, Any]:
    """How long ``next_step`` is waited for while the main thread computes between two steps: median, p99, worst.

    ``own`` leaves out how long the loader had no core, and the main thread none while it waited: other programs' time.
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
            # The main thread is waited with, not for: only what it lost while it waited counts.
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
    """How long each thread of Python's was ready to run and had no core so far, by its number."""
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
    """CPU microseconds to a view of a document's tokens, documents in random order; and to a view of an array alone."""
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
    """The work of a row: attention and everything else, in a unit of its own."""
    return sum(length * (LINEAR_TOKENS + length) for length in lengths)


@dataclass(frozen=True)
class Work:
    """The work of a step's ranks."""

    most: float
    mean: float
    least: float
    """What the busiest rank has at least: ranks have equally many rows, and one of them has the costliest."""
    lockstep: float
    """What the busiest rank of each micro-batch has, all micro-batches together."""

    @classmethod
    def of(cls, costs: Sequence[int], places: Iterable[int], dealt: MicroBatches) -> Work:
        """That of rows which lie at these places."""
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
    """What an epoch's rows waste, and by what factor the busiest data rank holds up the others.

    The factor is the work of the busiest ranks of all steps over the mean rank's: with rows as they come, and as
    the loader deals them out. In lockstep it is that of the busiest ranks of all micro-batches.
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
