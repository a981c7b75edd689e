"""``Saver`` writes a run's checkpoints in a thread while training continues.

Training waits only while each rank copies the state it owns. A thread on each rank writes the copy and reads it back.
At the end of a later step, once all ranks have written, rank 0's thread writes the manifest and renames the folder. All
collectives are called by the main thread, between two steps.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from launcher.checkpoint.checkpoint_files import (
    Contents,
    StaticFiles,
    WrittenFile,
    as_checkpoint_error,
    commit,
    write_rank_file,
)
from launcher.checkpoint.checkpoint_store import store_at
from launcher.checkpoint.host_copy import HostCopy, HostCopyAllocator
from launcher.checkpoint.mirror import Mirror
from launcher.checkpoint.names import folder_of, hidden_folder, make_empty
from launcher.checkpoint.retention import VALIDATION_LOSS, Proof, Retention, is_in_range, prune_checkpoints, write_proof
from launcher.config.resolved import ResolvedConfig
from launcher.metrics.goodput.timeline import TIMELINE_FILE
from launcher.metrics.record import METRICS_FILE
from launcher.plan.memory_estimate import copies_checkpoints
from longctx.config import ModelConfig
from longctx.errors import CheckpointError
from longctx.kernels.memory import trim_heap
from parallel.comm.messages.message_checksum import Sum
from parallel.comm.world import gather_objects, gather_on_rank_0, least_of_ranks, own_rank, raise_on_all_ranks

if TYPE_CHECKING:  # importing DeepSpeed takes seconds, and decides on a device
    from parallel.zero.zero_engine import ZeroEngine
    from parallel.zero.zero_state import StatePiece

log = logging.getLogger(__name__)

KEEP_ALL = Retention(last=0)
_NICENESS = 10
"""Niceness of writer threads: training comes first if cores are scarce."""


@dataclass
class _Save:
    """Save in progress."""

    target: Path
    contents: Contents
    loss: float | None
    """The saved step's loss, compared with later ones."""
    copy_seconds: float | None
    """Time that training waited for the copy; None if it waits for the full save."""
    work: Future[Any] | None
    """Task in this rank's thread: first writing its file, then, on rank 0, the commit. None on other ranks meanwhile.
    """
    is_committing: bool = False
    proof: Proof | None = None
    start_time: float = field(default_factory=time.perf_counter)

    def see(self, proof: Proof) -> None:
        """Take a loss as the proof if it is the first one in range."""
        if self.proof is None and self.loss is not None and is_in_range(proof.loss, self.loss):
            self.proof = proof

    def summary(self) -> str:
        """Return the log message for the committed save."""
        line = f"Saved {self.target} in {time.perf_counter() - self.start_time:.1f} s"
        if self.copy_seconds is not None:
            line += f", with training blocked for {self.copy_seconds:.2f} s"
        return f"{line}."


# A save has three stages: copy the state to host memory (training waits), write and read back each rank's file (in a
# thread), commit (in rank 0's thread). Splitting snapshot and persist follows CheckFreq (Mohan et al., FAST 2021).
#
# Invariants: the commit starts only after all ranks have written, so the manifest lists complete files alone; stages
# change only in collectives between steps, so every rank sees the same stage, and an error on one rank is raised on
# all.
class Saver:
    """Checkpoint writer for a run, one save at a time. All ranks must call the same methods in the same order."""

    def __init__(
        self,
        run_folder: Path,
        engine: ZeroEngine,
        *,
        model: ModelConfig,
        tokenizer_files: Mapping[str, bytes],
        static_files: StaticFiles | None = None,
        retention: Retention = KEEP_ALL,
        copies: bool = False,
        local_ranks: int = 1,
        mirror: Mirror | None = None,
        records: Sequence[Path] = (),
        base: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare to save. With ``copies``, training continues during a save if this machine, with ``local_ranks``
        ranks, has enough memory. Rank 0's ``mirror`` sends checkpoints to a store. ``records`` are synced before each
        commit. ``base`` is the manifest entry for the checkpoint with the frozen weights, if there are any.
        """
        self._folder, self._engine, self._records = run_folder, engine, records
        same = {"model": model, "shapes": engine.shapes, "roles": engine.roles, "dtype": engine.dtype, "base": base}
        self._contents = partial(Contents, **same, tokenizer_files=tokenizer_files, static_files=static_files)
        # A single thread: the write of a copy, the commit and removals run in order and never overlap.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver", initializer=_let_training_go_first)
        self._copies = HostCopyAllocator(engine, self._thread, wanted=copies, local_ranks=local_ranks)
        self.kept = CommittedCheckpoints(run_folder, retention, self._thread, mirror)
        self._save: _Save | None = None
        self.seconds = 0.0
        """Time from the last save's start to its commit; 0 before the first save."""

    def save(
        self,
        *,
        step: int,
        training: Mapping[str, Any],
        loss: float | None = None,
        wait: bool = False,
        sums: Sequence[Sum] = (),
    ) -> None:
        """Start saving the state after ``step`` optimizer steps; ``loss`` is that step's loss. Collective.

        ``sums``, if given, are checksums over this rank's values, and only matching values are committed. An earlier
        save is finished first. With ``wait``, or without memory for a copy, this one is finished too. Raise
        CheckpointError on every rank if any of them cannot write, now or in a later call; older checkpoints stay.
        """
        self._wait_for_commit()
        start_time, target, pieces = time.perf_counter(), folder_of(self._folder, step), self._engine.owned_pieces()
        copy = self._begin(target, wait)
        with closing(self._engine.owned_ranges()) as ranges:
            work = _write(hidden_folder(target), pieces, (one.values for one in ranges), sums, copy, self._thread)
        # Only the copy's time: training does not wait for the rest.
        copy_seconds = None if copy is None else time.perf_counter() - start_time
        self._save = _Save(
            target, self._contents(step=step, training=training), loss, copy_seconds, work, start_time=start_time
        )
        # The validation ran on exactly the saved weights, so its loss proves them at once.
        if training.get(VALIDATION_LOSS) is not None:
            self._save.see(Proof("validation", step, training[VALIDATION_LOSS]))
        if copy is None:
            self._wait_for_commit()

    def after_step(self, step: int, loss: float) -> None:
        """Advance the save in progress as far as all ranks have come, after a step with this loss. Collective.

        Raise CheckpointError on every rank if any of them could not write.
        """
        # Not before the first step, which must allocate its own memory first.
        self._copies.reserve()
        proof = Proof("step", step, loss)
        self.kept.see(proof)
        if self._save is not None:
            self._save.see(proof)
        self._poll()

    def finish(self) -> None:
        """Finish the save in progress and the removal of old ones. Collective; raises like ``after_step``."""
        self._wait_for_commit()
        self.kept.wait()

    def _wait_for_commit(self) -> None:
        """Wait until the save in progress is committed. Collective."""
        while self._save is not None:
            work = self._save.work
            if work is not None and not work.done():
                # Logged once, and not for a commit, which takes no noticeable time.
                if not self._save.is_committing:
                    log.info("Waiting for checkpoint %s to be written.", self._save.target.name)
                wait([work])
            self._poll()

    def _begin(self, target: Path, waits: bool) -> HostCopy | None:
        """Create the hidden folder and agree on copying; None means that the ranks write without a copy. Collective."""
        problem = None
        copy = None if waits else self._copies.get()
        if own_rank() == 0:
            try:
                make_empty(hidden_folder(target))
            except OSError as error:
                problem = str(as_checkpoint_error(error, target))
        # One exchange for both: rank 0's problem with the folder, and whether every rank has a copy.
        answers = gather_objects((problem, copy is not None))
        if answers[0][0] is not None:
            raise CheckpointError(answers[0][0])
        if all(has_copy for _, has_copy in answers):
            return copy
        if self._copies.wanted and not waits:
            self._copies.disable()
            if own_rank() == 0:
                log.warning("Too little free memory for checkpoint copies: training waits during each save.")
        return None

    def _poll(self) -> None:
        """Advance the save if all ranks have finished their stage, or if one has failed. Collective."""
        if (save := self._save) is None:
            return
        is_done = save.work is None or save.work.done()
        is_well = save.work is None or not is_done or save.work.exception() is None
        all_done, all_well = least_of_ranks([int(is_done), int(is_well)])
        if all_done or not all_well:
            self._advance(save)

    def _advance(self, save: _Save) -> None:
        """Start the commit on rank 0 once all ranks have written, or complete the save after the commit. Collective."""
        result, problem = None, None
        try:
            if save.work is not None:
                result = save.work.result()
        except (OSError, CheckpointError) as error:
            problem = as_checkpoint_error(error, save.target)
        try:
            raise_on_all_ranks(problem)
        except CheckpointError:
            self._save = None
            # Each rank has waited for its own write above, so the folder is no longer in use.
            if own_rank() == 0:
                shutil.rmtree(hidden_folder(save.target), ignore_errors=True)
            raise
        if save.is_committing:
            self._save = None
            self._report_commit(save, result)
            return
        files = gather_on_rank_0(result)
        save.is_committing, save.work = True, None
        if own_rank() == 0:
            save.work = self._thread.submit(commit, save.target, files, save.contents, self._records)

    def _report_commit(self, save: _Save, manifest_hash: str | None) -> None:
        """Log a committed checkpoint. On rank 0, prove it if possible and prune older ones."""
        self.seconds = time.perf_counter() - save.start_time
        log.info("%s", save.summary())
        # Rank 0 only: other ranks take no part in a commit.
        if manifest_hash is not None:
            self.kept.add(save.target, manifest_hash, save.loss, save.proof)


class CommittedCheckpoints:
    """A run's committed checkpoints. Proves the newest one and prunes older ones in rank 0's thread."""

    def __init__(
        self, run_folder: Path, retention: Retention, thread: ThreadPoolExecutor, mirror: Mirror | None
    ) -> None:
        self._folder, self._retention, self._thread, self._mirror = run_folder, retention, thread, mirror
        self._unproved: tuple[Path, str, float | None] | None = None
        """The newest checkpoint until it is proved, with its manifest's hash and its step's loss."""
        self._chores: list[Future[None]] = []

    def add(self, target: Path, manifest_hash: str, loss: float | None, proof: Proof | None) -> None:
        """Register a committed checkpoint."""
        self._unproved = target, manifest_hash, loss
        if self._mirror is not None:
            self._mirror.add(target)
        self._chores = [one for one in self._chores if not one.done()]
        # A step or a validation finished before the commit was known.
        if proof is not None:
            self._write_proof(target, manifest_hash, proof)
        else:
            self._chores.append(self._thread.submit(self._prune))

    def see(self, proof: Proof) -> None:
        """Prove the newest checkpoint if the loss of a later step is in range."""
        if self._unproved is None:
            return
        target, manifest_hash, loss = self._unproved
        if loss is not None and is_in_range(proof.loss, loss):
            self._write_proof(target, manifest_hash, proof)

    def begin(self) -> None:
        """Start sending checkpoints to the run's store, if any. Call this after newer checkpoints were set aside."""
        if self._mirror is not None:
            self._mirror.start()

    def leave(self, seconds: float = threading.TIMEOUT_MAX) -> bool:
        """Wait up to ``seconds`` until all is sent. Call this after the last commit.

        Return True if the newest checkpoint is in the run's store, or if the run has no store.
        """
        if self._mirror is None:
            return True
        is_sent = self._mirror.finish(seconds)
        # Some checkpoints were held only for sending.
        self._prune()
        return is_sent

    def wait(self) -> None:
        """Wait until all pending work is done."""
        wait(self._chores)
        self._chores.clear()

    def _write_proof(self, target: Path, manifest_hash: str, proof: Proof) -> None:
        """Write a checkpoint's proof, then prune older ones that were kept until now."""
        self._unproved = None

        def write() -> None:
            try:
                write_proof(target, manifest_hash, proof)
            except CheckpointError as error:
                # The checkpoint itself is intact.
                log.warning("%s could not be marked as proved: %s", target, error)
            else:
                if self._mirror is not None:
                    self._mirror.add_proof(target)
            self._prune()

        self._chores.append(self._thread.submit(write))

    def _prune(self) -> None:
        """Remove older checkpoints, except those being sent to the store."""
        held: set[int] = set()
        if self._mirror is not None:
            held = self._mirror.held()
        prune_checkpoints(self._folder, self._retention, held)


def run_saver(
    config: ResolvedConfig,
    engine: ZeroEngine,
    model: ModelConfig,
    tokenizer_files: Mapping[str, bytes],
    static_files: StaticFiles | None,
    *,
    step: int,
    local_ranks: int,
    base: Mapping[str, str] | None = None,
) -> Saver:
    """Build the saver for a run at ``step`` from its config."""
    folder, retention, mirror = Path(config.run.output_dir), Retention.of(config.checkpoint), None
    # Rank 0 alone commits checkpoints, so it alone sends them.
    if config.checkpoint.store and own_rank() == 0:
        mirror = Mirror(folder, store_at(config.checkpoint.store), retention, step=step)
    return Saver(
        folder,
        engine,
        model=model,
        tokenizer_files=tokenizer_files,
        static_files=static_files,
        retention=retention,
        copies=copies_checkpoints(config, step),
        local_ranks=local_ranks,
        mirror=mirror,
        records=(folder / METRICS_FILE, folder / TIMELINE_FILE),
        base=base,
    )


def _write(
    partial: Path,
    pieces: Sequence[StatePiece],
    values: Iterable[Tensor],
    sums: Sequence[Sum],
    copy: HostCopy | None,
    thread: ThreadPoolExecutor,
) -> Future[WrittenFile]:
    """Write this rank's file: from a copy in the ``thread``, or immediately without a copy."""
    rank = own_rank()
    if copy is not None:
        return thread.submit(_write_copy, partial, rank, pieces, copy.fill(pieces, values), sums)
    # Not in the thread: ZeRO's state must be read by the training thread. A disk error is kept until all ranks have
    # tried, because a rank that raised here would leave the others in the next collective.
    done: Future[WrittenFile] = Future()
    try:
        done.set_result(write_rank_file(partial, rank, pieces, values, sums))
    except (OSError, CheckpointError) as error:
        done.set_exception(error)
    return done


def _write_copy(
    folder: Path, rank: int, pieces: Sequence[StatePiece], values: Iterable[Tensor], sums: Sequence[Sum]
) -> WrittenFile:
    """Call ``write_rank_file`` in the thread, then trim the heap so that many saves leave no gaps in it."""
    try:
        return write_rank_file(folder, rank, pieces, values, sums)
    finally:
        # Runs during a training step: memory in use stays, only gaps are returned.
        trim_heap()


def _let_training_go_first() -> None:
    """Lower this thread's priority, if the system has priorities per thread."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
