"""``evaluate --tasks probe``: how well a linear classifier reads the classes from each layer of a frozen image model.

An image's features are the mean over its tokens after each block, and after the last norm. A classifier per layer is
fitted on one folder and measured on another.

Axes: F images of a batch, T tokens of an image, N images of a folder, M width of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data_pipeline.shards.reader import ShardSet
from launcher.evaluation.computation import Computation
from launcher.evaluation.evaluation_run import Progress, Update
from launcher.evaluation.image_evaluation import DATA, check_limit, write_scores
from launcher.evaluation.image_folder import (
    ImageBatches,
    check_shards,
    choose_images,
    find_image_model,
    labels_of,
    open_image_model,
    open_shards,
)
from launcher.evaluation.inference_model import build_decoder, check_finite
from launcher.evaluation.model_source import ModelSource
from launcher.evaluation.rank_setup import build_mesh, joined_ranks
from longctx.batch import Stream
from longctx.errors import ConfigError
from longctx.evaluation.linear_probe import fit_probe
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.decoder import Decoder
from longctx.model.image_stages import ImageHidden, ImageStages
from longctx.model.stack import Stack
from longctx.objectives.routed_task import hidden_states
from parallel.comm.world import num_ranks

PROBE = "probe"
FIT_DATA = "--fit-data"
_REQUEST = f"--tasks {PROBE}"


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(Computation):
    """Options for the task ``probe``."""

    checkpoint: Path
    output: Path
    data: str | None = None
    """Shard folder or its URL, on which the accuracy is measured; by default the checkpoint run's held-out split."""
    fit_data: str | None = None
    """Shard folder or its URL, on which the classifiers are fitted."""
    limit: int | None = None
    """Maximum images to read from each folder; all if unset."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limit(self.limit)
        if self.fit_data is None:
            raise ConfigError(
                f"{_REQUEST} fits classifiers on one folder and measures them on another. Name the first one: "
                f"{FIT_DATA} FOLDER"
            )


def probe_layers(options: ProbeOptions, progress: Progress) -> dict[str, Any]:
    """Fit and measure a classifier per layer in this process; return the accuracies.

    Raise ConfigError over several ranks, and for folders that do not fit the model or each other.
    """
    with joined_ranks(options) as device:
        if num_ranks() > 1:
            raise ConfigError(
                f"{_REQUEST} runs on one rank, and {num_ranks()} were started: the classifiers are fitted in one "
                "process. Leave out --ranks and --hostfile."
            )
        model_source, folders = _open(options)
        mesh = build_mesh(model_source.model, context=options.context, expert=options.expert)
        decoder = build_decoder(model_source, mesh, getattr(torch, options.dtype), device)
        batches = [
            ImageBatches(
                shards=shards,
                model=model_source.model,
                mesh=mesh,
                numbers=choose_images(shards, options.limit),
                chunk_tokens=options.chunk_tokens,
            )
            for shards in folders
        ]
        with progress("reading images", sum(of_one.num_tokens for of_one in batches)) as update:
            found = _read(decoder, batches, model_source.folder, device, update)
        with progress("fitting classifiers"):
            layers = list(_fit_layers(found, folders[0], batches, device))
        return _write(options, model_source, batches, layers)


def _open(options: ProbeOptions) -> tuple[ModelSource, tuple[ShardSet, ShardSet]]:
    """Open the model, and the folders to fit and to measure on; raise ConfigError if they do not fit each other."""
    folder = find_image_model(options.checkpoint, _REQUEST)
    fit = open_shards(options.fit_data, folder, option=FIT_DATA, request=_REQUEST)
    shards = open_shards(options.data, folder, option=DATA, request=_REQUEST)
    model_source = open_image_model(folder, shards)
    for option, of_option in ((FIT_DATA, fit), (DATA, shards)):
        check_shards(model_source, of_option, option=option)
        if not of_option.image_format.classes:
            raise ConfigError(
                f"the images in {option} {of_option.folder} have no labels. Build them from folders by class, or with "
                "--label-field."
            )
    fit_classes, classes = fit.image_format.classes, shards.image_format.classes
    if fit_classes != classes:
        raise ConfigError(
            f"{FIT_DATA} {fit.folder} has {len(fit_classes)} classes ({_shown(fit_classes)}), and {DATA} "
            f"{shards.folder} {len(classes)} ({_shown(classes)}).\nBuild one with the classes of the other: longctx "
            f"data build --kind images --tokenizer {fit.folder} --source … --output …"
        )
    if fit.manifest.hash == shards.manifest.hash:
        raise ConfigError(
            f"{FIT_DATA} and {DATA} are the same images ({fit.folder}), so the accuracy would be that of the fit. Name "
            "a held-out folder: --data FOLDER"
        )
    return model_source, (fit, shards)


def _shown(classes: tuple[str, ...]) -> str:
    return ", ".join(classes[:4]) + (", …" if len(classes) > 4 else "")


@torch.no_grad()
def _read(
    decoder: Decoder, batches: list[ImageBatches], folder: Path, device: torch.device, update: Update
) -> list[list[Tensor]]:
    """Return the features [N, M] per folder and layer, float32 on the CPU."""
    found, done, dtype = [], 0, str(decoder.model.dtype).removeprefix("torch.")
    for of_one in batches:
        parts: list[list[Tensor]] = []
        for share in of_one:
            features = layer_features(decoder, share.stream(device))
            # The last layer has read all others.
            check_finite(features[-1].flatten().cpu(), folder, "a batch of images", dtype)
            parts.append([features_FM.float().cpu() for features_FM in features])
            done += share.documents.num_tokens
            update(done)
        found.append([torch.cat(of_layer) for of_layer in zip(*parts, strict=True)])
    return found


def layer_features(decoder: Decoder, stream: Stream) -> list[Tensor]:
    """Return the mean hidden states [F, M] of complete images after each block, and after the last norm if any."""
    with _block_outputs(decoder) as outputs:
        found: Any = hidden_states(decoder, stream)
    images = stream.documents.num_documents
    stack = _stacks(decoder)[-1]
    if stack.norm is not None:
        outputs.append(found.hidden_BtM if isinstance(found, ImageHidden) else found)
    return [_mean_by_image(hidden_BtM, images) for hidden_BtM in outputs]


# Hooks leave the model as it is: no pass but this one returns its layers, and all kinds of layers, shared ones and
# stages are read in the same way.
@contextmanager
def _block_outputs(decoder: Decoder) -> Iterator[list[Tensor]]:
    """Collect the blocks' outputs [B, t, M] within the ``with`` block, in the order of the layers."""
    outputs: list[Tensor] = []

    def keep(_block: nn.Module, _given: Any, output: Any) -> None:
        # A block returns its router's statistics too.
        outputs.append(output[0])

    handles = [block.register_forward_hook(keep) for stack in _stacks(decoder) for block in stack.layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _stacks(decoder: Decoder) -> list[Stack]:
    model: Any = decoder.model
    if isinstance(model, ImageStages):
        return list(model.stages)  # pyright: ignore[reportReturnType]
    return [model]


def _mean_by_image(hidden_BtM: Tensor, images: int) -> Tensor:
    """Return the mean over each image's tokens, which are consecutive in every order."""
    hidden_FTM = hidden_BtM.flatten(0, 1).unflatten(0, (images, -1))
    return hidden_FTM.to(accumulate_dtype(hidden_FTM.dtype)).mean(1)


def _fit_layers(
    found: list[list[Tensor]], fit: ShardSet, batches: list[ImageBatches], device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield each layer's name and accuracies."""
    fit_labels_N, labels_N = (
        torch.from_numpy(labels_of(of_one.shards, of_one.numbers)).to(device) for of_one in batches
    )
    num_classes, num_layers = len(fit.image_format.classes), batches[0].model.num_layers
    for number, (fit_NM, measured_NM) in enumerate(zip(*found, strict=True)):
        probe = fit_probe(fit_NM.to(device), fit_labels_N, num_classes)
        yield {
            "layer": f"block {number + 1}" if number < num_layers else "last norm",
            "accuracy": probe.accuracy(measured_NM.to(device), labels_N),
            "fit_accuracy": probe.accuracy(fit_NM.to(device), fit_labels_N),
        }


def _write(
    options: ProbeOptions, model_source: ModelSource, batches: list[ImageBatches], layers: list[dict[str, Any]]
) -> dict[str, Any]:
    """Write the accuracies and return them."""
    fit, measured = batches
    best = layers[int(np.argmax([layer["accuracy"] for layer in layers]))]
    scores = {
        "model": model_source.name,
        "data": str(measured.shards.folder),
        "images": len(measured.numbers),
        "fit_data": str(fit.shards.folder),
        "fit_images": len(fit.numbers),
        "best_layer": best["layer"],
        "best_accuracy": best["accuracy"],
        "layers": layers,
    }
    write_scores(options.output, PROBE, scores)
    return scores
