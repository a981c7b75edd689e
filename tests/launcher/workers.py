"""What the tests' forked workers run: a ``Trainer`` without a launcher, and the accidents that befall it."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import launcher.checkpoint.background_saver
import launcher.checkpoint.checkpoint_files
import launcher.cluster.exit
import launcher.metrics.trackers.tracker_threads
import launcher.report.page
import launcher.training.trainer
from launcher.cluster.exit import run_to_exit_code
from launcher.metrics.record import Record, read_metrics, without_timing
from launcher.training.hook import RunningStep
from launcher.training.run_state import TrainingRun
from launcher.training.setup import build_run
from launcher.training.totals import StepSums
from launcher.training.train_step import TrainStep
from launcher.training.trainer import Trainer
from longctx.checkpoint_format import CHECKPOINTS
from longctx.errors import CheckpointError
from longctx.model.chunks.layer_parts import LayerParts
from parallel.comm.world import gather_objects
from tests.helpers import run_distributed
from tests.launcher.runs import SCREEN, tiny_config
from tests.parallel.zero.swapping import swap_everything

SAVING = (
    launcher.checkpoint.background_saver,
    launcher.checkpoint.checkpoint_files,
    launcher.checkpoint.background_saver.HostCopy,
)
"""Where the stages of a save are."""


def build(shards: Path, output: Path, changed: Mapping[str, Any]) -> TrainingRun:
    """A tiny run, ready for its first step."""
    return build_run(tiny_config(shards, output, changed), torch.device("cpu"))


def train(shards: Path, output: Path, changed: Mapping[str, Any], step: type[TrainStep] = TrainStep) -> None:
    """A run to its end, without report and TensorBoard, which take longer than all its steps."""
    leave_out_pictures()
    run = build(shards, output, changed)
    Trainer(run, train_step=step(run)).train()


def train_each(shards: Path, runs: Mapping[Path, Mapping[str, Any]]) -> None:
    """Several runs one after the other: their folders and what is changed in each."""
    for output, changed in runs.items():
        train(shards, output, changed)


def train_each_swapping(shards: Path, runs: Mapping[Path, Mapping[str, Any]]) -> None:
    """``train_each``, with tensors of any size on the disk where a run has one."""
    swap_everything()
    train_each(shards, runs)


def breaking_step(step: int, act: Callable[[TrainingRun], None]) -> type[TrainStep]:
    """Steps of which one breaks something before its forward pass."""

    class BreakingStep(TrainStep):
        def forward_backward(self, now: RunningStep) -> StepSums:
            if now.number == step:
                act(self.run)
            return super().forward_backward(now)

    return BreakingStep


def train_until_killed_in_a_step(shards: Path, output: Path, changed: Mapping[str, Any], rank: int, step: int) -> None:
    """``train``, but one rank is killed between the backward pass and the update of a step."""

    class KilledStep(TrainStep):
        def forward_backward(self, now: RunningStep) -> StepSums:
            sums = super().forward_backward(now)
            if self.run.mesh.rank == rank and now.number == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return sums

    train(shards, output, changed, KilledStep)


def train_until_killed_in_a_chunk(
    shards: Path, output: Path, changed: Mapping[str, Any], rank: int, count: int
) -> None:
    """``train`` by chunks, but one rank is killed in backward, before the ``count``-th chunk that follows one."""
    places: list[slice] = []
    finish = LayerParts.finish

    def watched(
        parts: LayerParts, x: torch.Tensor, heads: torch.Tensor, tokens: slice, experts: Any, cache: Any
    ) -> Any:
        if cache is not None and cache.recomputing and tokens.start:
            places.append(tokens)
            if os.environ["RANK"] == str(rank) and len(places) == count:
                os.kill(os.getpid(), signal.SIGKILL)
        return finish(parts, x, heads, tokens, experts, cache)

    LayerParts.finish = watched
    train(shards, output, changed)


def train_until_killed_in_a_save(shards: Path, output: Path, changed: Mapping[str, Any], rank: int, stage: str) -> None:
    """``train``, but one rank is killed in the second save, before it does what ``stage`` names."""
    leave_out_pictures()
    name, _, file = stage.partition(" ")
    holder = next(module for module in SAVING if hasattr(module, name))
    act, calls = getattr(holder, name), []

    def killed(*args: Any, **options: Any) -> Any:
        # Of a file's calls those that are about it.
        if not file or Path(args[0]).name == file:
            calls.append(args)
        if os.environ["RANK"] == str(rank) and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*args, **options)

    setattr(holder, name, killed)
    Trainer(build(shards, output, changed)).train()


def train_until_killed_in_a_resume(shards: Path, output: Path, changed: Mapping[str, Any], step: int) -> None:
    """``train``, then go back to the checkpoint of ``step``, but be killed between the two halves of going back."""
    train(shards, output, changed)
    halves = []

    def killed_second(half: Callable[..., Any]) -> Callable[..., Any]:
        def run_half(*args: Any) -> Any:
            halves.append(half)
            if len(halves) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return half(*args)

        return run_half

    launcher.training.trainer.truncate_after = killed_second(launcher.training.trainer.truncate_after)
    launcher.training.trainer.set_aside_newer = killed_second(launcher.training.trainer.set_aside_newer)
    checkpoint = output / CHECKPOINTS / f"step_{step:06d}"
    train(shards, output, {**changed, "run.resume": checkpoint})


def build_undrawn(shards: Path, output: Path, checkpoint: Path, changed: Mapping[str, Any]) -> None:
    """Runs that resume from a checkpoint or start with its weights draw no initial value."""
    leave_out_pictures()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an initial value was drawn")

    torch.randn = refuse
    for number, origin in enumerate(("run.resume", "run.start_from")):
        named = {"model.preset": "none", "train.lr": 1e-3, origin: str(checkpoint)}
        build(shards, output / str(number), {**changed, **named})


def refuse_each(shards: Path, output: Path, cases: list[tuple[Mapping[str, Any], list[str]]]) -> None:
    """Each change of the config ends on every rank with one short CheckpointError that has all the words."""
    leave_out_pictures()
    for changed, words in cases:
        try:
            build(shards, output, changed)
        except CheckpointError as error:
            said = str(error)
        else:
            raise AssertionError(f"{changed} was taken")
        assert all(word in said for word in words), f"{words} expected in: {said}"
        assert len(said.splitlines()) < SCREEN, said


def end_guarded(
    shards: Path,
    output: Path,
    changed: Mapping[str, Any],
    code: int,
    words: list[str],
    limit: int = 0,
    step: type[TrainStep] = TrainStep,
    seen: Path | None = None,
) -> None:
    """``train`` ends with this exit code on all ranks, and rank 0 alone speaks: one screen that has all the words.

    With ``limit``, no file of the last rank may grow beyond so many bytes. ``seen`` keeps the screen.
    """
    launcher.cluster.exit.HEAD_START_SECONDS = 0.0
    if limit and int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()) as out:
        ended = run_to_exit_code(lambda: train(shards, output, changed, step))
    told = gather_objects((ended, said.getvalue()))
    assert [c for c, _ in told] == [code] * len(told), told
    assert not any(text for _, text in told[1:]), told
    text = told[0][1]
    if seen is not None and os.environ["RANK"] == "0":
        seen.write_text(text)
    assert all(text.count(word) == 1 for word in words), f"{words} expected once in: {text}"
    assert "Traceback" not in text, text
    assert len(text.splitlines()) < SCREEN, text
    # Its words may be a warning's, too: where a disk is full, the one about a checkpoint before it.
    first = next((line for line in text.splitlines() if line), "")
    assert not first or first not in out.getvalue(), f"said on standard output too: {out.getvalue()}"


def end_guarded_each(
    shards: Path,
    output: Path,
    cases: list[tuple[Mapping[str, Any], int, list[str]]],
    step: type[TrainStep] = TrainStep,
) -> None:
    """``end_guarded`` for each case: what is changed, the exit code, the words."""
    for changed, code, words in cases:
        end_guarded(shards, output, changed, code, words, step=step)


def run(function: Any, world_size: int, *args: Any) -> None:
    """``run_distributed`` with room for a busy machine."""
    run_distributed(function, world_size, *args, timeout=100.0)


def rows(folder: Path) -> list[Record]:
    """Training and validation records, timings apart."""
    return [without_timing(r) for r in read_metrics(folder) if r["kind"] != "event"]


def leave_out_pictures() -> None:
    """Write no report and no TensorBoard events: they take longer than all steps of a tiny run."""
    launcher.report.page.write_report = lambda folder: folder / "report.html"
    launcher.metrics.trackers.tracker_threads.ALWAYS = ()
