"""Folders of images for a model: checks that they fit each other, and the images as batches over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.rows.images import ImageRule
from data_pipeline.rows.pack import Packing, Row
from data_pipeline.rows.row_batches import Share
from data_pipeline.rows.row_reader import RowReader, reader_options_for
from data_pipeline.rows.token_masking import Masking
from data_pipeline.shards.reader import ShardSet
from launcher.evaluation.evaluated_model import held_out_shards
from launcher.evaluation.inference_model import LAYOUT
from launcher.evaluation.model_source import ModelSource, open_reader, run_of
from longctx.batch import PackedDocuments
from longctx.compact_batch import CompactBatch
from longctx.config import ModelConfig
from longctx.errors import ConfigError, DataError
from longctx.generation.load_decoder import find_model
from longctx.images.image_format import ImageFormat
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.image_tokenizer import ImageTokenizer
from longctx.tokenizer.load_tokenizer import has_tokenizer
from parallel.layout.sequence import SequenceLayout, num_parts
from parallel.mesh import Mesh

_REBUILD = "longctx data build --kind images --tokenizer {} --source … --output …"


def open_shards(named: str | None, checkpoint: Path, *, option: str, request: str) -> ShardSet:
    """Open the folder of images ``named`` by ``option``, by default the held-out one of the checkpoint's run.

    Raise ConfigError without either, and for a folder of texts.
    """
    shards = held_out_shards(named, run_of(checkpoint), option=option)
    if shards is None:
        raise ConfigError(
            f"{request} needs images, and {checkpoint} is not in a run with an available validation folder.\n"
            f"Name a shard folder: {option} FOLDER"
        )
    if not shards.is_images:
        raise ConfigError(
            f"{option} {shards.folder} contains texts, and {request} needs images. Build some with `longctx data build "
            "--kind images --source …`."
        )
    if not shards.num_documents:
        raise DataError(f"{option} {shards.folder} contains no images. Build it again from a source with images.")
    return shards


def find_image_model(checkpoint: Path, request: str) -> Path:
    """Return the folder of a model that reads images; raise ConfigError if it reads texts."""
    folder = find_model(checkpoint)
    _, model, _ = open_reader(folder)
    if not model.image.is_used:
        raise ConfigError(
            f"{request} needs a model of images, and {folder} reads texts (model.image.height=0).\n"
            "`longctx evaluate --list` lists the tasks for texts."
        )
    return folder


def open_image_model(folder: Path, shards: ShardSet) -> ModelSource:
    """Open a model of images with its image format, by default the shards' if its folder has none."""
    reader, model, fingerprint = open_reader(folder)
    tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else shards.tokenizer()
    return ModelSource(folder=folder, reader=reader, model=model, fingerprint=fingerprint, tokenizer=tokenizer)


def image_format_of(model_source: ModelSource) -> ImageFormat:
    """Return a model's image format; raise ConfigError if its tokenizer is one of texts."""
    tokenizer = model_source.tokenizer
    if not isinstance(tokenizer, ImageTokenizer):
        raise ConfigError(
            f"{tokenizer.path} is a tokenizer of texts, and {model_source.folder} reads images. Name a folder of "
            "images, or its image.json: --tokenizer FOLDER"
        )
    return tokenizer.format


def image_rule(model: ModelConfig, *, has_labels: bool = False) -> ImageRule:
    """Return the rule by which a model was trained to read images, without augmentation."""
    image = model.image
    return ImageRule(
        height=image.height,
        width=image.width,
        channels=image.channels,
        patch=image.patch,
        class_token=image.class_token,
        # The objective is the causal one exactly if a causal model has a token head.
        begin=not image.patch and model.causal and model.predicts_tokens,
        augment=False,
        has_labels=has_labels,
    )


def check_shards(model_source: ModelSource, shards: ShardSet, *, option: str) -> None:
    """Raise ConfigError unless the folder's images have the model's kind, channels, size and palette."""
    model, stored, own = model_source.model, shards.image_format, image_format_of(model_source)
    image, where, folder = model.image, f"{option} {shards.folder}", model_source.folder
    if bool(stored.palette) == bool(image.patch):
        holds, reads, how = "pixel values", "colors of a palette (model.image.patch=0)", _REBUILD.format(folder)
        if stored.palette:
            holds, reads = f"colors of a palette of {stored.num_colors}", f"patches (model.image.patch={image.patch})"
            how = "longctx data build --kind images --source … --output …, without --palette"
        raise ConfigError(f"{where} holds {holds}, and {folder} reads {reads}.\nBuild the data again: {how}")
    if stored.channels != image.channels:
        raise ConfigError(
            f"the images in {where} have {_channels(stored.channels)}, and {folder} reads {_channels(image.channels)}."
            f"\nBuild the data again with --channels {image.channels}."
        )
    if stored.height < image.height or stored.width < image.width:
        raise ConfigError(
            f"the images in {where} have {stored.height} × {stored.width} pixels, and {folder} reads "
            f"{image.height} × {image.width}.\nBuild the data again with --image-size {image.height}x{image.width}."
        )
    if stored.palette != own.palette or stored.num_colors >= model.vocab_size > 0:
        raise ConfigError(
            f"{where} has another palette ({stored.num_colors} colors) than {folder} ({own.num_colors}): ids would "
            f"be other colors.\nBuild the data again: {_REBUILD.format(folder)}"
        )


def check_classes(model_source: ModelSource, shards: ShardSet, *, option: str) -> tuple[str, ...]:
    """Return the class names. Raise ConfigError unless the folder's classes are those of the model's class head."""
    model, own, found = model_source.model, image_format_of(model_source).classes, shards.image_format.classes
    where, folder = f"{option} {shards.folder}", model_source.folder
    if not found:
        raise ConfigError(
            f"the images in {where} have no labels. Build them from folders by class, or with --label-field."
        )
    if len(found) != model.classes:
        raise ConfigError(
            f"the images in {where} have {len(found)} classes, and the class head of {folder} has {model.classes} "
            f"(model.classes).\nBuild the data again with the model's classes: {_REBUILD.format(folder)}"
        )
    if len(own) == len(found) and own != found:
        number = next(number for number, names in enumerate(zip(own, found, strict=True)) if names[0] != names[1])
        raise ConfigError(
            f"class {number} is {found[number]!r} in {where}, and {own[number]!r} in {folder}.\n"
            f"Build the data again with the model's classes: {_REBUILD.format(folder)}"
        )
    return found


def choose_images(shards: ShardSet, limit: int | None) -> np.ndarray:
    """Return the numbers of ``limit`` images at equal distances, int64; all if unset.

    A folder may be ordered by class, so its first images may be all of one class.
    """
    total = shards.num_documents
    count = total if limit is None else min(limit, total)
    return np.arange(count) * total // count


def labels_of(shards: ShardSet, numbers: np.ndarray) -> np.ndarray:
    """Return these images' classes, int64; raise DataError for a label beyond the folder's classes."""
    labels = np.array([shards.label(number) for number in numbers.tolist()], np.int64)
    num_classes = len(shards.image_format.classes)
    for number, label in zip(numbers.tolist(), labels.tolist(), strict=True):
        if not 0 <= label < num_classes:
            raise DataError(
                f"{shards.folder}: image {number} ({shards.name(number)}) has label {label}, beyond the folder's "
                f"{num_classes} classes.\nRun `longctx data verify {shards.folder}`, and build the folder again."
            )
    return labels


@dataclass(frozen=True, kw_only=True)
class ImageBatches:
    """Images of a folder in a fixed order, as batches of complete images; data ranks take batches in turn."""

    shards: ShardSet
    model: ModelConfig
    mesh: Mesh
    numbers: np.ndarray
    """Images to read."""
    chunk_tokens: int
    """Tokens per batch, over the ranks that share it; an image is never cut."""
    has_labels: bool = False
    masking: Masking | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens over all batches and ranks."""
        return len(self.numbers) * self.model.image.num_tokens

    def __iter__(self) -> Iterator[CompactBatch]:
        """Yield this rank's portion of each of its batches. Groups of ranks may get different numbers of batches."""
        tokens = self.model.image.num_tokens
        rule = image_rule(self.model, has_labels=self.has_labels)
        recipe = reader_options_for([self.shards], Packing(examples=rule), tokens, 0, seed=0)
        reader = RowReader(self.shards, tokens, self.masking, **recipe)
        each = max(1, self.chunk_tokens // tokens)
        starts = range(0, len(self.numbers), each)
        for start in starts[self.mesh.data_rank :: self.mesh.data]:
            # A row per image: rows are concatenated before they are split over ranks.
            images: Sequence[int] = self.numbers[start : start + each].tolist()
            stored = self.shards.image_format.num_tokens
            rows = [Row([image], [0], [stored]) for image in images]
            yield reader.share(rows, self._share)[0]

    def _share(self, documents: PackedDocuments) -> Share:
        """Return this rank's shard of a batch's tokens."""
        mesh = self.mesh
        if mesh.context == 1:
            return Share(documents, [(0, documents.num_tokens, 1)], None)
        # Ranks get equal shards, and windows need complete images, of padding too.
        unit = num_parts(LAYOUT, mesh.context)
        if self.model.image.window:
            unit = math.lcm(unit, self.model.image.num_tokens)
        padded = documents.padded(-(-documents.num_tokens // unit) * unit)
        layout = SequenceLayout.build(LAYOUT, padded.num_tokens, mesh.context, padded, causal=self.model.causal)
        return Share(padded, layout.rank_runs(mesh.context_rank), layout)


def _channels(count: int) -> str:
    return "1 channel (grey)" if count == 1 else f"{count} channels (color)"
