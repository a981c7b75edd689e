"""Outputs for random images, ours and transformers', to compare: class logits, or hidden states without a class head.

Axes: N images, T tokens per image, C channels, P patch side, M model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from longctx.conversion.reference_model import load_reference, quiet_transformers, switch_attention

if TYPE_CHECKING:
    from longctx.model.decoder import Decoder

_MOST_IMAGES = 8


@dataclass(frozen=True, kw_only=True)
class RandomImages:
    """Random pixels, or a palette's colors if each pixel is a token."""

    config: ModelConfig
    pixels_NCHW: Tensor | None
    """uint8."""
    tokens_NT: Tensor

    @classmethod
    def of(cls, config: ModelConfig, most_tokens: int) -> RandomImages:
        """Draw images of about ``most_tokens`` tokens, at least one."""
        image, generator = config.image, torch.Generator().manual_seed(0)
        count = max(1, min(_MOST_IMAGES, most_tokens // image.num_tokens))
        shape = (count, image.num_tokens)
        if not image.patch:
            # The last id is the begin token, which precedes images only to predict their pixels.
            return cls(
                config=config,
                pixels_NCHW=None,
                tokens_NT=torch.randint(config.vocab_size - 1, shape, generator=generator),
            )
        pixels = torch.randint(256, (count, image.channels, image.height, image.width), generator=generator)
        return cls(config=config, pixels_NCHW=pixels.to(torch.uint8), tokens_NT=torch.zeros(shape, dtype=torch.int64))

    def describe(self) -> str:
        """Return the number of images and tokens."""
        plural = "s" if len(self.tokens_NT) > 1 else ""
        return f"{len(self.tokens_NT)} image{plural} of {self.tokens_NT.shape[1]} tokens"

    def patches(self) -> Tensor | None:
        """Return the pixels as the decoder reads them [1, N·T, C·P²], zeros for class tokens."""
        if self.pixels_NCHW is None:
            return None
        image = self.config.image
        rows, columns = image.grid
        grid = self.pixels_NCHW.unflatten(3, (columns, image.patch)).unflatten(2, (rows, image.patch))
        patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        if image.class_token:
            patches = torch.cat([torch.zeros_like(patches[:, :1]), patches], 1)
        return patches.flatten(0, 1)[None]

    def normalized(self, dtype: torch.dtype) -> Tensor | None:
        """Return the pixels as transformers' models read them [N, C, H, W]."""
        if self.pixels_NCHW is None:
            return None
        image = self.config.image
        mean, std = (torch.tensor(numbers, dtype=torch.float64)[:, None, None] for numbers in (image.mean, image.std))
        return ((self.pixels_NCHW.double() / 255 - mean) / std).to(dtype)


@torch.no_grad()
def our_image_outputs(model: Decoder, images: RandomImages) -> Tensor:
    """Compute class logits [N, classes] in float32; without a class head, hidden states [N·T, M] in reading order."""
    from longctx.model.image_stages import hidden_in_reading_order

    config, (N, T) = model.config, images.tokens_NT.shape
    hidden = model(
        images.tokens_NT.reshape(1, -1),
        torch.arange(T).repeat(N)[None],
        PackedDocuments.of_rows(N, T),
        pixels=images.patches(),
    )
    hidden_NTM = hidden_in_reading_order(config, hidden).unflatten(0, (N, -1))
    if model.class_head is None:
        return hidden_NTM.flatten(0, 1).float()
    if config.class_pool == "first":
        return model.class_head(hidden_NTM[:, 0]).float()
    return model.class_head(hidden_NTM.mean(1)).float()


@torch.no_grad()
def reference_image_outputs(
    folder: Path, images: RandomImages, dtype: torch.dtype, *, auto_class: str
) -> tuple[Tensor, Tensor]:
    """Compute transformers' outputs like ``our_image_outputs``, with two attentions if the class has two."""
    pixels = images.normalized(dtype)
    with quiet_transformers():
        model = load_reference(folder, dtype, auto_class=auto_class)
        call = partial(model, images.tokens_NT)
        if pixels is not None:
            call = partial(model, pixel_values=pixels)
        found = [call()]
        if switch_attention(model):
            found.insert(0, call())
    outputs = [one.logits if images.config.classes else one.last_hidden_state.flatten(0, 1) for one in found]
    return outputs[0].float(), outputs[-1].float()
