"""Encodes source parts in several local processes; the first failure ends all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Pipe, wait

from data_pipeline.prepare.parts.build_engine import BuildContext, OnPart
from data_pipeline.prepare.parts.part_work import Advance, Advanced
from data_pipeline.prepare.parts.source_parts import SourcePart
from data_pipeline.prepare.parts.staging import KEPT, Staging
from data_pipeline.prepare.parts.worker import worker_command
from data_pipeline.prepare.parts.worker_messages import Failed, PartTask, Record, Setup, carry_out
from longctx.errors import ClusterError
from longctx.tokenizer.tokenizer_base import Tokenizer


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    # In a container or under a scheduler, fewer than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class LocalEngine:
    """Engine with local processes, one per worker while there are enough source parts; remaining workers become
    threads.
    """

    def carry_out(
        self, tasks: Sequence[PartTask], context: BuildContext, *, advance: Advance, finished: OnPart
    ) -> None:
        """Carry out all orders, in this process if there is only one core or one source part."""
        workers = context.workers or usable_cores()
        processes = min(workers, len(tasks))
        if not processes:
            return
        # If there are fewer source parts than cores, each worker uses several threads.
        threads = workers // processes
        if processes == 1:
            with _threads(context.tokenizer, threads):
                for order in tasks:
                    record = carry_out(order, job=context.job, tokenizer=lambda: context.tokenizer, advance=advance)
                    finished(order.part, record)
            return
        setup = Setup.of(context.job, context.tokenizer, threads)
        team: list[_Worker] = []
        try:
            for _ in range(processes):
                team.append(_Worker(context.staging))
            # Start all workers before any setup is sent: each receives its setup only after its imports, which run in
            # parallel.
            for worker in team:
                worker.send(setup)
            _assign_tasks(tasks, team, advance=advance, finished=finished)
        finally:
            # Kill all workers before waiting for the first. SIGKILL is safe: a source part without a record is
            # discarded.
            for worker in team:
                worker.kill()
            for worker in team:
                worker.wait()


def _assign_tasks(tasks: Sequence[PartTask], team: list[_Worker], *, advance: Advance, finished: OnPart) -> None:
    """Assign the next source part to every idle worker until all are done."""
    pending = iter(tasks)
    for worker in team:
        worker.begin(next(pending))
    busy = {worker.connection: worker for worker in team}
    while busy:
        for ready in wait(list(busy)):
            worker = busy[ready]  # type: ignore[index]
            part, record = worker.report()
            if record is not None:
                finished(part, record)
                next_task = next(pending, None)
                if next_task is None:
                    del busy[worker.connection]
                else:
                    worker.begin(next_task)
        # Workers count only their current source part; finished parts are no longer included.
        advance(sum((worker.progress for worker in busy.values()), Advanced()))


class _Worker:
    """A worker process as seen by its parent."""

    def __init__(self, staging: Staging) -> None:
        self.connection, worker_end = Pipe()
        with worker_end, _block_sigint():
            # The worker inherits the lock: until it has ended, no other build writes to the same folder.
            self._process = subprocess.Popen(
                worker_command(worker_end.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=(worker_end.fileno(), staging.lock),
            )
        self._task: PartTask | None = None
        self.progress = Advanced()
        """Progress reported for the current source part."""

    def begin(self, task: PartTask) -> None:
        """Send a source part to work on."""
        self._task, self.progress = task, Advanced()
        self.send(task)

    def send(self, message: Setup | PartTask) -> None:
        """Send the message that the worker waits for."""
        with self._convert_disconnect():
            self.connection.send(message)

    def report(self) -> tuple[SourcePart, Record | None]:
        """Return the worker's source part, with the record if it is done; raise the error that ended the worker."""
        assert self._task is not None
        with self._convert_disconnect():
            report = self.connection.recv()
        if isinstance(report, Failed):
            report.reraise(self._task.part)
        if isinstance(report, Advanced):
            self.progress = report
            return self._task.part, None
        self.progress = Advanced()
        return self._task.part, report

    def kill(self) -> None:
        """Kill the process immediately."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()
        self.connection.close()

    @contextlib.contextmanager
    def _convert_disconnect(self) -> Iterator[None]:
        """Convert a lost connection within the ``with`` block to a ClusterError that names the worker's source part."""
        try:
            yield
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            code = self._process.wait()
            how = f"ended with code {code}."
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}: the usual cause is full memory."
            subject = "a worker"
            if self._task is not None:
                subject = f"the worker that {self._task.done} {self._task.part}"
            raise ClusterError(f"{subject} {how}\n{KEPT} Try fewer --workers.") from error


@contextlib.contextmanager
def _threads(tokenizer: Tokenizer, threads: int) -> Iterator[None]:
    """Set the tokenizer's thread count within the ``with`` block."""
    before, tokenizer.threads = tokenizer.threads, threads
    try:
        yield
    finally:
        tokenizer.threads = before


@contextlib.contextmanager
def _block_sigint() -> Iterator[None]:
    """Block SIGINT for processes started within the ``with`` block: Ctrl-C reaches the full process group, and the
    parent ends its workers.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
