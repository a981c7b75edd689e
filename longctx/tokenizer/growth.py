"""Limits on text growth in an untrusted tokenizer, and its failures as our errors.

A normalizer that replaces each letter by a megabyte, or ten that each double the text, would fill the memory with the
first line of text. The library runs them within one call, so the worst case is computed from the file before anything
is encoded: the product, over all steps, of the maximum characters made from one.
"""

from __future__ import annotations

import base64
import binascii
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longctx.errors import DataError
from longctx.tokenizer.patterns import shortest_match

MOST_GROWTH = 256
"""Maximum characters that a normalizer, pre-tokenizer or decoder may make from one, and maximum ids around a text."""
_MOST_STEPS = 256
"""Maximum steps in each; published tokenizers have at most ten."""
MOST_AFFIX = 64
"""Maximum characters in a prefix or suffix that the model adds to a word piece, for each word piece that it tries."""
MOST_WORD = 256
"""Maximum characters in a word for WordPiece, with time cubic in this number. Published tokenizers have 100."""
MOST_PIECE = 512
"""Maximum characters in a Unigram vocabulary piece, tried at each character of a text. Trained pieces have 16."""
_PARTS = (
    ("normalizer", "normalizers"),
    ("pre_tokenizer", "pretokenizers"),
    ("decoder", "decoders"),
    ("post_processor", "processors"),
)


def check_growth(content: dict[str, Any], path: Path) -> None:
    """Raise DataError if a tokenizer.json may multiply a text, or the time for it, past the limits."""
    before = 1.0
    for part, list_name in _PARTS:
        steps = list(_steps(content.get(part), list_name))
        growth = 1.0
        # The pre-tokenizer gets the normalizer's output.
        if part == "pre_tokenizer":
            growth = before
        # Factors multiply: each step may expand the previous one's output.
        for step in steps[:_MOST_STEPS]:
            growth *= _GROWTHS[part](step)
        if len(steps) > _MOST_STEPS or growth > MOST_GROWTH:
            raise DataError(
                f"tokenizer={path}: its {part} may expand one character to {growth:.3g} in {len(steps)} steps; the "
                f"limit is {MOST_GROWTH} in {_MOST_STEPS}. Take the tokenizer from its publisher."
            )
        before = growth
    _check_model(content.get("model"), path)


def check_charsmap(charsmap: bytes, path: Path) -> None:
    """Raise DataError if a SentencePiece model's character map makes too much text from one character."""
    check_size_limits({"its map produces a text, in bytes,": longest_text(charsmap)}, MOST_GROWTH, path)


def check_size_limits(lengths: dict[str, int], most: int, path: Path) -> None:
    """Raise DataError for a length greater than ``most``."""
    for name, length in lengths.items():
        if length > most:
            raise DataError(
                f"tokenizer={path}: {name} of length {length:,}; the limit is {most}. "
                "Take the tokenizer from its publisher."
            )


@contextmanager
def library_faults(path: Path) -> Iterator[None]:
    """Turn panics in the library ``tokenizers``, for example from an endless regular expression, into a DataError."""
    try:
        yield
    except BaseException as error:
        # pyo3's class is not a subclass of Exception, and cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        reason = str(error).splitlines()[0][:200] if str(error) else "it panics"
        raise DataError(
            f"tokenizer={path} cannot be used: `tokenizers` fails on it: {reason}. Take it from its publisher."
        ) from None


def _steps(step: Any, list_name: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a section's steps, including those in nested sequences."""
    if not isinstance(step, dict) or depth > _MOST_STEPS:
        return
    inner = step.get(list_name)
    if step.get("type") == "Sequence" and isinstance(inner, list):
        for one in inner:
            yield from _steps(one, list_name, depth + 1)
    else:
        yield step


def _check_model(model: Any, path: Path) -> None:
    """Raise DataError if the model may take too long for a word."""
    if not isinstance(model, dict):
        return
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    check_size_limits({f"its {name} is": len(str(model.get(name) or "")) for name in affixes}, MOST_AFFIX, path)
    word = model.get("max_input_chars_per_word")
    if isinstance(word, int):
        check_size_limits({"its max_input_chars_per_word allows a word": word}, MOST_WORD, path)
    pieces = model.get("vocab")
    # A Unigram's vocabulary is a list of (piece, score) pairs.
    if isinstance(pieces, list):
        longest = max((len(piece[0]) for piece in pieces if isinstance(piece, list) and _is_text(piece)), default=0)
        check_size_limits({"it has a piece": longest}, MOST_PIECE, path)


def _is_text(piece: list[Any]) -> bool:
    return bool(piece) and isinstance(piece[0], str)


def _normalizer_growth(step: dict[str, Any]) -> float:
    """Return the maximum characters that a step makes from one."""
    # Unicode normal forms count as 1: they make a text at most 18 times longer, and repeating them adds no more. Text
    # inserted by another step counts with its expansion (``_made``).
    kind = step.get("type")
    if kind == "Replace":
        return _replaced(step)
    if kind == "Prepend":
        return max(1.0, float(_made(str(step.get("prepend", "")))))
    if kind == "Precompiled":
        return max(1.0, float(_longest(step.get("precompiled_charsmap"))))
    # A byte becomes a character; a Chinese character gets a space on both sides.
    return {"ByteLevel": 4.0, "BertNormalizer": 3.0}.get(str(kind), 1.0)


def _pre_tokenizer_growth(step: dict[str, Any]) -> float:
    """Return the maximum characters that a step makes from one; steps that only cut add no characters."""
    if step.get("type") == "ByteLevel":
        return 4.0 + (step.get("add_prefix_space") is not False)
    # The prefix precedes each part of the text, and such a part may be one character.
    return 2.0 if step.get("type") == "Metaspace" else 1.0


def _decoder_growth(step: dict[str, Any]) -> float:
    """Return the maximum characters that a decoder step makes from one."""
    if step.get("type") in ("Replace", "Prepend"):
        return _normalizer_growth(step)
    # An empty string matches before every character. One space per token is not a multiple.
    empty = {"BPEDecoder": step.get("suffix"), "CTC": step.get("word_delimiter_token")}.get(str(step.get("type")))
    return 2.0 if empty == "" else 1.0


def _post_processor_growth(step: dict[str, Any]) -> float:
    """Return the number of ids around and in place of one id."""
    template, special = step.get("single"), step.get("special_tokens")
    if not isinstance(template, list) or not isinstance(special, dict):
        return 1.0
    count = 0
    for piece in template:
        token = piece.get("SpecialToken") if isinstance(piece, dict) else None
        entry = special.get(str(token.get("id"))) if isinstance(token, dict) else None
        ids = entry.get("ids") if isinstance(entry, dict) else None
        count += len(ids) if isinstance(ids, list) else 1
    return max(1.0, float(count))


_GROWTHS = {
    "normalizer": _normalizer_growth,
    "pre_tokenizer": _pre_tokenizer_growth,
    "decoder": _decoder_growth,
    "post_processor": _post_processor_growth,
}


def _replaced(step: dict[str, Any]) -> float:
    """Return the maximum characters that a Replace makes from one."""
    pattern, least = step.get("pattern"), 0
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        least = len(pattern["String"])
    elif isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        least = shortest_match(pattern["Regex"])
    made = _made(str(step.get("content", "")))
    # An empty match occurs before every character, which stays.
    return max(1.0, made / least) if least else 1.0 + made


def _made(text: str) -> int:
    """Return a text's length, or that of its longest Unicode form: a letter may expand to 18."""
    return max(len(text), len(unicodedata.normalize("NFKD", text.lower())))


def _longest(charsmap: Any) -> int:
    """Return the length of the longest replacement text in a base64 character map."""
    try:
        return longest_text(base64.b64decode(str(charsmap or "")))
    except (binascii.Error, ValueError):
        return 0


def longest_text(charsmap: bytes) -> int:
    """Return the length of the longest replacement text in a character map, in bytes or as in ``_made``.

    The texts are zero-terminated, after a table with its length in the first four bytes.
    """
    begin = 4 + int.from_bytes(charsmap[:4], "little")
    texts = charsmap[begin:].split(b"\0")
    longest = max(map(len, texts))
    # Skip the expansion for a text that is too long already.
    if longest > MOST_GROWTH:
        return longest
    return max(longest, max(_made(text.decode("utf-8", "replace")) for text in texts))
