"""``evaluate --tasks masked,pairs``: score an encoder on masked tokens and on segment pairs in held-out rows.

Rows are packed and masked as in training, the same ones each time. A pair head's accuracy is reported with that of a
rule without a model: segments belong together if they share enough words, by the threshold that is best on these same
rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_pipeline.loader import ValidationLoader, build_validation_loader
from data_pipeline.rows.pack import Packing
from data_pipeline.rows.row_batches import Share
from data_pipeline.rows.text_segments import SegmentRule
from data_pipeline.rows.token_masking import MaskRule
from data_pipeline.shards.reader import ShardSet, check_outputs
from launcher.checkpoint.tokenizer_checks import check_checkpoint_tokenizer
from launcher.evaluation.computation import Computation
from launcher.evaluation.evaluated_model import held_out_shards
from launcher.evaluation.evaluation_run import Progress, no_progress
from launcher.evaluation.inference_model import LAYOUT, build_decoder, check_finite
from launcher.evaluation.model_source import ModelSource, check_positions, open_model, run_of
from launcher.evaluation.rank_setup import build_mesh, joined_ranks
from launcher.run_folder import CONFIG_FILE
from longctx.batch import IGNORED_TARGET, Batch, PackedDocuments
from longctx.errors import ConfigError
from longctx.files import read_toml, write_synced
from longctx.model.decoder import Decoder
from longctx.objectives.build import Objective, build_objective
from longctx.objectives.routed_task import hidden_states
from parallel.comm.world import on_every_rank, on_rank_0, own_rank, sum_over_ranks
from parallel.layout.sequence import SequenceLayout, num_parts
from parallel.mesh import Mesh

MASKED, PAIRS = "masked", "pairs"
SCORES = "masked.json"
_MAX_LOGIT_ROWS = 4096
"""Maximum masked tokens with logits in memory at once."""
_ROWS, _ROW_TOKENS = 64, 512
_LEAST_ROW, _LEAST_SEGMENTS = 2, 5
"""Minimum tokens per row, and per row with two segments."""


@dataclass(frozen=True, kw_only=True)
class MaskedOptions(Computation):
    """Options for the tasks ``masked`` and ``pairs``."""

    checkpoint: Path
    output: Path
    tasks: tuple[str, ...] = (MASKED,)
    text: str | None = None
    """Shard folder or its URL; by default the checkpoint run's held-out split."""
    rows: int = _ROWS
    seq_len: int | None = None
    """Tokens per row; by default as in the checkpoint's run."""
    beyond_positions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows < 1:
            raise ConfigError(
                f"--samples {self.rows} must be at least 1; without the option, the first {_ROWS} rows are read."
            )
        if self.seq_len is not None:
            _check_row(self.seq_len, _LEAST_ROW, "one masked and one visible")


def evaluate_masked(options: MaskedOptions, progress: Progress) -> dict[str, Any]:
    """Evaluate on the ranks that a launcher started, or in this process; return the scores on rank 0. Collective.

    Raise ConfigError for a causal model, and for pairs without a pair head.
    """
    with joined_ranks(options) as device:
        model_source = on_every_rank(lambda: _open(options))
        mesh = build_mesh(model_source.model, context=options.context, expert=options.expert)
        loader = on_every_rank(lambda: _loader(options, model_source, mesh))
        decoder = build_decoder(model_source, mesh, getattr(torch, options.dtype), device)
        bar = progress if own_rank() == 0 else no_progress
        with bar("evaluating", loader.num_rows * loader.seq_len) as update:
            scores = MaskedScores()
            # Data ranks take rows in turn: one local row stands for ``mesh.data`` rows of progress.
            for number, shard in enumerate(loader.shares(lambda documents: _share(documents, mesh))):
                batch = shard.unpack(device, build_objective(decoder, Objective(MASKED)).prepare)
                scores.add(decoder, batch, model_source.folder, options.dtype)
                update((number + 1) * mesh.data * loader.seq_len)
        found = scores.over_ranks()
        return on_rank_0(lambda: _write(options, model_source, loader, found))


def _share(documents: PackedDocuments, mesh: Mesh) -> Share:
    """Return this rank's shard of a row's tokens."""
    parts = num_parts(LAYOUT, mesh.context)
    # Pad to a multiple of the layout's parts: ranks get equal shards.
    padded = documents.padded(-(-documents.num_tokens // parts) * parts)
    layout = SequenceLayout.build(LAYOUT, padded.num_tokens, mesh.context, padded, causal=False)
    return Share(padded, layout.rank_runs(mesh.context_rank), layout)


class MaskedScores:
    """Running sums over rows: losses and correct predictions."""

    def __init__(self) -> None:
        # Target count, loss sum, correct targets; then pair count and correct pairs.
        self.sums = torch.zeros(5, dtype=torch.float64)

    @torch.no_grad()
    def add(self, decoder: Decoder, batch: Batch, folder: Path, dtype: str) -> None:
        """Add a row, or this rank's shard of it."""
        hidden_NM, targets_N = hidden_states(decoder, batch).flatten(0, 1), batch.targets.flatten()
        # Split the masked tokens: full [N, V] logits in float32 would not fit for a large vocabulary.
        for target_indices in (targets_N != IGNORED_TARGET).nonzero().flatten().split(_MAX_LOGIT_ROWS):
            logits_cV = decoder.logits(hidden_NM[target_indices][None])[0].float()
            nll_c = torch.nn.functional.cross_entropy(logits_cV, targets_N[target_indices], reduction="none")
            check_finite(nll_c.cpu(), folder, "a row", dtype)
            right = int((logits_cV.argmax(1) == targets_N[target_indices]).sum())
            self.sums[:3] += torch.tensor(
                [len(target_indices), float(nll_c.double().sum()), right], dtype=torch.float64
            )
        if decoder.pair_head is None or batch.labels is None:
            return
        labels_N = batch.labels.flatten()
        # Only a pair's first token carries the pair's target.
        label_indices = (labels_N != IGNORED_TARGET).nonzero().flatten()
        predicted_F = decoder.pair_head(hidden_NM[label_indices]).argmax(1)
        self.sums[3:] += torch.tensor(
            [len(label_indices), int((predicted_F == labels_N[label_indices]).sum())], dtype=torch.float64
        )

    def over_ranks(self) -> Tensor:
        """Return the sums over all ranks. Collective."""
        return sum_over_ranks(self.sums)


def _open(options: MaskedOptions) -> ModelSource:
    """Open an encoder; raise ConfigError if it is not one, or lacks a required pair head."""
    model_source = open_model(options.checkpoint, None)
    if model_source.model.image.is_used:
        raise ConfigError(
            f"--tasks {','.join(options.tasks)} need a model of texts, and {options.checkpoint} reads images "
            "(model.image).\nUse --tasks classes, pixels or probe."
        )
    if model_source.model.causal or model_source.model.encoder_layers:
        raise ConfigError(
            f"--tasks {','.join(options.tasks)} need a bidirectional model (model.causal=false), and "
            f"{options.checkpoint} generates text. `evaluate --list` lists its tasks."
        )
    if PAIRS in options.tasks and model_source.model.pair_head == "none":
        raise ConfigError(
            f"--tasks {PAIRS} needs a pair head, and {options.checkpoint} has model.pair_head=none. Use --tasks "
            f"{MASKED}."
        )
    return model_source


def _loader(options: MaskedOptions, model_source: ModelSource, mesh: Mesh) -> ValidationLoader:
    """Build the loader for held-out rows, one per micro-batch."""
    # Row length and mask follow the checkpoint's run, if its config is available.
    data: dict[str, Any] = {}
    run = run_of(model_source.folder)
    if run is not None and (run / CONFIG_FILE).is_file():
        data = read_toml(run / CONFIG_FILE, str(run / CONFIG_FILE)).get("data", {})
    shards = _text(options, model_source, run)
    check_checkpoint_tokenizer(model_source.folder, shards)
    check_outputs(shards, model_source.model.head_rows)
    seq_len = options.seq_len or data.get("seq_len") or min(_ROW_TOKENS, model_source.model.max_positions)
    limit = model_source.model.max_positions
    hint = f"Use --lengths {limit} or less"
    allow_longer = options.beyond_positions
    check_positions(model_source.model, seq_len, request=f"rows of {seq_len}", hint=hint, allow_longer=allow_longer)
    examples = None
    if model_source.model.pair_head != "none":
        _check_row(seq_len, _LEAST_SEGMENTS, "two segments and the three tokens around them")
        examples = SegmentRule(model_source.model.pair_head)
    return build_validation_loader(
        shards,
        seq_len=seq_len,
        max_rows=options.rows,
        data_rank=mesh.data_rank,
        data_degree=mesh.data,
        mask=MaskRule(data.get("mask_rate", MaskRule.rate), data.get("mask_whole_words", False)),
        packing=Packing(examples=examples),
    )


def _check_row(seq_len: int, least: int, required_tokens: str) -> None:
    """Raise ConfigError if a row is too short for its required tokens."""
    if seq_len < least:
        raise ConfigError(
            f"--lengths {seq_len}: a row needs at least {least} tokens, {required_tokens}. Use {least} or more; "
            "without the option, rows are as long as in training."
        )


def _text(options: MaskedOptions, model_source: ModelSource, run: Path | None) -> ShardSet:
    """Return the named text folder, by default the held-out split from the checkpoint's run."""
    found = held_out_shards(options.text, run, option="--haystack")
    if found is not None:
        return found
    raise ConfigError(
        f"--tasks {','.join(options.tasks)} needs held-out texts, and {model_source.folder} is not in a run with an "
        "available validation folder.\nName a shard folder: --haystack FOLDER"
    )


def _write(options: MaskedOptions, model_source: ModelSource, loader: ValidationLoader, sums: Tensor) -> dict[str, Any]:
    """Write the scores and return them."""
    targets, loss, right, pairs, right_pairs = sums.tolist()
    scores: dict[str, Any] = {"model": model_source.name, "rows": loader.num_rows, "row_tokens": loader.seq_len}
    if targets:
        scores |= {"masked_tokens": int(targets), "loss": loss / targets, "accuracy": right / targets}
    if pairs:
        overlap = word_overlap_accuracy(loader)
        scores |= {"pairs": int(pairs), "pair_accuracy": right_pairs / pairs, "word_overlap_accuracy": overlap}
    options.output.mkdir(parents=True, exist_ok=True)
    write_synced(options.output / SCORES, json.dumps(scores, indent=2).encode() + b"\n")
    return scores


def word_overlap_accuracy(loader: ValidationLoader) -> float:
    """Return the accuracy of the best threshold on common tokens for classifying pairs, over full unmasked rows."""
    shares, labels = [], []
    for row in range(loader.num_rows):
        for tokens, second, order in loader.segments(row):
            first_words, second_words = set(tokens[:second].tolist()), set(tokens[second:].tolist())
            # Share of the second segment's distinct tokens that the first segment contains.
            shares.append(len(first_words & second_words) / max(1, len(second_words)))
            labels.append(order)
    together = np.array(labels)[np.argsort(shares, kind="stable")] == 0
    # For each cut, classify all pairs after it as belonging together, and all before it as separate.
    right = np.concatenate([[0], np.cumsum(~together)]) + np.concatenate([np.cumsum(together[::-1])[::-1], [0]])
    # A cut must not separate ties.
    ordered = np.sort(shares)
    may_cut = np.concatenate([[True], ordered[1:] != ordered[:-1], [True]])
    return float(right[may_cut].max() / max(1, len(labels)))
