"""``generate --image``: continue a picture below its upper rows, with a model that predicts colors (Image GPT).

The model reads the begin token and the given rows, then predicts pixel by pixel in reading order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from data_pipeline.prepare.images.contact_sheet import draw_sheet
from data_pipeline.prepare.images.decode_image import decode_image, fit_image
from data_pipeline.prepare.source_items import FileContentError
from launcher.evaluation.computation import Computation
from launcher.evaluation.evaluation_run import Progress, Update, no_progress
from launcher.evaluation.image_folder import find_image_model, image_format_of, open_shards
from launcher.evaluation.inference_model import build_decoder
from launcher.evaluation.model_source import ModelSource, open_model
from launcher.evaluation.rank_setup import build_mesh, joined_ranks
from launcher.generation.generation_options import check_new_file
from longctx.errors import ConfigError
from longctx.files import write_atomically
from longctx.generation.continuation import GenerationOptions
from longctx.generation.loop import stream
from longctx.generation.penalties import Penalties
from longctx.generation.sampling import Greedy, Sampling
from longctx.images.image_format import ImageFormat
from longctx.model.decoder import Decoder
from parallel.comm.world import on_every_rank, on_rank_0, own_rank

_NOT_GIVEN = 128
"""Grey for the rows that the model does not see."""


@dataclass(frozen=True, kw_only=True)
class ImageGenerationOptions(Computation):
    """Options for continuing one picture."""

    checkpoint: Path
    output: Path
    """PNG file to write."""
    image: Path | None = None
    """Picture in a file, or in the shard folder ``data`` the image with the number ``image_number``."""
    data: str | None = None
    image_number: int | None = None
    image_rows: int | None = None
    """Rows that the model sees; by default the upper half."""
    samples: int = 1
    strategy: Greedy | Sampling = field(default_factory=Greedy)
    """Sample n takes the seed plus n."""
    penalties: Penalties = field(default_factory=Penalties)
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.image is None) == (self.data is None):
            raise ConfigError("give one picture: --image FILE.png, or --data FOLDER --image-number K.")
        if self.image_number is not None and self.data is None:
            raise ConfigError(f"--image-number {self.image_number} counts the images of --data FOLDER, not --image.")
        if self.samples < 1:
            raise ConfigError(f"--samples {self.samples} must be at least 1.")
        if self.samples > 1 and isinstance(self.strategy, Greedy):
            raise ConfigError(
                f"--samples {self.samples} would all be equal, because the most likely color is chosen each time. Add "
                "--temperature 1, or leave out --samples."
            )
        if self.output.suffix.lower() != ".png":
            raise ConfigError(f"--output {self.output} is written as PNG. Name it {self.output.with_suffix('.png')}.")
        # Check the path now: a long generation must not fail at the end.
        check_new_file(self.output)

    @property
    def name(self) -> str:
        """The picture's name in messages."""
        if self.image is not None:
            return f"--image {self.image}"
        return f"--data {self.data} --image-number {self.image_number or 0}"


def continue_image(options: ImageGenerationOptions, progress: Progress) -> Path:
    """Continue a picture on the ranks that a launcher started, or in this process; return its file. Collective.

    Raise ConfigError if the model does not predict colors, or for a picture that cannot be read.
    """
    with joined_ranks(options) as device:
        model_source = on_every_rank(lambda: _open(options))
        mesh = build_mesh(model_source.model, context=options.context, expert=options.expert)
        if mesh.data > 1:
            raise ConfigError(
                f"parallel.context={mesh.context} on {mesh.world_size} ranks: a single picture would leave the other "
                "ranks idle.\nLeave out --parallel.context."
            )
        # Rank 0 reads the picture: other ranks may not have the file.
        ids = on_rank_0(lambda: _read_colors(options, model_source))
        num_rows = _given_rows(options, model_source)
        decoder = build_decoder(model_source, mesh, getattr(torch, options.dtype), device)
        given = ids[: num_rows * model_source.model.image.width]
        bar = progress if own_rank() == 0 else no_progress
        with bar("predicting pixels", options.samples * (len(ids) - len(given))) as update:
            found = _continuations(options, model_source, decoder, given, update)
        samples = [given + new_ids for new_ids in found]
        return on_rank_0(lambda: _write(options, model_source, num_rows, ids, samples))


def _continuations(
    options: ImageGenerationOptions,
    model_source: ModelSource,
    decoder: Decoder,
    given: list[int],
    update: Update,
) -> list[list[int]]:
    """Return the colors after the given ones, one list per sample."""
    image, found = model_source.model.image, list[list[int]]()
    begin = image_format_of(model_source).num_colors
    request = GenerationOptions(
        max_new_tokens=image.num_tokens - len(given),
        strategy=options.strategy,
        penalties=options.penalties,
        # A padded vocabulary has more ids, and the begin token is never a pixel.
        num_choices=begin,
        chunk_tokens=options.chunk_tokens,
    )
    for number in range(options.samples):
        if isinstance(options.strategy, Sampling):
            request = replace(request, strategy=replace(options.strategy, seed=options.strategy.seed + number))
        new_ids: list[int] = []
        for token in stream(decoder, [begin, *given], request):
            new_ids.append(token)
            update(sum(map(len, found)) + len(new_ids))
        found.append(new_ids)
    return found


def _open(options: ImageGenerationOptions) -> ModelSource:
    """Open a model that predicts colors; raise ConfigError if it does not."""
    folder = find_image_model(options.checkpoint, "generate --image")
    model_source = open_model(folder, options.tokenizer)
    model = model_source.model
    why = ""
    if model.image.patch:
        why = f"it reads patches (model.image.patch={model.image.patch}), which have no colors to predict"
    elif not model.predicts_tokens:
        why = "it has no token head (model.token_head=false)"
    elif not model.causal:
        why = "it predicts masked colors from both sides (model.causal=false)"
    if why:
        raise ConfigError(
            f"{folder} cannot continue a picture: {why}.\nUse a causal model of colors (Image GPT, "
            f"model.image.patch=0), or measure this one: longctx evaluate --tasks {_task_for(model_source)}."
        )
    colors = image_format_of(model_source).num_colors
    if not colors or colors >= model.vocab_size or colors > model.head_rows:
        raise ConfigError(
            f"{model_source.tokenizer.path} has a palette of {colors} colors, and {folder} has "
            f"model.vocab_size={model.vocab_size}. Name a folder of the images it was trained on: --tokenizer FOLDER"
        )
    _given_rows(options, model_source)
    return model_source


def _task_for(model_source: ModelSource) -> str:
    model = model_source.model
    if model.classes:
        return "classes"
    return "probe" if model.image.patch else "pixels"


def _given_rows(options: ImageGenerationOptions, model_source: ModelSource) -> int:
    """Return the number of given rows; raise ConfigError if none are left to draw."""
    height = model_source.model.image.height
    num_rows = height // 2 if options.image_rows is None else options.image_rows
    if not 0 <= num_rows < height:
        raise ConfigError(
            f"--image-rows {num_rows} must be from 0 to {height - 1}, because the model's images have {height} rows. "
            f"Without the option, {height // 2} are given."
        )
    return num_rows


def _read_colors(options: ImageGenerationOptions, model_source: ModelSource) -> list[int]:
    """Return the picture's colors in the model's size, in reading order."""
    image, image_format = model_source.model.image, image_format_of(model_source)
    try:
        pixels = _pixels(options)
        fitted = fit_image(pixels, size=(image.height, image.width), channels=image.channels)
    except FileContentError as error:
        raise ConfigError(f"{options.name} is not a readable picture: {error}. Try a PNG or JPEG file.") from error
    return image_format.quantize(fitted).flatten().tolist()


def _pixels(options: ImageGenerationOptions) -> np.ndarray:
    """Read the picture, uint8 [H, W, C]."""
    if options.image is not None:
        try:
            return decode_image(options.image.read_bytes())
        except OSError as error:
            raise ConfigError(f"--image {options.image} cannot be read ({os.strerror(error.errno or 0)}).") from error
    shards = open_shards(options.data, options.checkpoint, option="--data", request="generate")
    number = options.image_number or 0
    if not 0 <= number < shards.num_documents:
        raise ConfigError(
            f"--image-number {number} must be from 0 to {shards.num_documents - 1}, because {shards.folder} has "
            f"{shards.num_documents} images."
        )
    return shards.image_format.pixels_of(shards.document(number))


def _write(
    options: ImageGenerationOptions,
    model_source: ModelSource,
    num_rows: int,
    original: list[int],
    samples: Sequence[list[int]],
) -> Path:
    """Write the sheet: the original, the given rows, and the samples."""
    image, image_format = model_source.model.image, image_format_of(model_source)
    images = [_drawn(ids, image.height, image_format) for ids in (original, original, *samples)]
    images[1][num_rows:] = _NOT_GIVEN
    names = ["original", f"given: {num_rows} rows"]
    names += [f"sample {number}" if len(samples) > 1 else "continued" for number in range(1, len(samples) + 1)]
    title = f"{model_source.name}: {options.name}"
    write_atomically(options.output, draw_sheet(images, names, title))
    return options.output


def _drawn(ids: Sequence[int], height: int, image_format: ImageFormat) -> np.ndarray:
    """Return an image's pixels from its colors, uint8 [H, W, C]."""
    return image_format.colors_of(np.array(ids).reshape(height, -1))
