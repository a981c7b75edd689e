"""Encodes parts in several local processes; the first failure ends all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Pipe, wait

from data_pipeline.prepare.parts.deal import Part
from data_pipeline.prepare.parts.engine import Crew, OnPart
from data_pipeline.prepare.parts.order import Failed, Order, Record, Setup, carry_out
from data_pipeline.prepare.parts.staging import KEPT, Staging
from data_pipeline.prepare.parts.work import Advance, Advanced
from data_pipeline.prepare.parts.worker import command
from longctx.errors import ClusterError
from longctx.tokenizer.contract import Tokenizer


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    # In a container or under a scheduler, fewer than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class LocalEngine:
    """Engine with local processes, one per worker while there are enough parts; remaining workers become threads."""

    def carry_out(self, orders: Sequence[Order], crew: Crew, *, advance: Advance, finished: OnPart) -> None:
        """Carry out all orders, in this process if there is only one core or one part."""
        workers = crew.workers or usable_cores()
        processes = min(workers, len(orders))
        if not processes:
            return
        # If there are fewer parts than cores, each worker uses several threads.
        threads = workers // processes
        if processes == 1:
            with _threads(crew.tokenizer, threads):
                for order in orders:
                    record = carry_out(order, job=crew.job, tokenizer=lambda: crew.tokenizer, advance=advance)
                    finished(order.part, record)
            return
        setup = Setup.of(crew.job, crew.tokenizer, threads)
        team: list[_Worker] = []
        try:
            for _ in range(processes):
                team.append(_Worker(crew.staging))
            # Start all workers before any setup is sent: each receives its setup only after its imports, which run in
            # parallel.
            for worker in team:
                worker.send(setup)
            _hand_out(orders, team, advance=advance, finished=finished)
        finally:
            # Kill all workers before waiting for the first. SIGKILL is safe: a part without a record is discarded.
            for worker in team:
                worker.kill()
            for worker in team:
                worker.wait()


def _hand_out(orders: Sequence[Order], team: list[_Worker], *, advance: Advance, finished: OnPart) -> None:
    """Assign the next part to every idle worker until all are done."""
    pending = iter(orders)
    for worker in team:
        worker.begin(next(pending))
    busy = {worker.connection: worker for worker in team}
    while busy:
        for ready in wait(list(busy)):
            worker = busy[ready]  # type: ignore[index]
            part, record = worker.report()
            if record is not None:
                finished(part, record)
                following = next(pending, None)
                if following is None:
                    del busy[worker.connection]
                else:
                    worker.begin(following)
        # Workers count only their current part; finished parts are no longer included.
        advance(sum((worker.progress for worker in busy.values()), Advanced()))


class _Worker:
    """A worker process as seen by its parent."""

    def __init__(self, staging: Staging) -> None:
        self.connection, theirs = Pipe()
        with theirs, _interrupts_held():
            # The worker inherits the lock: until it has ended, no other build writes to the same folder.
            self._process = subprocess.Popen(
                command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), staging.lock),
            )
        self._order: Order | None = None
        self.progress = Advanced()
        """Progress reported for the current part."""

    def begin(self, order: Order) -> None:
        """Send a part to work on."""
        self._order, self.progress = order, Advanced()
        self.send(order)

    def send(self, message: Setup | Order) -> None:
        """Send the message that the worker waits for."""
        with self._explained():
            self.connection.send(message)

    def report(self) -> tuple[Part, Record | None]:
        """Return the worker's part, with the record if the part is done; raise the error that ended the worker."""
        assert self._order is not None
        with self._explained():
            report = self.connection.recv()
        if isinstance(report, Failed):
            report.raise_here(self._order.part)
        if isinstance(report, Advanced):
            self.progress = report
            return self._order.part, None
        self.progress = Advanced()
        return self._order.part, report

    def kill(self) -> None:
        """Kill the process immediately."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()
        self.connection.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert a lost connection within the block to a ClusterError that names the worker's part."""
        try:
            yield
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            code = self._process.wait()
            how = f"ended with code {code}."
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}: most often the machine's memory was full."
            what = "a worker"
            if self._order is not None:
                what = f"the worker that {self._order.done} {self._order.part}"
            raise ClusterError(f"{what} {how}\n{KEPT} Try fewer --workers.") from error


@contextlib.contextmanager
def _threads(tokenizer: Tokenizer, threads: int) -> Iterator[None]:
    """Set the tokenizer's thread count within the block."""
    before, tokenizer.threads = tokenizer.threads, threads
    try:
        yield
    finally:
        tokenizer.threads = before


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block SIGINT for processes started within the block: Ctrl-C reaches the full process group, and the parent ends
    its workers.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
