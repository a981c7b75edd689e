"""Tiny models of images, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.architecture.image import ImageShape
from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, PackedDocuments, Stream
from longctx.config import ModelConfig
from tests.longctx.samples import tiny_config

PATCHES = ImageShape(height=6, width=10, channels=3, patch=2, class_token=True)
"""15 patches and a class token."""
GRAY = ImageShape(height=3, width=5, channels=1)
"""15 pixels, of a palette's colors."""
COLORS = 12
_BOTH_WAYS: dict[str, Any] = {"causal": False, "norm": "layernorm", "position": "learned"}


def vit_config(image: ImageShape = PATCHES, **changes) -> ModelConfig:
    """A Vision Transformer of two layers, with experts unless ``changes`` say otherwise."""
    sizes = {"vocab_size": 0, "max_positions": image.num_tokens, "classes": 5, "image": image}
    return tiny_config(**{**_BOTH_WAYS, **sizes, **changes})


WINDOWS = ImageShape(height=12, width=24, channels=1, patch=2, window=3, depths=(2, 3))
"""72 patches in 8 windows, then 18 in 2."""


def swin_config(image: ImageShape = WINDOWS, **changes) -> ModelConfig:
    """A Swin of two stages, the second of which has windows as high as the image."""
    sizes = {"vocab_size": 0, "num_layers": 5, "num_heads": 2, "num_kv_heads": 2, "embedding_norm": True, "classes": 5}
    dense = {"num_experts": 0, "shared_ffn_size": 0, "class_pool": "mean", "position": "none"}
    windows = {"layers": ("image_window", "shifted_window"), "image": image}
    return tiny_config(**{**_BOTH_WAYS, **sizes, **dense, **windows, **changes})


def igpt_config(**changes) -> ModelConfig:
    """A model of palette colors and one more id, for begin and mask."""
    sizes = {"vocab_size": COLORS + 1, "output_vocab_size": COLORS, "max_positions": 15, "image": GRAY}
    return tiny_config(**{"position": "learned", "tie_embeddings": False, **sizes, **changes})


def patches_of(pixels: Tensor, image: ImageShape) -> Tensor:
    """The tokens of images [N, C, H, W] one after the other, the class token's among them: uint8 [N·T, C·P·P]."""
    P, found = image.patch, []
    for one in pixels:
        if image.class_token:
            found.append(torch.zeros(image.pixel_bytes, dtype=torch.uint8))
        for top in range(0, image.height, P):
            for left in range(0, image.width, P):
                found.append(one[:, top : top + P, left : left + P].flatten())
    return torch.stack(found)


def image_stream(config: ModelConfig, count: int, *, padding: int = 0, seed: int = 0) -> tuple[Stream, Tensor, Tensor]:
    """Random images as one row, with padding behind them; their pixels [N, C, H, W] (or ids [N, H·W]) and classes."""
    generator, image = torch.Generator().manual_seed(seed), config.image
    T, classes = image.num_tokens, torch.randint(max(1, config.classes), (count,), generator=generator)
    shape = (1, count * T + padding)
    tokens, following = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED_TARGET)
    pixels = None
    if image.patch:
        images = torch.randint(256, (count, image.channels, image.height, image.width), generator=generator)
        images = images.to(torch.uint8)
        behind = torch.zeros(padding, image.pixel_bytes, dtype=torch.uint8)
        pixels = torch.cat([patches_of(images, image), behind])[None]
    else:
        images = torch.randint(COLORS, (count, T), generator=generator)
        begun = torch.cat([torch.full((count, 1), COLORS), images[:, :-1]], 1)
        tokens[0, : count * T], following[0, : count * T] = begun.flatten(), images.flatten()
    ids = torch.full(shape, PADDING_DOCUMENT)
    ids[0, : count * T] = torch.arange(count).repeat_interleave(T)
    labels = torch.full(shape, IGNORED_TARGET)
    labels[0, : count * T : T] = classes
    bounds = [T * number for number in range(count + 1)]
    if padding:
        bounds.append(count * T + padding)
    stream = Stream(
        tokens=tokens,
        positions=torch.cat([torch.arange(T).repeat(count), torch.arange(padding)])[None],
        document_ids=ids,
        next_token_ids=following,
        documents=PackedDocuments.of(bounds),
        pixels=pixels,
        labels=labels if config.classes else None,
    )
    return stream, images, classes
