"""Rows with random images, the same in every process.

Axes: B rows, T tokens per row, N pixel values per patch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from launcher.config.resolved import ResolvedConfig
from longctx.architecture.image import ImageShape
from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, PackedDocuments, Stream


def image_rows(config: ResolvedConfig, first_row: int, rows: int, generator: torch.Generator) -> Stream:
    """Build rows of random images, numbered from ``first_row``; every second row lacks its last image.

    Patches have random pixels, and Image GPT's tokens are random colors after a begin token. With a class head each
    image has a random class.
    """
    image, model = config.model.image, config.model
    size, capacity = image.num_tokens, config.data.seq_len // image.num_tokens
    numbers_BT, positions_BT, starts = _positions_of_rows(first_row, rows, config.data.seq_len, size)
    shape, is_image_BT = numbers_BT.shape, numbers_BT != PADDING_DOCUMENT
    assert capacity, "check_run refuses a row without room for an image"
    tokens_BT, next_BT = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED_TARGET)
    labels_BT = pixels_BTN = None
    if image.patch:
        pixels_BTN = _random_pixels(image, positions_BT, is_image_BT, generator)
    else:
        num_colors = model.head_rows or model.vocab_size
        colors_BT = torch.randint(num_colors, shape, generator=generator)
        tokens_BT = colors_BT.where(is_image_BT, 0)
        if config.train.objective == "causal":
            # The begin token comes first, and the last color is only a target.
            begun_BT = colors_BT.roll(1).where(positions_BT > 0, model.vocab_size - 1)
            tokens_BT, next_BT = begun_BT.where(is_image_BT, 0), colors_BT.where(is_image_BT, IGNORED_TARGET)
    if model.classes:
        labels_BT = torch.randint(model.classes, shape, generator=generator)
        labels_BT = labels_BT.where(is_image_BT & (positions_BT == 0), IGNORED_TARGET)
    stream = Stream(
        tokens=tokens_BT,
        positions=positions_BT,
        document_ids=numbers_BT,
        next_token_ids=next_BT,
        documents=PackedDocuments(tuple(starts)),
        pixels=pixels_BTN,
        labels=labels_BT,
    )
    if image.window:
        # Windows are ordered over all images of a micro-batch, which is one row.
        return stream.flatten_rows()
    return stream


def _positions_of_rows(first_row: int, rows: int, seq_len: int, size: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return each token's document and position [B, T], and all documents' first tokens, then the end."""
    ids, positions, starts, capacity = [], [], [], seq_len // size
    for row in range(rows):
        count = capacity
        if capacity > 2 and (first_row + row) % 2:
            count -= 1
        for _ in range(count):
            ids += [len(starts)] * size
            starts.append(len(ids) - size)
            positions += range(size)
        padding = seq_len - count * size
        if padding:
            starts.append(len(ids))
            ids += [PADDING_DOCUMENT] * padding
            positions += range(padding)
    numbers_BT, positions_BT = (torch.tensor(values).view(rows, seq_len) for values in (ids, positions))
    return numbers_BT, positions_BT, [*starts, rows * seq_len]


def _random_pixels(image: ImageShape, positions_BT: Tensor, is_image_BT: Tensor, generator: torch.Generator) -> Tensor:
    """Return random pixels, uint8 [B, T, N]; zeros for class tokens and padding."""
    shape = (*positions_BT.shape, image.pixel_bytes)
    pixels_BTN = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    is_patch_BT = is_image_BT
    if image.class_token:
        is_patch_BT = is_image_BT & (positions_BT > 0)
    return pixels_BTN * is_patch_BT[..., None]
