"""Image encoding: pixels in the data set's shape, as values or palette colors, with the label's class index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import xxhash

from data_pipeline.prepare.encode_texts import TextMismatch
from data_pipeline.prepare.images.image_rule import ImageRule, label_of
from data_pipeline.prepare.source_items import Document, FileContentError, Skip
from data_pipeline.shards.shard_writer import EncodedDocument, token_dtype
from longctx.tokenizer.image_tokenizer import ImageTokenizer
from longctx.tokenizer.tokenizer_base import Tokenizer

UNREADABLE = "unreadable image"
"""Reason for an image that cannot be decoded."""


def encode_images(
    documents: Iterable[Document], tokenizer: Tokenizer, rule: ImageRule, leave_out: Callable[[Skip], None]
) -> Iterator[tuple[EncodedDocument, TextMismatch | None]]:
    """Yield each image's tokens, in order; call ``leave_out`` with the reason for each unreadable one.

    Raises DataError for an image of another shape, or with a label beyond the classes.
    """
    assert isinstance(tokenizer, ImageTokenizer), "images are encoded by their format"
    image_format = tokenizer.format
    dtype = token_dtype(tokenizer.vocab_size, images=True)
    numbers = {name: number for number, name in enumerate(image_format.classes)}
    for document in documents:
        assert document.image is not None, "a source cannot mix images with other documents"
        try:
            pixels = rule.pixels(document.image.content)
        except FileContentError as error:
            leave_out(Skip(document.name, UNREADABLE, str(error), is_fault=True))
            continue
        rule.check_shape(document.name, pixels, image_format)
        tokens = pixels
        if image_format.palette:
            tokens = image_format.quantize(pixels)
        encoded = EncodedDocument(
            tokens=tokens.reshape(-1).astype(dtype),
            # The pixels decide the split, so that it is the same for every palette.
            hash=xxhash.xxh3_64_intdigest(pixels.tobytes()),
            name=document.name,
            text_bytes=0,
            label=label_of(document.name, document.image.label, image_format, numbers),
        )
        yield encoded, None
