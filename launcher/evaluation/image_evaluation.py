"""``evaluate --tasks classes`` and ``--tasks pixels``: score a model of images on a folder of images.

Each image is read once, in the middle of its folder's format and without augmentation. Losses and counts are sums over
images, so they do not depend on ranks or batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_pipeline.rows.row_reader import masking_of
from data_pipeline.rows.token_masking import Masking, MaskRule
from data_pipeline.shards.reader import ShardSet
from launcher.evaluation.computation import Computation
from launcher.evaluation.evaluation_run import Progress, no_progress
from launcher.evaluation.image_folder import (
    ImageBatches,
    check_classes,
    check_shards,
    choose_images,
    find_image_model,
    labels_of,
    open_image_model,
    open_shards,
)
from launcher.evaluation.inference_model import build_decoder, check_finite
from launcher.evaluation.model_source import ModelSource, open_reader, run_of
from launcher.evaluation.rank_setup import build_mesh, joined_ranks
from launcher.run_folder import CONFIG_FILE
from longctx.batch import IGNORED_TARGET, Batch, Stream, with_targets
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.files import read_toml, write_synced
from longctx.model.decoder import Decoder
from longctx.objectives.build import Objective, build_objective
from longctx.objectives.document_labels import LabelledDocuments, ReduceSums, label_logits
from longctx.objectives.routed_task import hidden_states
from longctx.objectives.task import Task
from parallel.comm.world import gather_objects, on_every_rank, on_rank_0, own_rank, sum_over_ranks
from parallel.document_sums import document_sum
from parallel.mesh import Mesh

CLASSES, PIXELS = "classes", "pixels"
DATA = "--data"
"""Option with the folder of images."""
_TOP = 5
_SHOWN_CONFUSIONS = 5


@dataclass(frozen=True, kw_only=True)
class ImageEvaluationOptions(Computation):
    """Options for the tasks ``classes`` and ``pixels``."""

    checkpoint: Path
    output: Path
    task: str
    data: str | None = None
    """Shard folder or its URL; by default the checkpoint run's held-out split."""
    limit: int | None = None
    """Maximum images to read, at equal distances in the folder; all if unset."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limit(self.limit)


def check_limit(limit: int | None) -> None:
    """Raise ConfigError for a limit below one image."""
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit} must be at least 1; without the option, every image is read.")


def scores_file(task: str) -> str:
    """Return the name of a task's file in the output folder."""
    return f"{task}.json"


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """Model and images that passed all checks."""

    model_source: ModelSource
    shards: ShardSet
    numbers: np.ndarray
    masking: Masking | None
    class_names: tuple[str, ...]


def evaluate_images(options: ImageEvaluationOptions, progress: Progress) -> dict[str, Any]:
    """Evaluate on the ranks that a launcher started, or in this process; return the scores on rank 0. Collective.

    Raise ConfigError if the task does not fit the model, or the images do not.
    """
    with joined_ranks(options) as device:
        opened = on_every_rank(lambda: _open(options))
        model = opened.model_source.model
        mesh = build_mesh(model, context=options.context, expert=options.expert)
        decoder = build_decoder(opened.model_source, mesh, getattr(torch, options.dtype), device)
        scores: ClassScores | PixelScores
        if options.task == CLASSES:
            scores = ClassScores(decoder, document_sum(mesh), opened.class_names)
        else:
            scores = PixelScores(decoder)
        batches = ImageBatches(
            shards=opened.shards,
            model=model,
            mesh=mesh,
            numbers=opened.numbers,
            chunk_tokens=options.chunk_tokens,
            has_labels=options.task == CLASSES,
            masking=opened.masking,
        )
        bar = progress if own_rank() == 0 else no_progress
        with bar("evaluating", batches.num_tokens) as update:
            _score(scores, batches, mesh, options, opened.model_source.folder, device, update)
        found = scores.over_ranks()
        return on_rank_0(lambda: _write(options, opened, found))


def _score(
    scores: ClassScores | PixelScores,
    batches: ImageBatches,
    mesh: Mesh,
    options: ImageEvaluationOptions,
    folder: Path,
    device: torch.device,
    update: Any,
) -> None:
    done = 0
    for share in batches:
        nll_N = scores.add(share.unpack(device, scores.prepare))
        check_finite(nll_N.cpu(), folder, "a batch of images", options.dtype)
        # Data ranks take batches in turn: one local batch stands for ``mesh.data`` batches of progress.
        done += mesh.data * share.documents.num_tokens
        update(min(done, batches.num_tokens))


class ClassScores:
    """Running sums over images of a class head's predictions."""

    def __init__(self, decoder: Decoder, reduce_sums: ReduceSums, names: Sequence[str]) -> None:
        """``reduce_sums`` serves document means; ``names`` are the classes' names."""
        self._decoder, self._names = decoder, names
        self._reduce_sums = reduce_sums if decoder.config.class_pool == "mean" else None
        # Image count, loss sum, correct first predictions, classes among the first five.
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._wrong: list[Tensor] = []
        """Class and prediction of images with a wrong one, [wrong, 2] each."""

    def prepare(self, stream: Stream) -> Batch:
        """Build the batch with classes as targets."""
        assert stream.labels is not None, "images were read without their classes"
        return with_targets(stream, stream.labels)

    @torch.no_grad()
    def add(self, batch: Batch) -> Tensor:
        """Add a batch's images, or those with their first token on this rank; return their losses [F]. Collective."""
        decoder, documents = self._decoder, LabelledDocuments.of(batch)
        hidden = hidden_states(decoder, batch)
        logits_FC = label_logits(decoder, decoder.class_head, hidden, batch, documents, self._reduce_sums)
        labels_F, predicted_F = documents.labels_F, logits_FC.argmax(1)
        nll_F = torch.nn.functional.cross_entropy(logits_FC, labels_F, reduction="none")
        first_Fk = logits_FC.topk(min(_TOP, logits_FC.shape[1]), dim=1).indices
        is_right_F = predicted_F == labels_F
        sums = (len(labels_F), nll_F.double().sum(), is_right_F.sum(), (first_Fk == labels_F[:, None]).sum())
        self._sums += torch.tensor([float(number) for number in sums], dtype=torch.float64)
        self._wrong.append(torch.stack([labels_F, predicted_F], 1)[~is_right_F].cpu())
        return nll_F

    def over_ranks(self) -> dict[str, Any]:
        """Return the scores over all ranks. Collective."""
        images, nll, right, among_first = sum_over_ranks(self._sums).tolist()
        wrong = np.concatenate(gather_objects(torch.cat([torch.empty(0, 2, dtype=torch.int64), *self._wrong]).numpy()))
        return {
            "images": int(images),
            "nll": nll / images,
            "accuracy": right / images,
            "top_5_accuracy": among_first / images,
            "confusions": list(self._confusions(wrong)),
        }

    def _confusions(self, wrong: np.ndarray) -> Iterator[dict[str, Any]]:
        """Yield the most frequent pairs of class and wrong prediction [wrong, 2]; by label order if equal."""
        pairs, counts = np.unique(wrong, axis=0, return_counts=True)
        for number in np.argsort(-counts, kind="stable")[:_SHOWN_CONFUSIONS].tolist():
            label, predicted = pairs[number].tolist()
            yield {
                "class": self._names[label],
                "predicted": self._names[predicted],
                "images": int(counts[number]),
            }


class PixelScores:
    """Running sums over predicted colors, and how often each occurs."""

    def __init__(self, decoder: Decoder) -> None:
        objective = "causal" if decoder.config.causal else "masked"
        self._task: Task = build_objective(decoder, Objective(objective))
        self.prepare = self._task.prepare
        self._is_masked = not decoder.config.causal
        self._nll = torch.zeros(1, dtype=torch.float64)
        self._counts = torch.zeros(decoder.config.vocab_size, dtype=torch.int64)

    def add(self, batch: Batch) -> Tensor:
        """Add a batch's predicted colors, or those of this rank; return the tokens' losses [N]."""
        nll_N = self._task.token_nll(batch).flatten()
        targets_N = batch.targets.flatten()
        self._nll += float(nll_N.double().sum())
        self._counts += torch.bincount(targets_N[targets_N != IGNORED_TARGET].cpu(), minlength=len(self._counts))
        return nll_N

    def over_ranks(self) -> dict[str, Any]:
        """Return the scores over all ranks. Collective."""
        nll, counts = float(sum_over_ranks(self._nll)), sum_over_ranks(self._counts).double()
        total = float(counts.sum())
        name = "masked_pixels" if self._is_masked else "pixels"
        if not total:
            raise ConfigError(
                "no pixel of these images is masked, so there is no loss. Read more images: raise --limit."
            )
        shares = counts[counts > 0] / total
        return {
            name: int(total),
            "bits_per_pixel": nll / math.log(2) / total,
            "unigram_bits_per_pixel": abs(float((shares * shares.log2()).sum())),
        }


def _open(options: ImageEvaluationOptions) -> _Opened:
    """Open model and images; raise ConfigError if they do not fit the task or each other."""
    request = f"--tasks {options.task}"
    folder = find_image_model(options.checkpoint, request)
    _, model, _ = open_reader(folder)
    (_check_class_head if options.task == CLASSES else _check_colors)(model, folder)
    shards = open_shards(options.data, folder, option=DATA, request=request)
    model_source = open_image_model(folder, shards)
    check_shards(model_source, shards, option=DATA)
    numbers, class_names, masking = choose_images(shards, options.limit), tuple[str, ...](), None
    if options.task == CLASSES:
        class_names = check_classes(model_source, shards, option=DATA)
        labels_of(shards, numbers)
    elif not model.causal:
        masking = masking_of(_mask_rule(folder), [shards], seed=0)
    return _Opened(model_source=model_source, shards=shards, numbers=numbers, masking=masking, class_names=class_names)


def _check_class_head(model: ModelConfig, folder: Path) -> None:
    if not model.classes:
        others = "Use --tasks probe, which fits a classifier on the model's features"
        if not model.image.patch:
            others += ", or --tasks pixels"
        raise ConfigError(f"--tasks classes needs a class head, and {folder} has none (model.classes=0).\n{others}.")


def _check_colors(model: ModelConfig, folder: Path) -> None:
    others = "Use --tasks probe"
    if model.classes:
        others = "Use --tasks classes or --tasks probe"
    if model.image.patch:
        raise ConfigError(
            f"--tasks pixels needs a model that predicts colors, and {folder} reads patches "
            f"(model.image.patch={model.image.patch}).\n{others}."
        )
    if not model.predicts_tokens:
        raise ConfigError(
            f"--tasks pixels needs a model that predicts colors, and {folder} has no token head "
            f"(model.token_head=false).\n{others}."
        )


def _mask_rule(folder: Path) -> MaskRule:
    """Return the mask rule of the checkpoint's run, if its config is available."""
    run = run_of(folder)
    if run is None or not (run / CONFIG_FILE).is_file():
        return MaskRule()
    data = read_toml(run / CONFIG_FILE, str(run / CONFIG_FILE)).get("data", {})
    return MaskRule(data.get("mask_rate", MaskRule.rate))


def _write(options: ImageEvaluationOptions, opened: _Opened, found: dict[str, Any]) -> dict[str, Any]:
    """Write the scores and return them."""
    scores: dict[str, Any] = {"model": opened.model_source.name, "data": str(opened.shards.folder)}
    if options.task == PIXELS:
        scores["images"] = len(opened.numbers)
    scores |= found
    write_scores(options.output, options.task, scores)
    return scores


def write_scores(output: Path, task: str, scores: dict[str, Any]) -> None:
    """Write a task's scores into the output folder."""
    output.mkdir(parents=True, exist_ok=True)
    content = json.dumps(scores, indent=2, ensure_ascii=False)
    write_synced(output / scores_file(task), f"{content}\n".encode())
