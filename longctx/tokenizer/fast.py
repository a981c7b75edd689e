"""Tokenizer for Hugging Face's ``tokenizer.json``, encoded by the ``tokenizers`` library itself.

Special tokens spelt in a text stay text, as with transformers' ``split_special_tokens=True``. Some models would still
choose a special token's own vocabulary entry for its spelling (a Unigram does). Such a text chunk is encoded again with
entries that no text can spell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import xxhash

from longctx.errors import DataError
from longctx.tokenizer.control import AddedToken, ControlFinder, TokenSpans
from longctx.tokenizer.growth import check_growth, library_faults
from longctx.tokenizer.patterns import check_patterns
from longctx.tokenizer.special import JSON_FILE, read_tokenizer_json, special_ids, with_generation_config
from longctx.tokenizer.text_chunks import CHUNK_CHARACTERS, AdjacentPairs, IsSafeCut, ends_word, never, safe_chunks
from longctx.tokenizer.tokenizer_base import Chunk, Tokenizer, check_characters, decode_by_place, encode_by_place

_ANCHOR = "a"
_PROOF_CHARACTERS = 64


class FastTokenizer(Tokenizer):
    """Tokenizer from any kind of tokenizer.json; the library encodes on all cores."""

    def __init__(self, content: bytes, *, path: Path, folder_files: Mapping[str, bytes] | None = None) -> None:
        """Load the tokenizer. ``folder_files`` are the other files in its folder, which name begin and end ids."""
        files = {JSON_FILE: content} | dict(folder_files or {})
        self._json = read_tokenizer_json(files, JSON_FILE, path)
        self._fast = _build(content, self._json, path)
        self._variants = _Variants(self._fast, self._json, path)
        self._added = self._fast.get_added_tokens_decoder()
        self.kind = f"tokenizer.json {self._json['model'].get('type', 'model')}"
        self.continuation_prefix = self._json["model"].get("continuing_subword_prefix") or ""
        with library_faults(path):
            check_patterns(self._fast, self._json, path)
            before, after = _frame(self._fast)
        own = {"bos": before, "begin": before, "end": after}
        special = special_ids(files, self._fast.token_to_id, path=path, file=JSON_FILE, **own)
        vocabulary = self._fast.get_vocab(with_added_tokens=True)
        # Ids may have gaps, so count up to the largest one.
        vocab_size = max(vocabulary.values(), default=-1) + 1
        if not vocab_size:
            raise DataError(f"tokenizer={path} has no vocabulary. Copy it again.")
        super().__init__(
            path=path,
            vocab_size=vocab_size,
            special=special,
            fingerprint=_fingerprint(self._json, special.begin, special.end),
            files=with_generation_config(files, path),
            is_control=_control_ids(vocabulary, self._special_numbers),
        )

    def cut(self, text: str, chunk_characters: int | None = None) -> Iterator[Chunk]:
        """Yield ``text`` in chunks, cut at points where the tokenizer certainly cuts itself (``chunks``)."""
        check_characters(text)
        with library_faults(self.path):
            yield from safe_chunks(text, chunk_characters or CHUNK_CHARACTERS, self._is_safe_cut)

    def encode_chunks(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """Encode each chunk to int32 ids; a later chunk gets no leading space."""
        with library_faults(self.path):
            return encode_by_place(chunks, self._encode_texts)

    def decode_chunks(self, ids: Sequence[np.ndarray], chunks: Sequence[Chunk]) -> list[str]:
        """Decode each chunk's ids."""
        anchor = self._fast.encode(_ANCHOR, add_special_tokens=False).ids
        with library_faults(self.path):
            return decode_by_place(ids, chunks, anchor, partial(self._fast.decode_batch, skip_special_tokens=False))

    @cached_property
    def control_finder(self) -> ControlFinder:
        """Finder for the file's added tokens; the special ones are control tokens."""
        return ControlFinder(
            {
                added.content: AddedToken(number, added.special, added.lstrip, added.rstrip, added.single_word)
                for number, added in self._added.items()
            }
        )

    @cached_property
    def restarts_after_control(self) -> bool:
        """True if the text after a control token gets the same space as a document's start."""
        special = {added.content: number for number, added in self._added.items() if added.special}
        return self._variants.restarts_after_control(special)

    def locate_chunks(self, chunks: Sequence[Chunk]) -> list[TokenSpans]:
        """Return each chunk's ids with their character spans."""
        spans: list[TokenSpans] = []
        with library_faults(self.path):
            for chunk in chunks:
                fast = self._fast if chunk.is_first else self._variants.continuation_tokenizer
                encoding = fast.encode(chunk.text, add_special_tokens=False)
                # A special token's entry was chosen for plain text: encode again without it.
                if self.is_control[_ids(encoding)].any():
                    encoding = self._encode_guarded(chunk.text, chunk.is_first)
                starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
                spans.append(TokenSpans(_ids(encoding), starts, ends))
        return spans

    def piece(self, token: int) -> str:
        """Return an id's spelling in the file, for display; empty for an unused number."""
        return self._fast.id_to_token(int(token)) or ""

    @cached_property
    def _special_numbers(self) -> list[int]:
        """Ids of special tokens, except the unknown token's, which represents text."""
        unknown = self._json["model"].get("unk_token")
        if self._json["model"].get("unk_id") is not None:
            unknown = self._json["model"]["vocab"][self._json["model"]["unk_id"]][0]
        return [token for token, added in self._added.items() if added.special and added.content != unknown]

    def _decode_text(self, ids: list[int]) -> str:
        with library_faults(self.path):
            return self._fast.decode(ids, skip_special_tokens=False)

    def _encode_texts(self, texts: list[str], is_first: bool) -> list[np.ndarray]:
        """Encode texts so that no text becomes a special token."""
        fast = self._fast if is_first else self._variants.continuation_tokenizer
        encoded = [_ids(found) for found in fast.encode_batch_fast(texts, add_special_tokens=False)]
        for number, ids in enumerate(encoded):
            # Rare: only such a text is encoded twice.
            if self.is_control[ids].any():
                encoded[number] = _ids(self._encode_guarded(texts[number], is_first))
        return encoded

    def _encode_guarded(self, text: str, is_first: bool) -> tokenizers.Encoding:
        special = frozenset(self._added[number].content for number in self._special_numbers)
        return self._variants.guarded(special, is_first).encode(text, add_special_tokens=False)

    @cached_property
    def _is_safe_cut(self) -> IsSafeCut:
        if self._variants.splits_words:
            return self._ends_word
        plain = [added.content for added in self._added.values() if not added.special]
        normalizes = not _keeps_characters(self._json.get("normalizer"))
        # A Prepend applies to every part between added tokens, not only to the start of the text.
        if plain and "Prepend" in json.dumps(self._json.get("normalizer")):
            return never
        # Byte-level vocabularies spell bytes with other characters than the text.
        if "ByteLevel" in json.dumps(self._json.get("pre_tokenizer")):
            return never
        pieces = list(self._fast.get_vocab(with_added_tokens=False))
        has_bytes = bool(self._json["model"].get("byte_fallback"))
        return AdjacentPairs(pieces + plain, normalizes=normalizes, has_byte_fallback=has_bytes).is_safe_cut

    def _ends_word(self, text: str, at: int) -> bool:
        """Return True if a word ends here, and the tokenizer encodes both sides independently."""
        if not ends_word(text, at):
            return False
        # Compare a window instead of the full text: the check costs the same at every cut.
        left, right = text[max(0, at - _PROOF_CHARACTERS) : at], text[at : at + _PROOF_CHARACTERS]
        whole = self._fast.encode(left + right, add_special_tokens=False).ids
        halves = self._fast.encode(left, add_special_tokens=False).ids
        halves += self._variants.continuation_tokenizer.encode(right, add_special_tokens=False).ids
        return whole == halves


class _Variants:
    """Library tokenizer variants for parts of a text."""

    def __init__(self, fast: tokenizers.Tokenizer, content: dict[str, Any], path: Path) -> None:
        self._fast, self._json, self._path = fast, content, path
        self._guarded: dict[bool, tokenizers.Tokenizer] = {}

    @cached_property
    def splits_words(self) -> bool:
        """True if the pre-tokenizer cuts text into words."""
        words = self._fast.encode("a b", add_special_tokens=False).word_ids
        return len(set(words)) > 1

    @cached_property
    def continuation_tokenizer(self) -> tokenizers.Tokenizer:
        """Tokenizer for a chunk that does not start its document."""
        without_prefix = _without_prefix(self._json)
        # Words are cut before a space, which is already a leading space.
        if self.splits_words or without_prefix == self._json:
            return self._fast
        return _from_json(without_prefix, self._path)

    def restarts_after_control(self, special: Mapping[str, int]) -> bool:
        """Return True if the text after a special token is encoded like a document's start."""
        if not special or self.continuation_tokenizer is self._fast:
            return True
        content, number = next(iter(special.items()))
        # Only here a special token's text must become its id.
        self._fast.encode_special_tokens = False
        try:
            ids_after = self._fast.encode(content + _ANCHOR, add_special_tokens=False).ids
        finally:
            self._fast.encode_special_tokens = True
        return ids_after == [number, *self._fast.encode(_ANCHOR, add_special_tokens=False).ids]

    def guarded(self, special: frozenset[str], is_first: bool) -> tokenizers.Tokenizer:
        """Return the tokenizer with special tokens' vocabulary entries renamed to names that no text can spell."""
        # Build on demand: most texts spell no special token.
        if is_first not in self._guarded:
            content = self._json
            if not is_first and not self.splits_words:
                content = _without_prefix(content)
            self._guarded[is_first] = _from_json(_unspellable(content, special), self._path)
        return self._guarded[is_first]


def _control_ids(vocabulary: Mapping[str, int], special: list[int]) -> np.ndarray:
    """Return True for each id that is a special token or an unused number."""
    control = np.ones(max(vocabulary.values()) + 1, dtype=bool)
    control[list(vocabulary.values())] = False
    control[special] = True
    return control


def _ids(encoding: tokenizers.Encoding) -> np.ndarray:
    return np.array(encoding.ids, dtype=np.int32)


def _build(content: bytes, parsed: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    """Build the library's tokenizer without truncation, padding and dropout; raise DataError if it cannot be read."""
    if not isinstance(parsed.get("model"), dict):
        raise DataError(f"tokenizer={path} is not a tokenizer.json: it has no model. Copy it again.")
    # Check before the library parses it: the file is untrusted.
    check_growth(parsed, path)
    if parsed["model"].get("dropout"):
        return _from_json(parsed | {"model": parsed["model"] | {"dropout": None}}, path)
    return _from_text(content.decode(), path)


def _from_json(content: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    """Build the library's tokenizer from an edited tokenizer.json."""
    return _from_text(json.dumps(content, ensure_ascii=False), path)


def _from_text(content: str, path: Path) -> tokenizers.Tokenizer:
    try:
        with library_faults(path):
            fast = tokenizers.Tokenizer.from_str(content)
    except DataError:
        raise
    except Exception as error:  # the library raises no narrower class
        raise DataError(f"tokenizer={path} cannot be read by `tokenizers`: {error}. Copy it again.") from error
    fast.no_truncation()
    fast.no_padding()
    # Special tokens spelt in a text stay text.
    fast.encode_special_tokens = True
    return fast


def _frame(fast: tokenizers.Tokenizer) -> tuple[int | None, int | None]:
    """Return the ids that the post-processor puts before and after a text."""
    ids = fast.encode("a", add_special_tokens=False).ids
    framed = fast.encode("a", add_special_tokens=True).ids
    if len(framed) <= len(ids):
        return None, None
    start = next((at for at in range(len(framed)) if framed[at : at + len(ids)] == ids), 0)
    before, after = framed[:start], framed[start + len(ids) :]
    if len(before) > 1 or len(after) > 1:
        raise DataError("a tokenizer that puts more than one token before or after a text is not supported.")
    return (before or [None])[0], (after or [None])[0]


def _fingerprint(content: dict[str, Any], begin: int | None, end: int | None) -> str:
    """Return the xxh3_128 over everything that affects ids.

    Excluded are the decoder, the post-processor's pairs, truncation, padding and version.
    """
    model = dict(content["model"])
    if model.get("merges"):
        model["merges"] = _pairs(model["merges"])
    # Loading disables dropout.
    model["dropout"] = None
    deciding = [content.get(key) for key in ("normalizer", "pre_tokenizer", "added_tokens")]
    canonical = json.dumps([deciding, model, begin, end], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def _pairs(merges: list[Any]) -> list[list[str]]:
    """Return merges as pairs: older files write "a b", newer ones ["a", "b"]."""
    if isinstance(merges[0], str):
        return [merge.split(" ", 1) for merge in merges]
    return merges


def _without_prefix(content: dict[str, Any]) -> dict[str, Any]:
    """Return the same tokenizer without the space that it puts before a text."""
    edited = dict(content)
    for part in ("normalizer", "pre_tokenizer"):
        edited[part] = _edit_steps(content.get(part))
    return edited


def _edit_steps(step: Any) -> Any:
    """Return a pipeline step without its prefix; None if it only adds the prefix."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Prepend":
        return None
    if step.get("type") == "Metaspace":
        return step | {"prepend_scheme": "never"}
    if step.get("type") == "Sequence":
        key = "normalizers"
        if key not in step:
            key = "pretokenizers"
        steps = [_edit_steps(inner) for inner in step[key]]
        return step | {key: [inner for inner in steps if inner is not None]}
    return step


def _keeps_characters(normalizer: Any) -> bool:
    """Return True if a normalizer only respells spaces and adds a leading one."""
    if normalizer is None:
        return True
    kind = normalizer.get("type")
    if kind == "Sequence":
        return all(_keeps_characters(inner) for inner in normalizer["normalizers"])
    return kind == "Prepend" or (kind == "Replace" and normalizer.get("pattern") == {"String": " "})


def _unspellable(content: dict[str, Any], special: frozenset[str]) -> dict[str, Any]:
    """Return the same tokenizer with special tokens renamed to unspellable names, and without merges into them."""
    names = {token: f"\U0010ffff{xxhash.xxh3_128_hexdigest(token.encode())}\U0010fffe" for token in special}
    model = dict(content["model"])
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): token for piece, token in model["vocab"].items()}
    if model.get("merges"):
        pairs = _pairs(model["merges"])
        model["merges"] = [pair for pair in pairs if not special.intersection((pair[0], pair[1], pair[0] + pair[1]))]
    added = [token | {"content": names.get(token["content"], token["content"])} for token in content["added_tokens"]]
    return content | {"model": model, "added_tokens": added, "post_processor": None}
