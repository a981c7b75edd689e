"""``StepPrefetcher``: rows for each step, prefetched by a thread while the previous step computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from typing import Any

import torch

from data_pipeline.loader import Loader, LocalMicroBatch
from data_pipeline.rows.row_batches import Place
from longctx.batch import PackedDocuments
from longctx.compact_batch import CompactBatch
from parallel.layout.sequence import SequenceLayout
from parallel.schedule.degrees import Degrees

_CLOSE_TIMEOUT_SECONDS = 5.0
"""Limit for the thread to end on close: a hanging disk must not keep a failing rank from reporting its error."""


@dataclass(frozen=True, kw_only=True)
class StepData:
    """A step's rows, ready for computation."""

    order: dict[str, Any]
    """Loader state before the step: the position of its rows in the data."""
    after: dict[str, Any]
    """Loader state after the step, as its checkpoint stores it."""
    tokens_consumed: int
    """Tokens in all steps up to this one, over all ranks, without padding."""
    lengths: list[tuple[int, ...]]
    """Document lengths in each full micro-batch."""
    source_lengths: list[tuple[int, ...]]
    """Source lengths that these documents read; empty without sources."""
    rows: list[tuple[int, ...]]
    """Row numbers within the step, by micro-batch."""
    shards: list[CompactBatch]
    """This rank's shard of each micro-batch, on the CPU."""
    degrees: list[Degrees]
    """Rank placement for each micro-batch; empty unless requested."""


class StepPrefetcher:
    """Iterator over a run's steps that prefetches the next ones in the background.

    ``state_dict`` and ``tokens_consumed`` describe the steps already returned, never those prefetched. The thread
    starts at the first ``next_step`` and ends with ``close``, or after ``num_steps``, beyond which it does not read.
    """

    def __init__(
        self,
        loader: Loader,
        place: Place,
        place_source: Place | None = None,
        *,
        num_steps: int,
        device: torch.device,
        prefetch_steps: int = 1,
        workers: int = 1,
        compute_degrees: Callable[[SequenceLayout, PackedDocuments], Degrees] | None = None,
    ) -> None:
        """Read the tokens that ``place`` assigns to this rank, and the source tokens that ``place_source`` assigns.

        For a GPU they are in pinned memory, so that the copy overlaps computation.

        ``prefetch_steps`` are read ahead; with 0 there is no thread, and each step waits for its own reading.
        ``workers`` threads read a step's micro-batches. The data are the same in any case.

        If ``compute_degrees`` is given, its results for a step's micro-batches are in ``StepData.degrees``.
        """
        self._compute_degrees = compute_degrees
        self._loader, self._device = loader, device
        self._assignments = (place,) if place_source is None else (place, place_source)
        self._num_steps, self._given = num_steps, 0
        self._ready: queue.SimpleQueue[StepData | BaseException] = queue.SimpleQueue()
        self._free_slots = threading.Semaphore(prefetch_steps)
        self._prefetches = prefetch_steps > 0
        self._num_workers = workers
        self._workers: ThreadPool | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._last: StepData | None = None

    @property
    def tokens_consumed(self) -> int:
        """Tokens in all steps returned so far, by earlier processes too, over all ranks, without padding."""
        if self._last is None:
            return self._loader.tokens_consumed
        return self._last.tokens_consumed

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last returned step, from which a run resumes."""
        if self._last is None:
            return self._loader.state_dict()
        return self._last.after

    def next_step(self) -> tuple[StepData, float]:
        """Return the next step's data and the seconds spent waiting for it; raise any error from its preparation."""
        started = time.perf_counter()
        # Without prefetching, and past the last step, read in the calling thread.
        if self._given >= self._num_steps or not self._prefetches:
            step: StepData | BaseException = self._prepare()
        else:
            self._start()
            step = self._ready.get()
            self._free_slots.release()
        if isinstance(step, BaseException):
            self.close()
            raise step
        self._given += 1
        self._last = step
        return step, time.perf_counter() - started

    def close(self) -> None:
        """End the thread, and discard the steps it has prefetched.

        If it is still reading after ``_CLOSE_TIMEOUT_SECONDS``, it is left to end with the process.
        """
        # The release wakes the thread if it waits for room.
        self._stop.set()
        self._free_slots.release()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_SECONDS)
        if self._workers is not None:
            self._workers.terminate()

    def _start(self) -> None:
        if self._thread is not None:
            return
        assert not self._stop.is_set(), "the prefetcher was closed"
        threads = torch.get_num_threads()
        # A daemon thread: a rank that ends with an error does not wait for data.
        self._thread = threading.Thread(target=self._run, args=(threads,), name="longctx-prefetch", daemon=True)
        self._thread.start()

    def _run(self, threads: int) -> None:
        """Prepare all steps, each as soon as the queue has room."""
        self._begin_thread(threads)
        try:
            for _ in range(self._num_steps):
                self._free_slots.acquire()
                if self._stop.is_set():
                    return
                self._ready.put(self._prepare())
        except BaseException as error:  # the main thread raises it, of any type
            self._ready.put(error)

    def _begin_thread(self, threads: int) -> None:
        # PyTorch would give a new thread all the machine's cores, which its ranks share.
        torch.set_num_threads(threads)
        # Its default GPU would be the first one, on which every rank's thread would create a context.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _prepare(self) -> StepData:
        loader = self._loader
        # The loader advances in order here; only reading is parallel, so workers cannot change the data.
        order = loader.state_dict()
        lengths, source_lengths, rows, shards, degrees = [], [], [], [], []
        for taken in self._read([loader.claim() for _ in range(loader.micro_batches_per_step)]):
            shard = taken.share
            lengths.append(taken.documents.lengths)
            source_lengths.append(taken.source_lengths)
            rows.append(taken.row_numbers)
            if self._compute_degrees is not None:
                degrees.append(self._compute_degrees(shard.placement, shard.documents))
            shards.append(shard)
        return StepData(
            order=order,
            after=loader.state_dict(),
            tokens_consumed=loader.tokens_consumed,
            lengths=lengths,
            source_lengths=source_lengths,
            rows=rows,
            shards=shards,
            degrees=degrees,
        )

    def _read(self, claims: Sequence[Callable[..., LocalMicroBatch]]) -> Iterator[LocalMicroBatch]:
        """Yield the claimed micro-batches in order, read by any worker."""
        if self._num_workers == 1:
            return map(self._read_one, claims)
        if self._workers is None:
            # Not an executor: the process would wait for its threads at exit, even if a disk hangs.
            self._workers = ThreadPool(self._num_workers, self._begin_thread, (torch.get_num_threads(),))
        return self._workers.imap(self._read_one, claims)

    def _read_one(self, claim: Callable[..., LocalMicroBatch]) -> LocalMicroBatch:
        taken = claim(*self._assignments)
        if self._device.type == "cuda":
            taken = replace(taken, share=taken.share.pinned())
        return taken
