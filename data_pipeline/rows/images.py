"""Images as documents: each patch, or each pixel's palette color, is a token.

"ViT" (Dosovitskiy et al., 2020, arXiv 2010.11929): square patches in reading order, after a class token. "Image GPT"
(Chen et al., 2020, "Generative Pretraining from Pixels"): the colors of all pixels in reading order. To predict the
next pixel, a begin token comes first, and the last pixel is only a target.

In training an image may be flipped, and cropped if the folder's images are larger than the model's. Both are functions
of (seed, epoch, folder, document): the same for any ranks, threads and resumption. Validation takes the middle. A rank
reads only the image rows that its tokens cover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data_pipeline.rows.examples import Example, PieceOfEpoch
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shuffle import falls_below, key64
from longctx.errors import ConfigError

_WHOLE = 1 << 40
"""Piece length above any image, so that no image is cut."""

# Salts; ``rows.text_segments`` has the previous ones.
_FLIP, _TOP, _LEFT = 501, 502, 503


@dataclass(frozen=True, kw_only=True)
class ImageRule:
    """Rule for the tokens of an image."""

    height: int
    width: int
    channels: int
    patch: int = 0
    """Side of a patch in pixels; 0: each pixel's palette color is a token."""
    class_token: bool = False
    """True if a token without pixels precedes the patches."""
    begin: bool = False
    """True if the begin token precedes the pixels, and the last pixel is only a target."""
    flip: bool = False
    """True if half the images in an epoch are mirrored left to right."""
    augment: bool = True
    """True in training: images are flipped, and cropped at random. False takes the middle."""
    has_labels: bool = False
    """True if the model reads the images' classes."""
    least_tokens, has_segments = 1, False

    def __str__(self) -> str:
        """Return the rule as recorded in the loader state."""
        unit = "pixels"
        if self.patch:
            unit = f"patches of {self.patch}"
        text = f"{unit} of {self.height} × {self.width} × {self.channels} images"
        if self.class_token:
            text += ", after a class token"
        if self.begin:
            text += ", after a begin token"
        if self.flip:
            text += ", flipped"
        return text

    @property
    def num_tokens(self) -> int:
        """Tokens per image."""
        if not self.patch:
            return self.height * self.width
        return self.class_token + (self.height // self.patch) * (self.width // self.patch)

    @property
    def pixel_bytes(self) -> int:
        """Bytes per patch; 0 if the tokens are colors."""
        return self.channels * self.patch * self.patch

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Return the token count of each image."""
        return np.full_like(lengths, self.num_tokens)

    def source_lengths(self, lengths: np.ndarray) -> None:
        """Return None: an image has no encoder input."""

    def most_tokens(self, seq_len: int, source_seq_len: int) -> int:
        """Return a length above any image; raise ConfigError if a row cannot hold one."""
        if seq_len < self.num_tokens:
            raise ConfigError(
                f"data.seq_len={seq_len} cannot hold an image of {self.num_tokens} tokens ({self}).\n"
                f"Try data.seq_len={self.num_tokens}, or a multiple to put several images into a row."
            )
        return _WHOLE


class _View(NamedTuple):
    """Part of a stored image that an epoch reads."""

    top: int
    left: int
    is_flipped: bool


class Images:
    """Image rule applied to a folder's images."""

    def __init__(self, rule: ImageRule, shards: ShardSet, *, seed: int) -> None:
        """Initialize; raise ConfigError if the folder's images do not fit the rule."""
        if not shards.is_images:
            raise ConfigError(
                f"model.image.height={rule.height} makes a model of images, but {shards.folder} contains texts.\n"
                "Build a folder of images with `longctx data build --kind images`, or set model.image.height=0."
            )
        self.rule, self.seed, self.shards = rule, seed, shards
        self._stored = stored = shards.image_format
        _check_format(rule, shards)
        self._begin = np.array([stored.num_colors], np.int32)
        self._key = int(shards.manifest.hash[:16], 16)

    def examples(self, pieces: Sequence[PieceOfEpoch]) -> list[Example]:
        """Return each image's tokens and class. Patches have no ids: their pixels are read later."""
        labels = [self._label(document) for (document, _, _), _ in pieces]
        if self.rule.patch:
            tokens = np.zeros(self.rule.num_tokens, np.uint16)
            return [Example(tokens, label=label) for label in labels]
        documents = self.shards.slices([piece for piece, _ in pieces])
        examples = []
        for (piece, epoch), ids, label in zip(pieces, documents, labels, strict=True):
            view = self._view(piece[0], epoch)
            shown = self._cut(ids.reshape(self._stored.height, self._stored.width), view.top, view)
            tokens = shown[: self.rule.height].reshape(-1).astype(np.int32)
            if self.rule.begin:
                # One more token than the rule counts: the last pixel is the last token's target.
                tokens = np.concatenate([self._begin, tokens])
            examples.append(Example(tokens, label=label))
        return examples

    def pixels(self, piece: PieceOfEpoch, first: int, last: int, step: int) -> np.ndarray:
        """Return the pixels of the image's tokens ``first``, ``first`` + ``step``, … below ``last``.

        uint8 [tokens, C·P·P], each patch by channel, row and column; zeros for the class token.
        """
        rule, ((document, _, _), epoch) = self.rule, piece
        P, columns = rule.patch, rule.width // rule.patch
        patches = np.arange(first, last, step) - rule.class_token
        is_patch = patches >= 0
        pixels = np.zeros((len(patches), rule.pixel_bytes), np.uint8)
        patches = patches[is_patch]
        if not len(patches):
            return pixels
        view = self._view(document, epoch)
        begin, end = int(patches[0]) // columns, int(patches[-1]) // columns + 1
        top, width, channels = view.top + begin * P, self._stored.width, self._stored.channels
        row_bytes = width * channels
        strip = self.shards.slices([(document, top * row_bytes, (view.top + end * P) * row_bytes)])[0]
        strip = self._cut(strip.reshape(-1, width, channels), 0, view)
        # By patch row and column; then each patch by channel, row and column, as convolution weights are stored.
        grid = strip.reshape(end - begin, P, columns, P, channels).transpose(0, 2, 4, 1, 3)
        pixels[is_patch] = grid[patches // columns - begin, patches % columns].reshape(len(patches), -1)
        return pixels

    def _label(self, document: int) -> int | None:
        if not self.rule.has_labels:
            return None
        return self.shards.label(document)

    def _cut(self, image: np.ndarray, top: int, view: _View) -> np.ndarray:
        """Return the view's columns in the image rows from ``top`` on, flipped if the view is."""
        shown = image[top:, view.left : view.left + self.rule.width]
        if view.is_flipped:
            shown = shown[:, ::-1]
        return shown

    def _view(self, document: int, epoch: int) -> _View:
        """Return the part of an image that an epoch reads."""
        rule = self.rule
        spare = self._stored.height - rule.height, self._stored.width - rule.width
        if not rule.augment:
            return _View(spare[0] // 2, spare[1] // 2, is_flipped=False)
        parts = (key64(document, self._key), self.seed, epoch)
        top, left = (key64(*parts, salt) % (room + 1) for salt, room in zip((_TOP, _LEFT), spare, strict=True))
        return _View(top, left, is_flipped=rule.flip and falls_below(_FLIP, 0.5, *parts))


def _check_format(rule: ImageRule, shards: ShardSet) -> None:
    """Raise ConfigError unless the folder's images have the rule's channels and kind, and are large enough."""
    stored, folder = shards.image_format, shards.folder
    if bool(stored.palette) == bool(rule.patch):
        wanted, how = "raw pixels", "build without --palette, or set model.image.patch=0"
        if stored.palette:
            actual = f"colors of a palette of {stored.num_colors}"
        else:
            actual, wanted, how = wanted, "palette colors", "build with --palette 512, or set model.image.patch=16"
        raise ConfigError(f"model.image.patch={rule.patch} reads {wanted}, but {folder} holds {actual}.\nEither {how}.")
    if stored.channels != rule.channels:
        raise ConfigError(
            f"model.image.channels={rule.channels}, but the images in {folder} have {stored.channels}.\n"
            f"Try --model.image.channels {stored.channels}, or build with --channels {rule.channels}."
        )
    for name in ("height", "width"):
        wanted, found = getattr(rule, name), getattr(stored, name)
        if found < wanted:
            raise ConfigError(
                f"model.image.{name}={wanted}, but the images in {folder} are {stored.height} × {stored.width} "
                f"pixels.\nTry --model.image.{name} {found}, or build with --image-size {rule.height}x{rule.width}."
            )
    if rule.has_labels and not stored.classes:
        raise ConfigError(
            f"the class head needs labelled images, but those in {folder} have no classes.\n"
            "Build from folders by class, or set model.classes=0."
        )
