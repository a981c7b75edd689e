"""Checkpoints of tiny models of images with random weights, and folders of random images for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from data_pipeline.shards.shard_writer import EncodedDocument, ShardWriter
from longctx.config import ModelConfig
from longctx.conversion.checkpoint_writer import save_master_weights
from longctx.images.image_format import ImageFormat
from longctx.model.decoder import Decoder
from longctx.tokenizer.image_tokenizer import IMAGE_FILE, ImageTokenizer
from tests.longctx.samples import randomize

NAMES = ("ant", "bee", "cat", "dog", "eel")


def palette_of(colors: int, channels: int = 1) -> tuple[tuple[float, ...], ...]:
    """Greys from black to white, each in all channels."""
    return tuple((value,) * channels for value in np.linspace(-1, 1, colors).tolist())


def write_images(
    folder: Path, images: np.ndarray, labels: Sequence[int] | np.ndarray | None = None, *, colors: int = 0, **changes
) -> Path:
    """Shards of images [N, H, W, C], or of ids [N, H, W] of a palette of greys."""
    channels = 1 if images.ndim == 3 else images.shape[3]
    values = {"height": images.shape[1], "width": images.shape[2], "channels": channels}
    values |= {"classes": () if labels is None else NAMES}
    if colors:
        values["palette"] = palette_of(colors, channels)
    folder.mkdir(parents=True)
    tokenizer = ImageTokenizer.of(ImageFormat(**{**values, **changes}), folder)
    writer = ShardWriter(folder, vocab_size=tokenizer.vocab_size, images=True)
    for number, image in enumerate(images):
        label = -1 if labels is None else int(labels[number])
        name = f"image {number}"
        writer.add(
            EncodedDocument(tokens=image.reshape(-1), hash=number, name=name, text_bytes=image.size, label=label)
        )
    tokenizer.save(folder)
    writer.finish(split="training", tokenizer=tokenizer, sources=[{"kind": "test"}], options={}, skipped={})
    return folder


def write_model(folder: Path, config: ModelConfig, image_file: Path | None = None, *, seed: int = 0) -> Decoder:
    """A checkpoint with random weights and the format of a folder of images; return its model."""
    model = Decoder(config, seed=None)
    randomize(model, std=0.5, seed=seed)
    files = {} if image_file is None else {IMAGE_FILE: image_file / IMAGE_FILE}
    weights = model.state_dict().items()
    save_master_weights(config, weights, folder, dtype=torch.float32, training={}, auxiliary_files=files)
    return model.eval()
