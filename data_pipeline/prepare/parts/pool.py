"""Parts encoded by several processes; the first failure of any of them ends all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Pipe, wait
from typing import Any

from data_pipeline.prepare.duplicates.outcome import PartDecision
from data_pipeline.prepare.duplicates.signed import SignedRecord
from data_pipeline.prepare.parts.deal import Part
from data_pipeline.prepare.parts.record import PartRecord
from data_pipeline.prepare.parts.sign import sign_part
from data_pipeline.prepare.parts.staging import KEPT, Staging
from data_pipeline.prepare.parts.work import Advance, Job, encode_part
from data_pipeline.prepare.parts.worker import Advanced, Failed, Order, Report, Setup, command
from longctx.errors import ClusterError
from longctx.tokenizer.contract import Tokenizer

OnPart = Callable[[Part, Any], None]
"""A function that takes a part that is done and its record."""


def usable_cores() -> int:
    """Cores that this process may use."""
    # Fewer than the machine has, in a container or under a scheduler.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def encode_parts(
    parts: Sequence[Part],
    staging: Staging,
    *,
    job: Job,
    tokenizer: Tokenizer,
    workers: int,
    advance: Advance,
    finished: OnPart,
    decisions: Mapping[int, PartDecision] | None = None,
) -> None:
    """Encode ``parts`` with ``workers`` cores: a process for each as long as there are parts, else threads.

    ``advance`` is told the sums over all parts in work; ``finished`` each part that is done and its ``PartRecord``.
    ``decisions`` say for each part which documents stay. DataError as the part's own; ClusterError where the system has
    killed a worker.
    """
    decisions = decisions or {}
    orders = [
        Order(part=part, folder=staging.part_folder(part.number), decision=decisions.get(part.number)) for part in parts
    ]

    def encode(order: Order) -> PartRecord:
        return encode_part(
            order.part, order.folder, job=job, tokenizer=tokenizer, advance=advance, decision=order.decision
        )

    _work(orders, encode, staging, job=job, tokenizer=tokenizer, workers=workers, advance=advance, finished=finished)


def sign_parts(
    parts: Sequence[Part],
    staging: Staging,
    *,
    job: Job,
    tokenizer: Tokenizer,
    workers: int,
    advance: Advance,
    finished: OnPart,
) -> None:
    """Sign ``parts`` as ``encode_parts`` encodes them; ``finished`` gets their ``SignedRecord``."""
    orders = [Order(part=part, folder=staging.signatures_folder(part.number), signs=True) for part in parts]

    def sign(order: Order) -> SignedRecord:
        return sign_part(order.part, order.folder, read_as=job.read_as, rule=job.duplicates, advance=advance)

    _work(orders, sign, staging, job=job, tokenizer=tokenizer, workers=workers, advance=advance, finished=finished)


def _work(
    orders: Sequence[Order],
    here: Callable[[Order], PartRecord | SignedRecord],
    staging: Staging,
    *,
    job: Job,
    tokenizer: Tokenizer,
    workers: int,
    advance: Advance,
    finished: OnPart,
) -> None:
    """Carry out all orders: ``here``, in this process, where one core or one part is all there is."""
    processes = min(workers, len(orders))
    if not processes:
        return
    # Where there are fewer parts than cores, each worker takes several.
    threads = workers // processes
    if processes == 1:
        with _threads(tokenizer, threads):
            for order in orders:
                finished(order.part, here(order))
        return
    setup = Setup(
        job=job, threads=threads, files=tokenizer.files, path=tokenizer.path, fingerprint=tokenizer.fingerprint
    )
    crew: list[_Worker] = []
    try:
        for _ in range(processes):
            crew.append(_Worker(setup.threads, staging))
        # They start side by side: a setup is taken only once its worker has imported what it needs.
        for worker in crew:
            worker.send(setup)
        _hand_out(orders, crew, advance=advance, finished=finished)
    finally:
        # All are told before the first is waited for.
        # SIGKILL: a worker leaves nothing behind that its part's missing record does not disown.
        for worker in crew:
            worker.kill()
        for worker in crew:
            worker.wait()


def _hand_out(orders: Sequence[Order], crew: list[_Worker], *, advance: Advance, finished: OnPart) -> None:
    """Give every idle worker the next part until all are done."""
    pending = iter(orders)
    for worker in crew:
        worker.begin(next(pending))
    busy = {worker.connection: worker for worker in crew}
    while busy:
        for ready in wait(list(busy)):
            worker = busy[ready]  # type: ignore[index]
            part, report = worker.report()
            if isinstance(report, PartRecord | SignedRecord):
                finished(part, report)
                following = next(pending, None)
                if following is None:
                    del busy[worker.connection]
                else:
                    worker.begin(following)
        # What each tells of its own part: a finished one takes its counts along.
        in_work = [worker.progress for worker in busy.values()]
        advance(
            sum(at.documents for at in in_work),
            sum(at.text_bytes for at in in_work),
            sum(at.bytes_read for at in in_work),
        )


class _Worker:
    """A worker process as its parent sees it."""

    def __init__(self, threads: int, staging: Staging) -> None:
        self.connection, theirs = Pipe()
        # Hugging Face's tokenizers read it once, at their first text.
        environment = os.environ | {"RAYON_NUM_THREADS": str(threads)}
        with theirs, _interrupts_held():
            # It inherits the lock: until it has ended, no other build writes where it writes.
            self._process = subprocess.Popen(
                command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), staging.lock),
                env=environment,
            )
        self._order: Order | None = None
        self.progress = _NOTHING
        """What it has told of its part so far."""

    def begin(self, order: Order) -> None:
        """Send a part to work on."""
        self._order, self.progress = order, _NOTHING
        self.send(order)

    def send(self, message: Setup | Order) -> None:
        """Send what the worker waits for."""
        with self._explained():
            self.connection.send(message)

    def report(self) -> tuple[Part, Report]:
        """What the worker says next, and of which part; raises what made it end."""
        assert self._order is not None
        with self._explained():
            report: Report = self.connection.recv()
        if isinstance(report, Failed):
            if report.error is not None:
                raise report.error
            raise RuntimeError(f"{self._order.part} failed in its worker:\n{report.traceback}")
        if isinstance(report, Advanced):
            self.progress = report
        else:
            self.progress = _NOTHING
        return self._order.part, report

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()
        self.connection.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say which part a worker had that is no more."""
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


_NOTHING = Advanced(documents=0, text_bytes=0, bytes_read=0)


@contextlib.contextmanager
def _threads(tokenizer: Tokenizer, threads: int) -> Iterator[None]:
    """Within the block, ``tokenizer`` uses so many threads."""
    before, tokenizer.threads = tokenizer.threads, threads
    try:
        yield
    finally:
        tokenizer.threads = before


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Within the block, a process that starts is deaf to Ctrl-C, which goes to all: its parent ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
