"""Text to token ids and back, exactly: a SentencePiece BPE with byte fallback and no normalisation.

Documents are framed by two control ids that no text can produce, whatever it contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece as spm
import xxhash

from longctx.errors import DataError
from longctx.files import write_atomically

DOCUMENT_BEGIN = "<|document_begin|>"
DOCUMENT_END = "<|document_end|>"
PADDING = "<|padding|>"

SPACE_MARK = "\u2581"
"""SentencePiece writes a space as this character, and so reads the character itself back as a space."""

CHUNK_CHARACTERS = 1 << 20
"""Text to encode at once: SentencePiece needs about 100 bytes of memory for each byte of it."""

Progress = Callable[[int, int], None]
"""A function that takes the number of documents and of bytes of text done so far."""


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
        """Read a model file; ``DataError`` if it is missing, damaged, or cannot frame documents."""
        path = Path(path)
        try:
            return cls(path.read_bytes(), path=path)
        except OSError as error:
            raise DataError(
                f"tokenizer={path} cannot be read ({error.strerror}).\n"
                "Train one with `longctx tokenizer train --source … --vocab-size … --output …`."
            ) from error

    def save(self, path: Path) -> None:
        """Write the model file, byte for byte as it was read."""
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
        own = self._processor.pad_id()
        if own < 0:
            return self.document_end
        return own

    def encode(self, text: str, *, chunk_characters: int = CHUNK_CHARACTERS) -> np.ndarray:
        """The ids of ``text`` as int32, without begin and end; memory grows with ``chunk_characters``."""
        # The empty part stands for a text without any.
        parts = [np.empty(0, dtype=np.int32)]
        try:
            for chunk in _chunks(text, chunk_characters):
                parts += self._encode_chunk(chunk)
        except UnicodeEncodeError as error:
            raise DataError(f"Text with a lone surrogate ({error.reason}) is not Unicode text. Replace it.") from error
        return np.concatenate(parts)

    def encode_document(self, text: str) -> np.ndarray:
        """The ids of ``text`` between document begin and document end, int32."""
        frame = np.array([self.document_begin, self.document_end], dtype=np.int32)
        return np.concatenate([frame[:1], self.encode(text), frame[1:]])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ``ids``; control ids give nothing, bytes that are no UTF-8 give U+FFFD."""
        ids = np.asarray(ids, dtype=np.int64)
        # SentencePiece's own error names neither the id nor the file.
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
        """Yield the ids of a chunk, in parts: the space mark becomes its three bytes, which decode to itself."""
        # Raises for a lone surrogate, on which SentencePiece would fail without a useful message.
        chunk.encode()
        for number, part in enumerate(chunk.split(SPACE_MARK)):
            if number:
                yield self._space_mark_ids
            if part:
                yield self._processor.encode_as_numpy(part)


def _chunks(text: str, size: int) -> Iterator[str]:
    """Yield ``text``, cut after a newline about every ``size`` characters: memory stays bounded on any document."""
    start = 0
    while start < len(text):
        stop = start + size
        if stop < len(text):
            # Few tokens cross a newline; a line without end is cut all the same.
            newline = text.rfind("\n", start, stop)
            if newline >= 0:
                stop = newline + 1
        yield text[start:stop]
        start = stop


def _parse(model: bytes, path: Path) -> spm.SentencePieceProcessor:
    """The processor of a model file; ``DataError`` if it is damaged or cannot give every text back."""
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
