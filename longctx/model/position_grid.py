"""Learned positions of patches at another resolution.

Axes: T tokens per image, M model width, h × w patches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from longctx.architecture.image import ImageShape


def resize_positions(table_TM: Tensor, saved: ImageShape, image: ImageShape) -> Tensor:
    """Interpolate the position table for images of another size (ViT, arXiv 2010.11929, §3.2).

    Patch positions form a grid in reading order, which is resized by bicubic interpolation as in transformers; the
    class token's row stays.
    """
    first = int(saved.class_token)
    h, w = saved.height // saved.patch, saved.width // saved.patch
    size = image.height // image.patch, image.width // image.patch
    grid_1Mhw = table_TM[first:].view(h, w, -1).permute(2, 0, 1)[None].float()
    resized_1Mhw = functional.interpolate(grid_1Mhw, size=size, mode="bicubic", align_corners=False)
    resized_TM = resized_1Mhw[0].permute(1, 2, 0).flatten(0, 1)
    return torch.cat([table_TM[:first], resized_TM.to(table_TM.dtype)])
