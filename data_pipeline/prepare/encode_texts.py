"""Document encoding to token ids, with a check that each document's ids decode to its text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import xxhash

from data_pipeline.prepare.source_items import Document
from data_pipeline.shards.shard_writer import EncodedDocument, token_dtype
from longctx.tokenizer.tokenizer_base import GROUP_CHARACTERS, Chunk, Tokenizer

_SHOWN_CHARACTERS = 12


@dataclass(frozen=True, kw_only=True)
class TextMismatch:
    """First difference between a document's text and its decoded ids."""

    name: str
    character: int
    """Character index in the text."""
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: character {self.character:,} {self.before!r} became {self.after!r}"


@dataclass(kw_only=True)
class _Document:
    """A document being encoded, with its text chunks encoded so far."""

    name: str
    parts: list[np.ndarray]
    paragraph_parts: list[int]
    """Indices of encoded chunks (``parts``) that start a paragraph, except the first paragraph."""
    hash: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    text_bytes: int = 0
    characters: int = 0
    difference: TextMismatch | None = None


def encode_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    group_characters: int = GROUP_CHARACTERS,
    *,
    paragraphs: bool = False,
) -> Iterator[tuple[EncodedDocument, TextMismatch | None]]:
    """Yield each document's tokens, in order, with the first round-trip difference, if any.

    With ``paragraphs``, each paragraph is encoded separately and the document records each paragraph's start token.
    Memory holds one document's text and ids, ``group_characters`` characters of text, and the library's buffers for
    them.
    """
    # Long documents are split into text chunks and short ones grouped, so that every library call encodes about
    # ``group_characters`` in parallel, whatever the documents' lengths.
    open_documents: list[_Document] = []
    group: list[tuple[_Document, Chunk]] = []
    size = 0
    for document in documents:
        current = _Document(name=document.name, parts=[_small(tokenizer.prefix_ids, tokenizer)], paragraph_parts=[])
        open_documents.append(current)
        texts = paragraphs_of(document.text) if paragraphs else [document.text]
        for chunk in _chunks(texts, tokenizer, current.paragraph_parts):
            group.append((current, chunk))
            size += len(chunk.text)
            if size < group_characters:
                continue
            _encode_group(group, tokenizer)
            group, size = [], 0
            # The current document may have more text chunks to come.
            yield from _finished(open_documents[:-1], tokenizer, paragraphs=paragraphs)
            open_documents = [current]
    _encode_group(group, tokenizer)
    yield from _finished(open_documents, tokenizer, paragraphs=paragraphs)


_BLANK_LINE, _LINE_END = re.compile(r"\r?\n[ \t]*\r?\n\s*"), re.compile(r"(?:\r?\n)+")


def paragraphs_of(text: str) -> list[str]:
    """Split a text after each blank line, or after each line if it has no blank line; the paragraphs concatenate to the
    text.

    No paragraph is blank: leading white space belongs to the first paragraph.
    """
    blank = len(text) - len(text.lstrip())
    ends: list[int] = []
    for pattern in (_BLANK_LINE, _LINE_END):
        ends = ends or [found.end() for found in pattern.finditer(text) if found.end() > blank]
    return [text[start:stop] for start, stop in pairwise((0, *ends, len(text))) if start < stop]


def _chunks(texts: Sequence[str], tokenizer: Tokenizer, paragraph_parts: list[int]) -> Iterator[Chunk]:
    """Yield the text chunks of consecutive texts; append each later text's first chunk index to ``paragraph_parts``."""
    # Entry 0 of ``_Document.parts`` holds the tokenizer's prefix tokens.
    parts = 1
    for number, text in enumerate(texts):
        if number:
            paragraph_parts.append(parts)
        for chunk in tokenizer.cut(text):
            parts += 1
            yield chunk._replace(is_first=chunk.is_first and not number)


def _encode_group(group: list[tuple[_Document, Chunk]], tokenizer: Tokenizer) -> None:
    """Encode text chunks from one or several documents in one call, and compare their decoded ids."""
    chunks = [chunk for _, chunk in group]
    encoded = tokenizer.encode_chunks(chunks)
    mismatches = find_mismatches(encoded, chunks, tokenizer)
    for number, ((document, chunk), ids) in enumerate(zip(group, encoded, strict=True)):
        raw = chunk.text.encode()
        document.hash.update(raw)
        document.text_bytes += len(raw)
        document.parts.append(_small(ids, tokenizer))
        if number in mismatches and document.difference is None:
            document.difference = _first_difference(document, chunk.text, mismatches[number])
        document.characters += len(chunk.text)


def find_mismatches(ids: Sequence[np.ndarray], chunks: Sequence[Chunk], tokenizer: Tokenizer) -> dict[int, str]:
    """Return the decoded text for text chunks that do not round-trip, keyed by chunk index."""
    numbers = list(range(len(chunks)))
    piece_table = tokenizer.byte_table
    if piece_table is not None:
        # Decoding costs an eighth of encoding, so decode only chunks that the byte table does not prove exact.
        numbers = [number for number in numbers if not piece_table.matches(ids[number], chunks[number].text)]
    if not numbers:
        return {}
    decoded = tokenizer.decode_chunks([ids[number] for number in numbers], [chunks[number] for number in numbers])
    return {number: text for number, text in zip(numbers, decoded, strict=True) if text != chunks[number].text}


def _first_difference(document: _Document, text: str, decoded: str) -> TextMismatch:
    """Locate the first differing character in a text chunk, with its index in the document."""
    pairs = enumerate(zip(text, decoded, strict=False))
    at = next((i for i, (before, after) in pairs if before != after), min(len(text), len(decoded)))
    return TextMismatch(
        name=document.name,
        character=document.characters + at,
        before=text[at : at + _SHOWN_CHARACTERS],
        after=decoded[at : at + _SHOWN_CHARACTERS],
    )


def _finished(
    documents: list[_Document], tokenizer: Tokenizer, *, paragraphs: bool
) -> Iterator[tuple[EncodedDocument, TextMismatch | None]]:
    """Yield the completely encoded documents."""
    for document in documents:
        document.parts.append(_small(tokenizer.suffix_ids, tokenizer))
        paragraph_starts = None
        if paragraphs:
            # A paragraph of spaces may have no token, which repeats its start: keep distinct starts.
            paragraph_starts = np.unique(
                np.cumsum([0, *map(len, document.parts)], dtype=np.int64)[document.paragraph_parts]
            )
        encoded = EncodedDocument(
            tokens=np.concatenate(document.parts),
            paragraphs=paragraph_starts,
            hash=document.hash.intdigest(),
            name=document.name,
            text_bytes=document.text_bytes,
        )
        yield encoded, document.difference


def _small(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Convert ids to the shards' dtype: two bytes each for a small vocabulary."""
    assert not len(ids) or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
    return ids.astype(token_dtype(tokenizer.vocab_size))
