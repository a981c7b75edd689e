"""Encodes source parts on a Ray cluster; the only module that uses Ray.

Ray moves tasks and records between our own processes as pickles; user data is never unpickled. Each attempt at a source
part writes its own folder, which this process renames to the part's name once the record has arrived. So a worker that
is presumed dead, or outlives the build that started it, cannot do damage.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import shutil
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_pipeline.prepare.parts.build_engine import BuildContext, OnPart
from data_pipeline.prepare.parts.node import SHARED, NodeCheck, NodeWorker, library_versions
from data_pipeline.prepare.parts.part_work import Advance, Advanced
from data_pipeline.prepare.parts.staging import KEPT
from data_pipeline.prepare.parts.worker_messages import Failed, PartTask, Report, Setup
from longctx.errors import ClusterError, ConfigError
from longctx.files import sync_path, write_synced

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Maximum attempts per source part before the build ends: the part itself may kill its workers."""
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_START = 120.0
_SECONDS_TO_END = 10.0
_SECONDS_BETWEEN_COMPLAINTS = 60.0
_REASON_CHARACTERS = 240


@contextlib.contextmanager
def open_cluster(address: str | None = None, *, say: Callable[[str], None] = logger.info) -> Iterator[RayEngine]:
    """Yield an engine for the cluster at ``address``, connected until the ``with`` block ends.

    Without an address Ray chooses: ``RAY_ADDRESS``, a cluster running on this machine, or a new local one that ends
    with the ``with`` block. An existing connection is used and kept. Raises ConfigError without Ray, and ClusterError
    if no cluster answers.
    """
    ray = _import_ray()
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address)
    try:
        nodes = _nodes(ray)
        cpus = sum(node["Resources"].get("CPU", 0) for node in nodes)
        where = ray.get_runtime_context().gcs_address
        say(f"Ray cluster at {where} (CPUs: {cpus:g}, nodes with CPUs: {len(nodes)})")
        yield RayEngine(ray)
    finally:
        if ours:
            ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found]  # in an extra
    except ImportError as error:
        raise ConfigError(
            "--engine ray needs Ray, which is not installed.\n"
            'Install it with `pip install "longctx-train[scale]"`, or use --engine local.'
        ) from error
    return ray


def _connect(ray: Any, address: str | None) -> None:
    """Connect this process to the cluster."""
    named = address or os.environ.get("RAY_ADDRESS")
    if named is not None and named.startswith("ray://"):
        raise ConfigError(
            f"--ray-address {named} is a Ray Client address, which builds do not support.\n"
            "Run the command on a cluster node with --ray-address auto."
        )
    _check_listens(named)
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        # The first of several paragraphs states the problem.
        raise ClusterError(_no_answer(named or "(none)", str(error).strip().splitlines()[0])) from error


def _check_listens(address: str | None) -> None:
    """Raise ClusterError if HOST:PORT refuses connections: Ray itself would retry for minutes and explain less."""
    host, colon, port = (address or "").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(_no_answer(f"{address}", str(error))) from error


def _no_answer(address: str, reason: str) -> str:
    return (
        f"--ray-address {address}: no Ray cluster responds ({reason}).\n"
        "Start one with `ray start --head`, or unset --ray-address and RAY_ADDRESS to use only this machine."
    )


def _nodes(ray: Any) -> list[dict[str, Any]]:
    """Return the nodes that can work: those to which a source part may be assigned."""
    # A head node is often configured without a CPU and may not see the files.
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]


def _name(node: dict[str, Any]) -> str:
    return f"node {node['NodeManagerHostname']} ({node['NodeName']})"


class RayEngine:
    """Engine with one worker per CPU in a Ray cluster; see ``open_cluster``."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def carry_out(
        self, tasks: Sequence[PartTask], context: BuildContext, *, advance: Advance, finished: OnPart
    ) -> None:
        """Carry out all orders; try a source part up to ``ATTEMPTS`` times if its worker or node is lost."""
        if not tasks:
            return
        nodes = _nodes(self._ray)
        workers = context.workers or int(sum(node["Resources"]["CPU"] for node in nodes))
        if not workers:
            raise ClusterError("the Ray cluster has no CPU. Add a node with `ray start`, or set --workers.")
        _sweep(tasks)
        with _shown(context.staging.folder) as node_check:
            self._check_nodes(nodes, node_check)
            # Put the setup into Ray's object store: one copy per node, for any number of workers.
            setup = self._ray.put(Setup.of(context.job, context.tokenizer, threads=1))
            shift = _Shift(self._ray, tasks, workers=workers, node_check=node_check, setup=setup)
            try:
                shift.work(advance=advance, finished=finished)
            finally:
                shift.end()

    def _check_nodes(self, nodes: list[dict[str, Any]], node_check: NodeCheck) -> None:
        """Raise ClusterError unless every node sees the staging folder and its writes are visible to this process."""
        ray = self._ray
        task = ray.remote(NodeCheck.problem)
        checks: dict[Any, dict[str, Any]] = {}
        for node in nodes:
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            # Zero CPUs: a node that is busy with other work can still be checked.
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": affinity}
            checks[task.options(**options).remote(node_check, node["NodeID"])] = node
        _, missing_ranks = ray.wait(list(checks), num_returns=len(checks), timeout=_SECONDS_TO_START)
        if missing_ranks:
            raise ClusterError(
                f"{_name(checks[missing_ranks[0]])} does not respond. Restart it, or remove it from the cluster."
            )
        for ref, node in checks.items():
            try:
                problem = ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                reason = _reason(error.cause)
                raise ClusterError(
                    f"{_name(node)} cannot run longctx ({reason}).\nInstall this machine's longctx release there."
                ) from error
            except ray.exceptions.RayError as error:
                # It gets no source part now: its worker, if it ever starts one, is checked in the same way.
                logger.warning("%s was lost before its check (%s)", _name(node), _reason(error))
                continue
            if problem is None and not node_check.has_answer(node["NodeID"]):
                problem = f"mounts a different {node_check.folder} than this machine.\n{SHARED}"
            if problem is not None:
                raise ClusterError(f"{_name(node)} {problem}")


@contextlib.contextmanager
def _shown(folder: Path) -> Iterator[NodeCheck]:
    """Keep a file in ``folder`` within the ``with`` block, by which other machines recognize the folder."""
    node_check = NodeCheck(folder=folder, token=f"seen-{secrets.token_hex(8)}", versions=library_versions())
    write_synced(folder / node_check.token, node_check.token.encode())
    try:
        yield node_check
    finally:
        for path in folder.glob(f"{node_check.token}*"):
            path.unlink(missing_ok=True)


def _sweep(tasks: Sequence[PartTask]) -> None:
    """Remove attempts left by a killed build."""
    for parent in {order.folder.parent for order in tasks}:
        for path in parent.glob("[0-9]*.*"):
            # The attempt's worker may still be running and writing.
            shutil.rmtree(path, ignore_errors=True)


class _Shift:
    """One pass over all orders, with the workers that carry them out."""

    def __init__(self, ray: Any, tasks: Sequence[PartTask], *, workers: int, node_check: NodeCheck, setup: Any) -> None:
        self._ray, self._workers, self._node_check, self._setup = ray, workers, node_check, setup
        self._pending = deque(tasks)
        self._losses: Counter[int] = Counter()
        """Lost workers per source part."""
        self._failed_starts = 0
        self._team: list[_Worker] = []
        self._numbers = itertools.count()
        # A worker uses one CPU; Ray chooses its node, spread over the cluster.
        self._kind = ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(NodeWorker)
        self._last_report_time = time.monotonic()

    def work(self, *, advance: Advance, finished: OnPart) -> None:
        """Assign orders until all are done."""
        while self._recruit():
            for worker in self._ready():
                try:
                    report = worker.report()
                except self._ray.exceptions.RayError as error:
                    self._drop_worker(worker, error)
                    continue
                self._take(worker, report, finished)
            advance(sum((worker.progress for worker in self._team), Advanced()))

    def end(self) -> None:
        """End all workers and wait until they have stopped writing."""
        pending = [worker.pending for worker in self._team]
        for worker in self._team:
            worker.dismiss()
        if pending:
            # Their pending results are now errors.
            self._ray.wait(pending, num_returns=len(pending), timeout=_SECONDS_TO_END, fetch_local=False)
        for worker in self._team:
            worker.remove_attempt()
        self._team.clear()

    def _recruit(self) -> bool:
        """Start or dismiss workers to match the remaining work; return whether work remains."""
        busy = [worker for worker in self._team if worker.task is not None]
        wanted = min(self._workers, len(self._pending) + len(busy))
        while len(self._team) < wanted:
            # Workers without a CPU wait for one: a cluster may grow.
            handle = self._kind.remote(self._setup)
            self._team.append(_Worker(self._ray, handle, self._node_check, f"worker-{next(self._numbers)}"))
        if len(self._team) > wanted:
            # Dismiss workers that still wait for a CPU, perhaps forever: no work remains for them.
            for worker in self._team:
                if worker.task is None:
                    worker.dismiss()
            self._team = busy
        return wanted > 0

    def _ready(self) -> list[_Worker]:
        """Return the workers with a report; empty if no report arrives within a second."""
        worker_of_ref = {worker.pending: worker for worker in self._team}
        ready, rest = self._ray.wait(list(worker_of_ref), timeout=_SECONDS_BETWEEN_LOOKS, fetch_local=False)
        if rest:
            # Take all that are ready: with a thousand workers, one at a time would be slow.
            ready += self._ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=False)[0]
        now = time.monotonic()
        if ready or any(worker.task is not None for worker in self._team):
            self._last_report_time = now
        elif now > self._last_report_time + _SECONDS_BETWEEN_COMPLAINTS:
            self._last_report_time = now
            logger.warning("no CPU in the Ray cluster is free: waiting for one (`ray status` shows their usage)")
        return [worker_of_ref[ref] for ref in ready]

    def _take(self, worker: _Worker, report: Report | str | None, finished: OnPart) -> None:
        """Handle one report."""
        if isinstance(report, Advanced):
            worker.progress = report
            return
        task = worker.task
        if task is None:
            # The worker has checked its node.
            if isinstance(report, str):
                raise ClusterError(f"a node ({worker.name}) {report}")
            self._failed_starts = 0
        else:
            if isinstance(report, Failed):
                report.at(worker.name).reraise(task.part)
            worker.deliver()
            finished(task.part, report)
        if self._pending:
            worker.begin(self._pending.popleft())
        else:
            # Release its CPU for other jobs.
            self._team.remove(worker)
            worker.dismiss()

    def _drop_worker(self, worker: _Worker, error: Exception) -> None:
        """Continue without a lost worker and queue its source part again; raise ClusterError after too many losses."""
        self._team.remove(worker)
        worker.dismiss()
        worker.remove_attempt()
        reason = _reason(error)
        if worker.task is None:
            self._failed_starts += 1
            if self._failed_starts >= ATTEMPTS:
                raise ClusterError(f"{ATTEMPTS} workers exited during startup ({reason}).\n{KEPT}") from error
            return
        task = worker.task
        self._losses[task.part.number] += 1
        num_losses = self._losses[task.part.number]
        if num_losses >= ATTEMPTS:
            raise ClusterError(
                f"{num_losses} workers were lost while they {task.done} {task.part}, most recently {worker.name} "
                f"({reason}).\n{KEPT} Try fewer --workers: the usual cause is full memory."
            ) from error
        logger.warning(
            "%s was lost while it %s %s (%s): retrying the part, attempt %d of %d",
            *(worker.name, task.done, task.part, reason, num_losses + 1, ATTEMPTS),
        )
        # Queue it first, so that the others need not wait for it at the end.
        self._pending.appendleft(task)


def _reason(error: BaseException) -> str:
    """Condense Ray's message about a lost worker or node to one line."""
    # Skip indented lines, which identify the actor by its numbers.
    lines = [line for line in str(error).splitlines() if not line.startswith("\t")]
    words = " ".join(f"{type(error).__name__}: {' '.join(lines)}".split())
    if len(words) > _REASON_CHARACTERS:
        return f"{words[:_REASON_CHARACTERS]} …"
    return words


class _Worker:
    """A cluster worker as seen by this process."""

    def __init__(self, ray: Any, handle: Any, node_check: NodeCheck, name: str) -> None:
        self._ray, self._handle = ray, handle
        self.name = name
        """Process and host, once the worker has started."""
        self.pending = handle.check_node.remote(node_check, name)
        """Pending result: first the worker's check, then its source part's reports."""
        self.task: PartTask | None = None
        self.progress = Advanced()
        """Progress reported for the current source part."""
        self._attempt: Path | None = None

    def begin(self, task: PartTask) -> None:
        """Start the worker on a source part."""
        self.task, self.progress = task, Advanced()
        self._attempt = task.folder.with_name(f"{task.folder.name}.{secrets.token_hex(4)}")
        carry_out = self._handle.carry_out.options(num_returns="streaming")
        self.pending = carry_out.remote(replace(task, folder=self._attempt))

    def report(self) -> Report | str | None:
        """Return the next report; before the first source part the reason the worker cannot work, if any.

        Raises RayError if the worker is lost.
        """
        if self.task is None:
            self.name, problem = self._ray.get(self.pending)
            return problem
        return self._ray.get(next(self.pending))

    def deliver(self) -> None:
        """Rename the worker's finished folder to the source part's name."""
        assert self.task is not None
        assert self._attempt is not None
        # A folder that already exists is damaged, or the source part would not have been assigned.
        shutil.rmtree(self.task.folder, ignore_errors=True)
        self._attempt.rename(self.task.folder)
        sync_path(self.task.folder.parent)
        self.task, self.progress, self._attempt = None, Advanced(), None

    def dismiss(self) -> None:
        """Kill the worker's process immediately, on any node."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._handle)

    def remove_attempt(self) -> None:
        """Remove an unfinished source part's files."""
        if self._attempt is not None:
            shutil.rmtree(self._attempt, ignore_errors=True)
