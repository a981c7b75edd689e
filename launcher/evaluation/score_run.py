"""``score``: log-likelihoods for every token in a shard folder, over ranks, in Arrow files.

Ranks in a context group share each document; each data rank scores different documents. Neighbouring documents
form a range, and a range's file is written when it is complete: the same command continues after the last file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_pipeline.rows.packing_checks import check_kind_of_texts
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_verification import assign_shards, open_validated
from data_pipeline.shards.token_scores import ScoredDocument, Total, read_total, write_scores
from launcher.checkpoint.tokenizer_checks import check_checkpoint_tokenizer, check_given_tokenizer
from launcher.evaluation.computation import Computation
from launcher.evaluation.evaluation_run import Progress, Update, no_progress
from launcher.evaluation.evaluation_store import locked
from launcher.evaluation.inference_model import build_decoder, check_finite
from launcher.evaluation.model_source import ModelSource, check_positions, check_reads_text, open_model
from launcher.evaluation.rank_setup import build_mesh, joined_ranks
from longctx.config import ModelConfig
from longctx.errors import ConfigError, DataError
from longctx.files import write_atomically
from longctx.generation.prefill import TokenScores, token_scores
from longctx.model.decoder import Decoder
from longctx.tokenizer.embedding_rows import check_rows
from longctx.untrusted.strict_json import read_json
from parallel.comm.world import gather_objects, on_every_rank, on_rank_0, own_rank
from parallel.mesh import Mesh

SETTINGS_FILE = "scores.json"
BLOCK_TOKENS = 1 << 20
"""Tokens per document range: an interrupted command loses at most one range, and rank 0 holds one range's scores."""


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(Computation):
    """Options for one ``score`` call, equal on every rank."""

    checkpoint: Path
    data: str
    """Shard folder or its URL."""
    output: Path
    tokenizer: Path | None = None
    experts: bool = False
    """Also write expert choices."""
    beyond_positions: bool = False


def score_shards(options: ScoreOptions, progress: Progress) -> Total:
    """Score every document on the ranks that a launcher started, or in this process; return the totals."""
    with joined_ranks(options) as device:
        return run_scoring(options, device, progress)


def run_scoring(options: ScoreOptions, device: torch.device, progress: Progress) -> Total:
    """Call ``score`` on the current process group, if any. Collective."""
    if own_rank() != 0:
        progress = no_progress
    model_source, shards = on_every_rank(lambda: _open(options))
    mesh = build_mesh(model_source.model, context=options.context, expert=options.expert)
    blocks = list(_blocks(shards))
    with ExitStack() as stack:
        missing = on_rank_0(lambda: _find_missing_blocks(options, model_source, shards, blocks, stack))
        if missing:
            with progress(f"loading {model_source.folder}"):
                decoder = build_decoder(model_source, mesh, getattr(torch, options.dtype), device)
            tokens = sum(int(_lengths(shards, block).sum()) for block in missing)
            with progress(f"scoring {shards.folder}", tokens) as update:
                _Scorer(options, model_source, shards, mesh, decoder).score(missing, update)
        return on_rank_0(lambda: sum((read_total(_file_of(options.output, block)) for block in blocks), Total()))


class _Scorer:
    """Document range scorer on a mesh; rank 0 writes the files."""

    def __init__(
        self, options: ScoreOptions, model_source: ModelSource, shards: ShardSet, mesh: Mesh, decoder: Decoder
    ) -> None:
        self._options, self._model_source, self._shards = options, model_source, shards
        self._mesh, self._decoder = mesh, decoder

    def score(self, blocks: Sequence[range], update: Update) -> None:
        """Score and write each document range. Collective."""
        done = 0
        update(0)
        for block in blocks:
            lengths = _lengths(self._shards, block)
            # Balance by length: attention makes long documents dominate a range's time.
            mine = [block[at] for at in assign_shards(lengths.tolist(), self._mesh.data)[self._mesh.data_rank]]
            scores = on_every_rank(lambda mine=mine: {document: self._of_document(document) for document in mine})
            # All ranks in a context group have the scores; only its first rank sends them.
            if self._mesh.context_rank != 0:
                scores = {}
            found = {document: of_one for part in gather_objects(scores) for document, of_one in part.items()}
            on_rank_0(lambda block=block, found=found: self._write(block, found))
            done += int(lengths.sum())
            update(done, note=f"{block.stop:,} of {self._shards.num_documents:,} documents")

    def _of_document(self, document: int) -> TokenScores | None:
        """Return a document's scores, on the CPU; None if it has no second token."""
        self._shards.check_files([document])
        ids = self._shards.document(document).astype(np.int64)
        if len(ids) < 2:
            return None
        check_rows(self._model_source.tokenizer, ids, f"document {document} of {self._shards.folder}")
        options = self._options
        scores = token_scores(
            self._decoder, ids.tolist(), chunk_tokens=options.chunk_tokens, with_experts=options.experts
        )
        check_finite(scores.nll, self._model_source.folder, f"document {document}", options.dtype)
        return TokenScores(scores.nll.cpu(), scores.experts)

    def _write(self, block: range, found: Mapping[int, TokenScores | None]) -> None:
        documents = []
        for document in block:
            scores = found[document]
            # A document without a second token still gets a record: document numbers must stay contiguous.
            nll, experts = None, None
            if scores is not None:
                nll = scores.nll.numpy()
                if scores.experts is not None:
                    experts = scores.experts.flatten(1).numpy()
            documents.append(
                ScoredDocument(
                    number=document,
                    name=self._shards.name(document),
                    ids=self._shards.document(document),
                    nll=nll,
                    experts=experts,
                    target_runs=self._shards.target_runs(document),
                )
            )
        experts_a_token = 0
        if self._options.experts:
            experts_a_token = _experts_a_token(self._model_source.model)
        write_scores(_file_of(self._options.output, block), documents, experts_a_token=experts_a_token)


def _open(options: ScoreOptions) -> tuple[ModelSource, ShardSet]:
    """Open model and shards; raise a short error unless they fit each other."""
    model_source = open_model(options.checkpoint, options.tokenizer)
    check_reads_text(model_source, "score")
    if options.experts and not model_source.model.num_experts:
        raise ConfigError(f"--experts: {model_source.folder} has no experts. Leave the option out.")
    shards = open_validated(options.data)
    check_kind_of_texts(shards)
    if options.tokenizer is None:
        check_checkpoint_tokenizer(model_source.folder, shards)
    else:
        check_given_tokenizer(model_source.tokenizer, shards)
    # Check the longest document before any is scored.
    check_positions(
        model_source.model,
        shards.longest_document(),
        request=f"the longest document in {shards.folder} has {shards.longest_document():,} tokens",
        hint="Build shards with shorter documents (data build --max-bytes N, or --max-tokens N for conversations)",
        allow_longer=options.beyond_positions,
    )
    return model_source, shards


def _blocks(shards: ShardSet) -> Iterator[range]:
    """Yield neighbouring documents in ranges of about ``BLOCK_TOKENS``, the same for any number of ranks."""
    lengths = _lengths(shards, range(shards.num_documents))
    # Assign a document by its first token, so that ranges do not depend on ranks or resumes.
    of_block = (np.cumsum(lengths) - lengths) // BLOCK_TOKENS
    bounds = [0, *(np.flatnonzero(np.diff(of_block)) + 1).tolist(), len(lengths)]
    for start, stop in pairwise(bounds):
        if start < stop:
            yield range(start, stop)


def _lengths(shards: ShardSet, documents: range) -> np.ndarray:
    return shards.lengths_of(np.arange(documents.start, documents.stop))


def _file_of(folder: Path, block: range) -> Path:
    return folder / f"{block.start:09d}.arrow"


def _find_missing_blocks(
    options: ScoreOptions, model_source: ModelSource, shards: ShardSet, blocks: Sequence[range], stack: ExitStack
) -> list[range]:
    """Return the document ranges without a file; the folder is locked until the stack closes.

    Raise ConfigError with all settings that differ from the existing files.
    """
    stack.enter_context(locked(options.output))
    settings = {
        "weights": model_source.fingerprint,
        "tokenizer": model_source.tokenizer.fingerprint,
        "data": shards.manifest.hash,
        "dtype": options.dtype,
        "experts": options.experts,
        "block_tokens": BLOCK_TOKENS,
    }
    path = options.output / SETTINGS_FILE
    if path.is_file():
        before = _read_settings(path)
        lines = [
            f"  {name}: there {before.get(name)!r}, now {value!r}"
            for name, value in settings.items()
            if before.get(name) != value
        ]
        if lines:
            raise ConfigError(
                f"--output {options.output} holds scores with other settings:\n"
                + "\n".join(lines)
                + "\nUse the same settings to continue, or another --output."
            )
    # Write the settings before any scores: a later call must always find them.
    write_atomically(path, f"{json.dumps(settings, indent=1)}\n".encode())
    return [block for block in blocks if not _file_of(options.output, block).is_file()]


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. Choose another --output.") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path} is not a scores file. Choose another --output.")
    return settings


def _experts_a_token(model: ModelConfig) -> int:
    """Return the expert choices per token, over all expert layers."""
    return model.experts_per_token * sum(model.has_experts(layer) for layer in range(model.num_layers))
