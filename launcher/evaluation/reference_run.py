"""``score --references``: store each reply's log-likelihood under a model in a folder of preferences.

Preference losses compare with these numbers, so training holds no second model. Records are read in the folder's order,
as training reads them: ranks in a context group share a batch of complete records, and data ranks take batches in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import torch

from data_pipeline.rows.pack import Row
from data_pipeline.rows.preferences import PreferenceReplies, PreferenceRule, check_preferences
from data_pipeline.rows.row_batches import Share
from data_pipeline.rows.row_reader import RowReader
from data_pipeline.shards.manifest import VALIDATION_FOLDER
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.references import write_references
from data_pipeline.shards.shard_verification import open_validated
from launcher.checkpoint.tokenizer_checks import check_checkpoint_tokenizer, check_given_tokenizer
from launcher.evaluation.computation import Computation
from launcher.evaluation.evaluation_run import Progress, no_progress
from launcher.evaluation.inference_model import LAYOUT, build_decoder
from launcher.evaluation.model_source import ModelSource, check_positions, check_reads_text, open_model
from launcher.evaluation.rank_setup import build_mesh, joined_ranks
from longctx.architecture.layer_specs import can_share_prefixes
from longctx.batch import PackedDocuments
from longctx.compact_batch import CompactBatch
from longctx.errors import CheckpointError, ConfigError
from longctx.objectives.build import Objective, build_objective
from longctx.objectives.preferences import Preferences
from parallel.comm.world import gather_objects, on_every_rank, on_rank_0, own_rank
from parallel.document_sums import document_sum
from parallel.layout.sequence import SequenceLayout, num_parts
from parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions(Computation):
    """Options for one ``score --references`` call, equal on every rank."""

    checkpoint: Path
    data: str
    """Shard folder of preferences on this machine."""
    tokenizer: Path | None = None
    beyond_positions: bool = False


@dataclass(frozen=True)
class ScoredReplies:
    """What was stored."""

    records: int
    tokens: int
    """Tokens read: each record's, with its prompt for each reply or for both."""
    means: tuple[float, float]
    """Mean log-likelihood of the first and the second replies, nats per reply."""


def score_replies(options: ReferenceOptions, progress: Progress) -> dict[str, ScoredReplies]:
    """Score every record on the ranks that a launcher started, or in this process, and store the sums. Collective.

    A folder's validation records, if it has some, are scored too. Return what was stored, by folder.
    """
    with joined_ranks(options) as device:
        if own_rank() != 0:
            progress = no_progress
        model_source, folders = on_every_rank(lambda: _open(options))
        mesh = build_mesh(model_source.model, context=options.context, expert=options.expert)
        with progress(f"loading {model_source.folder}"):
            decoder = build_decoder(model_source, mesh, getattr(torch, options.dtype), device)
        task = build_objective(decoder, Objective("preferences"), reduce_sums=document_sum(mesh))
        assert isinstance(task, Preferences)
        found = {}
        for shards in folders:
            batches = _Records(shards, mesh, can_share_prefixes(model_source.model), options.chunk_tokens)
            own = _score(task, batches, mesh, device, progress)
            # All ranks in a context group have the sums; only its first rank sends them.
            parts = gather_objects(own if mesh.context_rank == 0 else {})
            stored = on_rank_0(partial(_store, options, model_source, shards, parts, batches.num_tokens))
            found[str(shards.folder)] = stored
        return found


def _score(
    task: Preferences, batches: _Records, mesh: Mesh, device: torch.device, progress: Progress
) -> dict[int, np.ndarray]:
    """Return the sums in each of this rank's batches, by their first records. Collective."""
    found, done = dict[int, np.ndarray](), 0
    with progress(f"scoring {batches.shards.folder}", batches.num_tokens) as update:
        update(0)
        for records, batch in batches:
            found[records.start] = task.reply_sums(batch.unpack(device, task.prepare)).cpu().numpy()
            done += mesh.data * batch.documents.num_tokens
            update(min(done, batches.num_tokens))
    return found


class _Records:
    """A folder's records in order, as batches of complete records."""

    def __init__(self, shards: ShardSet, mesh: Mesh, can_share: bool, chunk_tokens: int) -> None:
        """Split the records into batches of at most ``chunk_tokens`` tokens; a longer record has one of its own."""
        rule = PreferenceRule(can_share and mesh.context == 1)
        self.shards, self._mesh = shards, mesh
        self._replies = PreferenceReplies(rule, [shards])
        numbers = np.arange(shards.num_documents)
        prompts, replies = shards.lengths_of(numbers, "source"), shards.lengths_of(numbers)
        self._tokens = rule.tokens_in_rows(prompts, replies)
        self._lengths = replies
        ends = np.cumsum(self._tokens)
        self.num_tokens = int(self._tokens.sum())
        """Tokens over all batches and ranks."""
        self._ranges: list[range] = []
        start = 0
        while start < len(ends):
            limit = chunk_tokens + (ends[start - 1] if start else 0)
            stop = max(start + 1, int(np.searchsorted(ends, limit, side="right")))
            self._ranges.append(range(start, stop))
            start = stop

    def __iter__(self) -> Iterator[tuple[range, CompactBatch]]:
        """Yield each of this rank's batches with its records. Groups of ranks may get different numbers of batches."""
        for records in self._ranges[self._mesh.data_rank :: self._mesh.data]:
            row = Row(records, [0] * len(records), self._lengths[records.start : records.stop].tolist())
            seq_len = int(self._tokens[records.start : records.stop].sum())
            reader = RowReader(self.shards, seq_len, replies=self._replies)
            yield records, reader.share([row], self._share)[0]

    def _share(self, documents: PackedDocuments) -> Share:
        """Return this rank's shard of a batch's tokens."""
        mesh = self._mesh
        if mesh.context == 1:
            return Share(documents, [(0, documents.num_tokens, 1)], None)
        parts = num_parts(LAYOUT, mesh.context)
        padded = documents.padded(-(-documents.num_tokens // parts) * parts)
        layout = SequenceLayout.build(LAYOUT, padded.num_tokens, mesh.context, padded)
        return Share(padded, layout.rank_runs(mesh.context_rank), layout)


def _open(options: ReferenceOptions) -> tuple[ModelSource, list[ShardSet]]:
    """Open model and records; raise a short error unless they fit each other."""
    model_source = open_model(options.checkpoint, options.tokenizer)
    check_reads_text(model_source, "score --references")
    if not model_source.model.causal or not model_source.model.predicts_tokens:
        raise ConfigError(
            f"--references: {model_source.folder} does not predict a reply's next token. Use a causal decoder."
        )
    if "://" in options.data:
        raise ConfigError(
            f"--references writes into the folder, but {options.data} is in a store. Copy it to this machine."
        )
    folders = [open_validated(options.data)]
    if (Path(options.data) / VALIDATION_FOLDER).is_dir():
        folders.append(open_validated(str(Path(options.data) / VALIDATION_FOLDER)))
    for shards in folders:
        _check_records(options, model_source, shards)
    return model_source, folders


def _check_records(options: ReferenceOptions, model_source: ModelSource, shards: ShardSet) -> None:
    """Raise a short error unless the model reads all of a folder's records."""
    check_preferences(shards)
    if options.tokenizer is None:
        check_checkpoint_tokenizer(model_source.folder, shards)
    else:
        check_given_tokenizer(model_source.tokenizer, shards)
    numbers = np.arange(shards.num_documents)
    seconds, replies = shards.second_starts(numbers), shards.lengths_of(numbers)
    longest = int((shards.lengths_of(numbers, "source") + np.maximum(seconds, replies - seconds)).max(initial=0))
    check_positions(
        model_source.model,
        longest,
        request=f"the longest record in {shards.folder} has {longest:,} tokens in a prompt with its reply",
        hint="Build shards with shorter records (data build --max-tokens N)",
        allow_longer=options.beyond_positions,
    )


def _store(
    options: ReferenceOptions,
    model_source: ModelSource,
    shards: ShardSet,
    parts: Sequence[dict[int, np.ndarray]],
    num_tokens: int,
) -> ScoredReplies:
    """Write the sums of all ranks, in the folder's order."""
    found = {start: sums for part in parts for start, sums in part.items()}
    sums_N2 = np.concatenate([np.empty((0, 2)), *(found[start] for start in sorted(found))])
    if not np.isfinite(sums_N2).all():
        raise CheckpointError(
            f"{model_source.folder}: the log-likelihoods of some replies are not finite: the weights are corrupted, or "
            f"too large for --dtype {options.dtype}. Try an earlier checkpoint, or --dtype float32."
        )
    origin = {
        "weights": model_source.fingerprint,
        "checkpoint": model_source.name,
        "tokenizer": model_source.tokenizer.fingerprint,
        "rope": asdict(model_source.model.rope),
        "dtype": options.dtype,
        "date": date.today().isoformat(),
    }
    write_references(shards.folder, sums_N2, origin)
    first, second = sums_N2.mean(0).tolist() if len(sums_N2) else (0.0, 0.0)
    return ScoredReplies(len(sums_N2), num_tokens, (first, second))
