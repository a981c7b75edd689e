"""SentencePiece models, encoded by the library itself, with a special rule for models that we train.

SentencePiece reads its own space mark U+2581 in a text as a space. Models from ``longctx tokenizer train`` encode it as
its three bytes instead, so that every text is restored exactly. Other models follow the library, as in transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece as spm
import xxhash
from sentencepiece import sentencepiece_model_pb2

from longctx.errors import DataError
from longctx.tokenizer.byte_table import ByteTable
from longctx.tokenizer.control import AddedToken, ControlFinder, TokenSpans
from longctx.tokenizer.growth import MOST_GROWTH, MOST_PIECE, check_charsmap, check_size_limits
from longctx.tokenizer.special import MODEL_FILE, special_ids, with_generation_config
from longctx.tokenizer.text_chunks import (
    CHUNK_CHARACTERS,
    SPACE_MARK,
    AdjacentPairs,
    IsSafeCut,
    is_plain_space,
    never,
    newline_chunks,
    safe_chunks,
)
from longctx.tokenizer.tokenizer_base import Chunk, Tokenizer, check_characters, decode_by_place, encode_by_place

DOCUMENT_BEGIN = "<|document_begin|>"
DOCUMENT_END = "<|document_end|>"
PADDING = "<|padding|>"

OWN_CHUNK_CHARACTERS = 1 << 20
"""Text chunk size for models that we train; changing it would change ids at the cuts in a long document."""

_QUICK_CHARACTERS = 1 << 15
"""Characters passed to the library at once if the text can be cut without changing an id."""

_ANCHOR = "a"
_ModelProto = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
_USER_DEFINED = 4
_TYPES = {1: "Unigram", 2: "BPE", 3: "words", 4: "characters"}


class SentencePieceTokenizer(Tokenizer):
    """SentencePiece model of any type; the library encodes on all cores."""

    def __init__(self, model: bytes, *, path: Path, folder_files: Mapping[str, bytes] | None = None) -> None:
        """Load the model. ``folder_files`` are other files in a Hugging Face folder that may name begin and end ids."""
        processor = _parse(model, path)
        self.processor = processor
        self._proto = _ModelProto.FromString(model)
        _check_growth(self._proto, path)
        self.trainer, self.normalizer = self._proto.trainer_spec, self._proto.normalizer_spec
        """SentencePiece's own messages: training settings, and the normalisation applied to a text first."""
        self.model_type = _TYPES[self.trainer.model_type]
        self.kind = f"SentencePiece {self.model_type}"
        files = dict(folder_files or {})
        own = {"bos": processor.bos_id(), "end": processor.eos_id(), "padding": processor.pad_id()}
        # SentencePiece returns −1 for an id that the model does not have.
        ids = {role: None if token < 0 else token for role, token in own.items()}
        special = special_ids(files, self._id_of, path=path, file=MODEL_FILE, begin=ids["bos"], **ids)
        fingerprint = xxhash.xxh3_128_hexdigest(model)
        # If a model frames documents as in its own file, the fingerprint is the file's hash, as stored in shards.
        if (special.begin, special.end) != (ids["bos"], ids["end"]):
            fingerprint = xxhash.xxh3_128_hexdigest(f"{fingerprint} {special.begin} {special.end}".encode())
        super().__init__(
            path=path,
            vocab_size=processor.vocab_size(),
            special=special,
            fingerprint=fingerprint,
            files={MODEL_FILE: model} | with_generation_config(files, path),
            is_control=np.array([processor.is_control(i) for i in range(processor.vocab_size())]),
        )

    @cached_property
    def is_own(self) -> bool:
        """True if ``longctx tokenizer train`` made the model: it has our control ids, and restores every text."""
        names = {self.processor.id_to_piece(i) for i in range(self.vocab_size) if self.processor.is_control(i)}
        is_lossless = self.has_byte_fallback and not self.normalizes and not self.normalizer.add_dummy_prefix
        is_plain = not self.user_defined and not self.trainer.treat_whitespace_as_suffix
        return names.issuperset((DOCUMENT_BEGIN, DOCUMENT_END)) and is_lossless and is_plain

    @cached_property
    def byte_table(self) -> ByteTable | None:
        """Bytes per id for our own models, which add no prefix and keep every text unchanged; otherwise None."""
        if not self.is_own:
            return None
        return ByteTable(_token_bytes(self.processor))

    @cached_property
    def has_byte_fallback(self) -> bool:
        """True if a character without a vocabulary piece becomes its bytes."""
        return self.processor.is_byte(self.processor.piece_to_id("<0x00>"))

    @cached_property
    def user_defined(self) -> list[int]:
        """Vocabulary pieces that text becomes whenever it spells them (``user_defined_symbols``)."""
        return [i for i, piece in enumerate(self._proto.pieces) if piece.type == _USER_DEFINED]

    def cut(self, text: str, chunk_characters: int | None = None) -> Iterator[Chunk]:
        """Yield ``text`` in chunks: by lines for our models, otherwise at points that no piece spans (``chunks``)."""
        check_characters(text)
        if self.is_own:
            yield from newline_chunks(text, chunk_characters or OWN_CHUNK_CHARACTERS)
        else:
            yield from safe_chunks(text, chunk_characters or CHUNK_CHARACTERS, self._is_safe_cut)

    def encode_chunks(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """Encode each chunk to int32 ids; a later chunk gets no leading space."""
        if self.is_own:
            return self._encode_own([chunk.text for chunk in chunks])
        return encode_by_place(chunks, self._encode_texts)

    def decode_chunks(self, ids: Sequence[np.ndarray], chunks: Sequence[Chunk]) -> list[str]:
        """Decode each chunk's ids."""
        if self.is_own:
            return self._decode_texts([part.tolist() for part in ids])
        return decode_by_place(ids, chunks, self.processor.encode(_ANCHOR), self._decode_texts)

    @cached_property
    def control_finder(self) -> ControlFinder:
        """Finder for control pieces in our own models; raises DataError for other models."""
        if not self.is_own:
            return super().control_finder
        control = np.flatnonzero(self.is_control).tolist()
        return ControlFinder({self.piece(token): AddedToken(token) for token in control})

    def locate_chunks(self, chunks: Sequence[Chunk]) -> list[TokenSpans]:
        """Return each chunk's ids with their character spans, for our own models."""
        assert self.byte_table is not None
        spans: list[TokenSpans] = []
        for chunk, ids in zip(chunks, self.encode_chunks(chunks), strict=True):
            spans.append(TokenSpans(ids, *self.byte_table.locate(ids, chunk.text)))
        return spans

    def piece(self, token: int) -> str:
        """Return an id's spelling in the model file, for display."""
        return self.processor.id_to_piece(int(token))

    def _decode_text(self, ids: list[int]) -> str:
        return self.processor.decode(ids)

    def _id_of(self, token: str) -> int | None:
        found = self.processor.piece_to_id(token)
        # The library returns the unknown id for a missing piece.
        if self.processor.id_to_piece(found) != token:
            return None
        return found

    def _encode_texts(self, texts: list[str], is_first: bool) -> list[np.ndarray]:
        processor = self.processor
        if not is_first:
            processor = self._processor_without_prefix
            if self.normalizes:
                # The cut is before a space, which this processor adds itself.
                texts = [text.removeprefix(" ") for text in texts]
        return processor.encode(texts, return_type="numpy", num_threads=_num_threads(texts, self.threads))

    def _decode_texts(self, parts: list[list[int]]) -> list[str]:
        return self.processor.decode(parts, num_threads=_num_threads(parts, self.threads))

    @property
    def normalizes(self) -> bool:
        """True if the model changes more of a text than the spelling of its spaces."""
        return bool(self.normalizer.precompiled_charsmap) or self.normalizer.remove_extra_whitespaces

    @cached_property
    def _processor_without_prefix(self) -> spm.SentencePieceProcessor:
        """Model for a chunk that does not start its document."""
        proto = _ModelProto()
        proto.CopyFrom(self._proto)
        # In a normalised text, the dummy prefix replaces the leading space that ``_encode_texts`` removes.
        proto.normalizer_spec.add_dummy_prefix = self.normalizes
        return _parse(proto.SerializeToString(), self.path)

    @cached_property
    def _is_safe_cut(self) -> IsSafeCut:
        # A model with its own way of writing spaces has no certain point.
        if self.trainer.treat_whitespace_as_suffix or not self.normalizer.escape_whitespaces:
            return never
        # A word model cuts at spaces only, whatever its vocabulary.
        if self.model_type == "words":
            if self.normalizes:
                return is_plain_space
            return _is_before_space
        model = self.processor
        texts = model.id_to_piece([i for i in range(self.vocab_size) if not (model.is_control(i) or model.is_byte(i))])
        flags = {"normalizes": self.normalizes, "has_byte_fallback": self.has_byte_fallback}
        return AdjacentPairs(texts, **flags).is_safe_cut

    def _encode_own(self, texts: list[str]) -> list[np.ndarray]:
        """Encode chunks with the space mark as its three bytes, which decode to itself."""
        mark = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        pieces: list[str] = []
        # For each text the indices of its text chunks in ``pieces``, and None for a mark.
        rows: list[list[int | None]] = []
        for text in texts:
            row: list[int | None] = []
            for number, part in enumerate(text.split(SPACE_MARK)):
                if number:
                    row.append(None)
                # Cut at points that change no id: the library takes twice as long for a text larger than the cache.
                for piece in safe_chunks(part, _QUICK_CHARACTERS, self._is_safe_cut):
                    row.append(len(pieces))
                    pieces.append(piece.text)
            rows.append(row)
        threads = _num_threads(pieces, self.threads)
        # One call for all text chunks: the library encodes them on all cores.
        encoded = self.processor.encode(pieces, return_type="numpy", num_threads=threads)
        if self.model_type == "words":
            space = self.processor.piece_to_id("<0x20>")
            encoded = [_spell_spaces(piece, mark, space) for piece in encoded]
        ids: list[np.ndarray] = []
        for row in rows:
            joined = [np.empty(0, dtype=np.int32)]
            for at in row:
                if at is None:
                    joined.append(np.array(mark, dtype=np.int32))
                else:
                    joined.append(encoded[at])
            ids.append(np.concatenate(joined).astype(np.int32, copy=False))
        return ids


def _check_growth(proto: Any, path: Path) -> None:
    """Raise DataError if a model may enlarge a text too much, or take too long for it."""
    # Decoding applies the denormalizer, which is just as untrusted.
    for spec in (proto.normalizer_spec, proto.denormalizer_spec):
        check_charsmap(spec.precompiled_charsmap, path)
    check_size_limits({"its unk_surface is": len(proto.trainer_spec.unk_surface)}, MOST_GROWTH, path)
    check_size_limits({"it has a piece": max(len(piece.piece) for piece in proto.pieces)}, MOST_PIECE, path)


def _spell_spaces(ids: np.ndarray, mark: list[int], space: int) -> np.ndarray:
    """Replace U+2581's bytes by a space's byte in the ids for a text without U+2581.

    A word model encodes unknown words as bytes, including the mark that the library writes for their spaces.
    """
    first, second, third = mark
    at = np.flatnonzero((ids[:-2] == first) & (ids[1:-1] == second) & (ids[2:] == third))
    result = ids.copy()
    result[at] = space
    return np.delete(result, np.concatenate([at + 1, at + 2]))


def _num_threads(texts: Sequence[Any], threads: int) -> int:
    """Return the threads to use: starting them takes longer than a single text."""
    if len(texts) > 1:
        return threads
    return 1


def _token_bytes(model: spm.SentencePieceProcessor) -> list[bytes | None]:
    """Return the bytes per id in a model with byte fallback; None for ids that no text becomes."""
    token_bytes: list[bytes | None] = []
    for token, piece in enumerate(model.id_to_piece(list(range(model.vocab_size())))):
        if model.is_control(token) or model.is_unknown(token) or model.is_unused(token):
            token_bytes.append(None)
        elif model.is_byte(token):
            # Spelt <0x0A>.
            token_bytes.append(bytes([int(piece[3:5], 16)]))
        else:
            token_bytes.append(piece.replace(SPACE_MARK, " ").encode())
    return token_bytes


def _is_before_space(text: str, at: int) -> bool:
    """Return True if a word starts here: it starts with its space, and the text before it is another word."""
    return text[at] == " "


def _parse(model: bytes, path: Path) -> spm.SentencePieceProcessor:
    """Parse a model file; raise ``DataError`` if it is damaged."""
    message = f"tokenizer={path} is not a SentencePiece model, or it is damaged. Copy it again or train it again."
    processor = spm.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model)
    except (RuntimeError, OSError) as error:
        raise DataError(message) from error
    if not model or processor.vocab_size() == 0:
        raise DataError(message)
    return processor
