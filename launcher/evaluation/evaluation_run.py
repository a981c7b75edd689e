"""``evaluate_checkpoint``: check all input, load the model, measure samples, write tables and plots.

Ranks in a context group share each sample; each data rank measures different samples. A group's first rank creates its
samples and sends them to the others. Rank 0 writes every row before the next samples start. Short samples are measured
in batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from launcher.evaluation.answer import PromptTokens, prompt_of, write_answers
from launcher.evaluation.cells import Cell, by_prompts, format_cells, try_samples
from launcher.evaluation.evaluated_model import (
    DocumentPrefix,
    EvaluatedModel,
    Texts,
    open_evaluated_model,
    read_documents,
)
from launcher.evaluation.evaluation_options import EvaluationOptions
from launcher.evaluation.evaluation_store import EvaluationStore, locked, settings_of, text_settings
from launcher.evaluation.inference_model import build_decoder, check_finite, fitting_together
from launcher.evaluation.rank_setup import build_mesh, joined_ranks
from launcher.evaluation.result_files import write_results
from launcher.report.evaluation.evaluation_folder import Key
from longctx.errors import LengthError, LongCtxError
from longctx.evaluation import EvaluationSample, EvaluationTask, ScoreRow
from longctx.evaluation.independent_samples import IndependentTask
from longctx.evaluation.losses import LossRow, key_row, near_windows, text_row
from longctx.generation.continuous_batching import MAX_SEQUENCES
from longctx.generation.prefill import sequence_nll
from longctx.model.decoder import Decoder
from parallel.comm.world import gather_objects, on_every_rank, on_rank_0, own_rank, raise_on_all_ranks
from parallel.mesh import Mesh

log = logging.getLogger(__name__)

Update = Callable[..., None]
Progress = Callable[..., AbstractContextManager[Update]]
"""Factory for a progress display, from a label and the total tokens if known; it receives the completed tokens."""
Value = TypeVar("Value")
TOGETHER_TOKENS = 131_072
"""Maximum tokens in samples measured together: an interrupted command loses them."""
_MOST_PROBLEMS = 8
"""Maximum reported tasks with problems: they fit on one screen."""


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """Missing samples for one task and length."""

    name: str
    length: int
    indices: tuple[int, ...]
    task: EvaluationTask | None
    """None for text losses."""


def evaluate_checkpoint(options: EvaluationOptions, progress: Progress) -> Path:
    """Evaluate on the ranks that a launcher started, or in this process; return the page with the results."""
    with joined_ranks(options) as device:
        return run_evaluation(options, device, progress)


def run_evaluation(options: EvaluationOptions, device: torch.device, progress: Progress) -> Path:
    """Call ``evaluate_checkpoint`` on the current process group, if any. Collective."""
    if own_rank() != 0:
        progress = no_progress
    # Order checks from cheap to expensive, all before any allocation.
    with progress("reading text, checking each task"):
        evaluated = on_every_rank(lambda: open_evaluated_model(options))
        mesh = build_mesh(evaluated.model, context=options.context, expert=options.expert)
        texts, skipped_cells = on_rank_0(lambda: _read_and_check(options, evaluated))
    # Filled on rank 0 only.
    stores: list[EvaluationStore] = []
    with ExitStack() as stack:
        done = on_rank_0(lambda: _open_store(options, evaluated, texts, stores, stack))
        jobs = missing_jobs(options, texts, done, skipped_cells)
        if jobs:
            with progress(f"loading {evaluated.folder}"):
                decoder = build_decoder(evaluated, mesh, getattr(torch, options.dtype), device)
            with progress("evaluating", sum(job.length * len(job.indices) for job in jobs)) as update:
                _Evaluator(options, evaluated, mesh, decoder, device, texts, stores).process_jobs(jobs, update)
        with progress("drawing"):
            return on_rank_0(lambda: write_results(options.output))


def missing_jobs(
    options: EvaluationOptions, texts: Texts, done: set[Key], skipped_cells: Collection[Cell] = ()
) -> list[EvaluationJob]:
    """Return the missing jobs in cells with room, short lengths first so that errors show early."""
    tasks, text_metrics, _ = options.chosen()
    jobs = []
    for length in options.lengths:
        wanted: list[tuple[str, EvaluationTask | None, int]] = [(task.name, task, options.samples) for task in tasks]
        for text_metric in text_metrics:
            # In a shorter text, LongPPL's near context is the full context.
            if text_metric == "ppl" or length > options.longppl.truncation:
                wanted.append((text_metric, None, len(texts[length])))
        for name, task, count in wanted:
            indices = tuple(index for index in range(count) if (name, length, index) not in done)
            if indices and (name, length) not in skipped_cells:
                jobs.append(EvaluationJob(name=name, length=length, indices=indices, task=task))
    return jobs


def split_evenly(indices: Sequence[int], degree: int) -> list[tuple[int, ...]]:
    """Divide the indices into contiguous parts for ``degree`` ranks, as even as possible."""
    bounds = [len(indices) * rank // degree for rank in range(degree + 1)]
    return [tuple(indices[start:stop]) for start, stop in pairwise(bounds)]


def consecutive(indices: Sequence[int]) -> Iterator[range]:
    """Yield the indices as ranges: some tasks sample from the start in each call."""
    start = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield range(indices[start], indices[at - 1] + 1)
            start = at


class _Evaluator:
    """Job evaluator on a mesh; rank 0 has the store."""

    def __init__(
        self,
        options: EvaluationOptions,
        evaluated: EvaluatedModel,
        mesh: Mesh,
        decoder: Decoder,
        device: torch.device,
        texts: Texts,
        stores: list[EvaluationStore],
    ) -> None:
        self._options, self._subject, self._mesh = options, evaluated, mesh
        self._decoder, self._device = decoder, device
        self._texts, self._stores = texts, stores

    def process_jobs(self, jobs: Sequence[EvaluationJob], update: Update) -> None:
        """Measure and store all samples of the jobs. Collective."""
        done = 0
        update(0)
        for job in jobs:
            blocks = split_evenly(job.indices, self._mesh.data)
            mine = blocks[self._mesh.data_rank]
            # The generator continues across rounds, so each sample is created once.
            samples, together = self._samples(job, mine), self._together(job)
            # Every rank takes part in each round, even without samples left: storing is collective.
            for at in range(0, max(len(block) for block in blocks), together):
                rows = self._process_samples(job, mine[at : at + together], samples)
                on_every_rank(lambda rows=rows: self._store(rows))
                done += job.length * len(rows)
                update(done, note=f"{job.name} at {job.length:,}")

    def _together(self, job: EvaluationJob) -> int:
        """Return how many of the job's samples each context group measures together. Collective."""
        if job.task is None:
            return 1
        return fitting_together(
            self._subject.model,
            self._mesh,
            self._device,
            job.length,
            dtype=getattr(torch, self._options.dtype),
            chunk_tokens=self._options.chunk_tokens,
            most=min(MAX_SEQUENCES, TOGETHER_TOKENS // job.length),
        )

    def _process_samples(
        self, job: EvaluationJob, indices: Sequence[int], samples: Iterator[tuple[EvaluationSample, PromptTokens]]
    ) -> list[ScoreRow | LossRow]:
        """Return the rows from all data ranks, each measuring its own samples, if it has any left. Collective."""
        rows: Sequence[ScoreRow | LossRow]
        if job.task is not None:
            rows = self._scores(job.task, len(indices), samples)
        else:
            rows = on_every_rank(lambda: [self._loss(job, index) for index in indices])
        # All ranks in a context group have the rows; only its first rank sends them.
        if self._mesh.context_rank != 0:
            rows = []
        return [row for of_rank in gather_objects(rows) for row in of_rank]

    def _scores(
        self, task: EvaluationTask, count: int, samples: Iterator[tuple[EvaluationSample, PromptTokens]]
    ) -> list[ScoreRow]:
        """Return the rows for the next ``count`` samples."""
        problem, made = None, None
        try:
            # Create samples once per context group: the other ranks receive them.
            if self._mesh.context_rank == 0:
                made = list(islice(samples, count))
        except LongCtxError as error:
            # Broadcast the error: the other ranks would wait for the prompts.
            problem = error
        raise_on_all_ranks(problem)
        if not count:
            return []
        given = broadcast_in_sequence(self._mesh, made)
        prompts = [prompt for _, prompt in given]
        outputs = write_answers(self._decoder, prompts, self._subject.tokenizer, self._options.chunk_tokens)
        return [ScoreRow.of(task, sample, output) for (sample, _), output in zip(given, outputs, strict=True)]

    def _loss(self, job: EvaluationJob, index: int) -> LossRow:
        text = self._texts[job.length][index]
        ids = text.ids.tolist()
        nll = self._nll(text, ids)
        if job.name == "ppl":
            return text_row(job.name, job.length, index, text.name, ids, nll.numpy())
        rule = self._options.longppl
        near = []
        for start, stop in near_windows(len(ids), truncation=rule.truncation, window=rule.window):
            # A token's loss is at its index minus one: the first token has no loss.
            near.append(self._nll(text, ids[start:stop])[rule.truncation - 1 :])
        # The first tokens are within the near context, so they have no near loss.
        near_nll = torch.cat(near)
        return key_row(job.name, job.length, index, text.name, nll[-len(near_nll) :].numpy(), near_nll.numpy())

    def _nll(self, text: DocumentPrefix, ids: list[int]) -> torch.Tensor:
        nll = sequence_nll(self._decoder, ids, chunk_tokens=self._options.chunk_tokens).cpu()
        check_finite(nll, self._subject.folder, text.name, self._options.dtype)
        return nll

    def _samples(self, job: EvaluationJob, indices: Sequence[int]) -> Iterator[tuple[EvaluationSample, PromptTokens]]:
        """Yield this rank's samples with their ids, on demand."""
        if job.task is None:
            return
        setting = self._subject.setting
        for part in consecutive(indices):
            for sample in job.task.samples(setting, job.length, part.stop, start=part.start):
                yield sample, prompt_of(job.task, sample, self._subject.tokenizer, self._options)

    def _store(self, rows: list[ScoreRow | LossRow]) -> None:
        for store in self._stores:
            store.add(rows)


def broadcast_in_sequence(mesh: Mesh, value: Value | None) -> Value:
    """Broadcast a value from the context group's first rank to all its ranks. Collective."""
    if mesh.control_group is None:
        return cast(Value, value)
    activity = "receiving the value from the sequence's first rank"
    return mesh.comm.broadcast_object(value, mesh.context_peer(0), mesh.control_group, operation=activity)


def _read_and_check(options: EvaluationOptions, evaluated: EvaluatedModel) -> tuple[Texts, frozenset[Cell]]:
    """Return the texts for losses and the cells that are left out, after making one sample per remaining task.

    Errors name short or missing texts.
    """
    tasks, text_metrics, _ = options.chosen()
    problems: dict[str, LongCtxError] = {}
    skipped_cells, last = set(evaluated.skipped_cells), None
    for task in tasks:
        left = [length for length in options.lengths if (task.name, length) not in evaluated.skipped_cells]
        attempted: list[int] = []
        for group in by_prompts(left):
            for length in group:
                attempted.append(length)
                last = _misfit(evaluated, task, length, options.samples, skipped_cells, problems) or last
                # Longer cells fit too.
                if (task.name, length) not in skipped_cells:
                    break
        # The shortest length reveals prompts that do not fit, the longest one texts and word lists that are too short.
        if left and left[-1] not in attempted and (task.needs_haystack or not isinstance(task, IndependentTask)):
            last = _misfit(evaluated, task, left[-1], options.samples, skipped_cells, problems) or last
    # Report all problems at once, before the model is loaded.
    if problems:
        raise _all_of(problems)
    if last is not None and not text_metrics and len(skipped_cells) == len(tasks) * len(options.lengths):
        raise last
    if skipped_cells:
        log.warning("Skipped, because the task's prompts do not fit the length: %s.", format_cells(skipped_cells))
    texts: Texts = {}
    if text_metrics:
        texts = read_documents(options, evaluated)
    return texts, frozenset(skipped_cells)


def _misfit(
    evaluated: EvaluatedModel,
    task: EvaluationTask,
    length: int,
    count: int,
    skipped_cells: set[Cell],
    problems: dict[str, LongCtxError],
) -> LengthError | None:
    """Try a cell's samples; record that one does not fit and return the error, or record another problem."""
    try:
        try_samples(evaluated.setting, task, length, count)
    except LengthError as error:
        # With this haystack's words the prompt is longer than with the stand-in's.
        skipped_cells.add((task.name, length))
        return error
    except LongCtxError as error:
        problems.setdefault(task.name, error)
    return None


def _all_of(problems: dict[str, LongCtxError]) -> LongCtxError:
    """Combine errors from several tasks, so that a user can fix all before the next start."""
    first, *others = problems.values()
    if not others:
        return first
    lines = [str(problem).partition("\n")[0] for problem in problems.values()][:_MOST_PROBLEMS]
    if len(problems) > len(lines):
        lines.append(f"and {len(problems) - len(lines)} more")
    return type(first)("\n".join([*lines, f"Or leave these tasks out: {', '.join(problems)}"]))


def _open_store(
    options: EvaluationOptions, evaluated: EvaluatedModel, texts: Texts, stores: list[EvaluationStore], stack: ExitStack
) -> set[Key]:
    """Open the output folder on rank 0, locked until the stack closes; return its finished samples."""
    stack.enter_context(locked(options.output))
    store = EvaluationStore(options.output, settings_of(options, evaluated), text_settings(evaluated))
    store.check_texts(texts)
    stores.append(store)
    return store.done


def no_progress(*_: Any) -> AbstractContextManager[Update]:
    """Return the progress display for other ranks than rank 0, without output."""
    return nullcontext(lambda *_, **__: None)
