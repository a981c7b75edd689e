"""Text to token ids and back, exactly: a SentencePiece BPE with byte fallback and no normalisation.

Documents are framed by two control ids that no text can produce, whatever it contains.
"""

from __future__ import annotations

import heapq
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece as spm
import xxhash

from data_pipeline.files import write_atomically
from data_pipeline.sources import Document
from longctx.errors import DataError

DOCUMENT_BEGIN = "<|document_begin|>"
DOCUMENT_END = "<|document_end|>"
PADDING = "<|padding|>"

SPACE_MARK = "\u2581"
"""SentencePiece writes a space as this character, and so reads the character itself back as a space."""

SMALLEST_VOCAB_SIZE = 4 + 256 + 1
"""Unknown, begin, end and padding, then one id for each byte; and something to learn."""

_CHUNK_CHARACTERS = 1 << 20  # SentencePiece needs about 100 bytes of memory for each byte it encodes at once

_TRAINING_OPTIONS = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "character_coverage": 0.9999,
    "max_sentence_length": 1 << 30,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": 3,
    "bos_piece": DOCUMENT_BEGIN,
    "eos_piece": DOCUMENT_END,
    "pad_piece": PADDING,
    "num_threads": 1,  # BPE training gains nothing from more, and the number would end up in the model file's bytes
    "minloglevel": 3,  # SentencePiece would write its progress straight to stderr
}

Progress = Callable[[int, int], None]
"""Called with the documents and the bytes of text done so far."""


class Tokenizer:
    """A trained SentencePiece model. ``load`` reads one, ``train_tokenizer`` makes one."""

    def __init__(self, model: bytes, *, path: Path) -> None:
        self.path = path
        self._model = model
        self.fingerprint = xxhash.xxh3_128_hexdigest(model)
        """xxh3_128 of the model file, 32 hex digits."""
        self._processor = _parse(model, path)
        self._space_mark_ids = np.array(
            [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()], dtype=np.int32
        )
        self._is_control = np.array([self._processor.is_control(i) for i in range(self.vocab_size)])

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads a model file; ``DataError`` if it is missing, damaged, or cannot frame documents."""
        path = Path(path)
        try:
            return cls(path.read_bytes(), path=path)
        except OSError as error:
            raise DataError(
                f"tokenizer={path} cannot be read ({error.strerror}).\n"
                "Train one with `longctx tokenizer train --source … --vocab-size … --output …`."
            ) from error

    def save(self, path: Path) -> None:
        """Writes the model file, byte for byte as it was read."""
        write_atomically(path, self._model)

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""
        return self._processor.vocab_size()

    @property
    def document_begin(self) -> int:
        """Id before a document's first token."""
        return self._processor.bos_id()

    @property
    def document_end(self) -> int:
        """Id after a document's last token."""
        return self._processor.eos_id()

    @property
    def padding(self) -> int:
        """Id that fills a row; the document end where a foreign model has no padding id (its target never counts)."""
        return self._processor.pad_id() if self._processor.pad_id() >= 0 else self.document_end

    def encode(self, text: str) -> np.ndarray:
        """The ids of ``text`` as int32, without begin and end."""
        try:
            parts = [ids for chunk in _chunks(text) for ids in self._encode_chunk(chunk)]
        except UnicodeEncodeError as error:
            raise DataError(f"Text with a lone surrogate ({error.reason}) is not Unicode text. Replace it.") from error
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def encode_document(self, text: str) -> np.ndarray:
        """The ids of ``text`` between document begin and document end, int32."""
        frame = np.array([self.document_begin, self.document_end], dtype=np.int32)
        return np.concatenate([frame[:1], self.encode(text), frame[1:]])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ``ids``; control ids give nothing, bytes that are no UTF-8 give U+FFFD."""
        ids = np.asarray(ids, dtype=np.int64)
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise DataError(
                f"id {outside[0]} is not in the vocabulary of {self.path}, which ends at {self.vocab_size - 1}."
            )
        return self._processor.decode(ids[~self._is_control[ids]].tolist())

    def piece(self, token: int) -> str:
        """How the model file spells one id, for display."""
        return self._processor.id_to_piece(int(token))

    def _encode_chunk(self, chunk: str) -> Iterator[np.ndarray]:
        """Ids of a chunk, in parts: the space mark goes as its three bytes, which decode to itself, not to a space."""
        chunk.encode()  # SentencePiece would fail on a lone surrogate without a useful message
        for number, part in enumerate(chunk.split(SPACE_MARK)):
            if number:
                yield self._space_mark_ids
            if part:
                yield self._processor.encode_as_numpy(part)


def train_tokenizer(
    documents: Iterable[Document],
    output: str | Path,
    *,
    vocab_size: int,
    max_text_bytes: int = 256 << 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tokenizer:
    """Trains a BPE on ``documents`` and writes it to ``output``, all at once; the same input gives the same bytes.

    Training holds the text in memory, so of a corpus above ``max_text_bytes`` it uses a sample of whole documents,
    drawn by a hash of ``seed`` and text. Raises ``DataError`` for a ``vocab_size`` that the corpus cannot fill.
    """
    if vocab_size < SMALLEST_VOCAB_SIZE:
        raise DataError(
            f"vocab_size={vocab_size} leaves no room beside 256 bytes and 4 control ids. "
            f"Try {SMALLEST_VOCAB_SIZE} or more."
        )
    texts = _sample(documents, max_text_bytes=max_text_bytes, seed=seed, progress=progress)
    sentences = (part for text in texts for part in text.split(SPACE_MARK) if part)
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=sentences, model_writer=model, vocab_size=vocab_size, **_TRAINING_OPTIONS
        )
    except (RuntimeError, OSError) as error:
        raise DataError(_explain_training(str(error), vocab_size)) from error
    write_atomically(Path(output), model.getvalue())
    return Tokenizer.load(output)


def _sample(documents: Iterable[Document], *, max_text_bytes: int, seed: int, progress: Progress | None) -> list[str]:
    """Texts of at most ``max_text_bytes`` together, those with the smallest hash; in memory there is never much more.

    The choice depends on neither order nor chunking, and one document is always kept.
    """
    kept: list[tuple[int, int, str]] = []  # a heap with the largest hash first
    kept_bytes = seen_bytes = 0
    for number, document in enumerate(documents):
        raw = document.text.encode()
        heapq.heappush(kept, (-xxhash.xxh3_64_intdigest(raw, seed=seed), number, document.text))
        kept_bytes, seen_bytes = kept_bytes + len(raw), seen_bytes + len(raw)
        while kept_bytes > max_text_bytes and len(kept) > 1:
            kept_bytes -= len(heapq.heappop(kept)[2].encode())
        if progress is not None:
            progress(number + 1, seen_bytes)
    if not kept:
        raise DataError("There are no documents to train a tokenizer on. Check the source and what it excludes.")
    return [text for _, _, text in sorted(kept, key=lambda entry: entry[1])]


def _chunks(text: str) -> Iterator[str]:
    """``text`` in order, cut after a newline about every million characters: memory stays bounded on any document."""
    start = 0
    while start < len(text):
        stop = start + _CHUNK_CHARACTERS
        if stop < len(text):
            newline = text.rfind("\n", start, stop)
            stop = newline + 1 if newline >= 0 else stop
        yield text[start:stop]
        start = stop


def _parse(model: bytes, path: Path) -> spm.SentencePieceProcessor:
    damaged = f"tokenizer={path} is not a SentencePiece model, or it is damaged. Copy it again or train it again."
    processor = spm.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model)
    except (RuntimeError, OSError) as error:
        raise DataError(damaged) from error
    if not model or processor.vocab_size() == 0:
        raise DataError(damaged)
    if min(processor.bos_id(), processor.eos_id()) < 0:
        raise DataError(
            f"tokenizer={path} has no begin or no end id to frame documents with. Train it with both (bos, eos)."
        )
    if not processor.is_byte(processor.piece_to_id("<0x00>")):
        raise DataError(f"tokenizer={path} cannot spell every byte. Train it with byte_fallback.")
    return processor


def _explain_training(message: str, vocab_size: int) -> str:
    """SentencePiece's complaint in our words, with the size that works."""
    if found := re.search(r"too high.*<= (\d+)", message, re.DOTALL):
        return f"vocab_size={vocab_size} is more than this corpus can fill. Try {found[1]} or less, or a larger corpus."
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"vocab_size={vocab_size} is less than the bytes, control ids and characters of this corpus need.\n"
            f"Try {int(found[1]) + 1} or more."
        )
    return f"SentencePiece could not train a tokenizer of vocab_size={vocab_size}: {message}"
