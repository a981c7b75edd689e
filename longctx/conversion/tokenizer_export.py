"""A model's tokenizer as files in a Hugging Face folder, checked id by id against transformers.

Files that came with a model are written byte for byte. A standalone SentencePiece model becomes a fast tokenizer.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from longctx.conversion.weights.json_files import write_json
from longctx.errors import DataError
from longctx.families.spec import START_KEY
from longctx.files import write_atomically
from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.chat_templates import TEMPLATE_FILE, has_templates, hf_path
from longctx.tokenizer.image_tokenizer import IMAGE_FILE, ImageTokenizer
from longctx.tokenizer.load_tokenizer import COPIED_FILES, GENERATION_CONFIG, MODEL_FILE, has_tokenizer
from longctx.tokenizer.special import TOKENIZER_CONFIG, read_tokenizer_json
from longctx.tokenizer.tokenizer_warnings import frame_warnings, missing_rows_warning

log = logging.getLogger(__name__)

FAST_FILES = tuple(
    name for name in COPIED_FILES if name not in (MODEL_FILE, GENERATION_CONFIG, TEMPLATE_FILE, IMAGE_FILE)
)
"""Files that transformers reads a tokenizer from. Chat templates are excluded: ``data build`` adds one to any
tokenizer. So is the format of images, which becomes an image processor."""


def export_tokenizer(tokenizer: Tokenizer | str | Path, folder: str | Path, *, max_positions: int) -> dict[str, Any]:
    """Write a tokenizer's files into ``folder``; return its special token ids for config.json.

    Raise DataError if no tokenizer.json can express the SentencePiece model.
    """
    folder = Path(folder)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    for name, content in tokenizer.files.items():
        write_atomically(folder / hf_path(name), content)
    if not came_from_hf(tokenizer):
        from longctx.tokenizer.export import fast_files
        from longctx.tokenizer.sentencepiece_model import SentencePieceTokenizer

        assert isinstance(tokenizer, SentencePieceTokenizer)
        for name, content in fast_files(tokenizer, max_positions=max_positions).items():
            write_json(folder / name, content)
    return config_ids(tokenizer)


def log_tokenizer_warnings(tokenizer: Tokenizer | Path, rows: int) -> None:
    """Warn about contradictory begin and end ids in a tokenizer, and about ids beyond the model's rows.

    A folder's files are converted unchanged, even if longctx cannot read its tokenizer.
    """
    if isinstance(tokenizer, Path):
        if not has_tokenizer(tokenizer):
            return
        try:
            tokenizer = load_tokenizer(tokenizer)
        except DataError as error:
            log.warning("The tokenizer's files are copied without being read. %s", error)
            return
    # An image is not begun or ended by an id, and patches have none.
    if isinstance(tokenizer, ImageTokenizer):
        return
    for warning in frame_warnings(tokenizer):
        log.warning("%s: %s", tokenizer.path, warning)
    vocab_warning = missing_rows_warning(tokenizer, rows)
    if vocab_warning is not None:
        log.warning("%s", vocab_warning)


def replaced_ids(ids: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return replacements for ids in config.json that transformers rejects in a model with ``rows`` rows.

    transformers takes one begin id, although a file may list several, and a padding id only if it has a row.
    """
    replaced: dict[str, Any] = {}
    for key in ("bos_token_id", "pad_token_id"):
        value = ids.get(key)
        if isinstance(value, list):
            replaced[key] = next(iter(value), None)
    padding = replaced.get("pad_token_id", ids.get("pad_token_id"))
    # As in torch's Embedding: negative ids count from the end.
    if padding is not None and not -rows <= padding < rows:
        replaced["pad_token_id"] = None
    return replaced


def came_from_hf(tokenizer: Tokenizer) -> bool:
    """Return True if transformers reads the tokenizer from its original files."""
    return any(name in FAST_FILES for name in tokenizer.files)


def is_qwen(tokenizer: Tokenizer) -> bool:
    """Return True if the tokenizer is for the class that transformers loads for every Qwen model type."""
    settings = read_tokenizer_json(tokenizer.files, TOKENIZER_CONFIG, tokenizer.path)
    return str(settings.get("tokenizer_class", "")).startswith("Qwen2Tokenizer")


def config_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the token ids for config.json; several end ids become a list.

    A target starts with the id from the files; without one, with the begin id, or the end id if that is missing too.
    """
    special = tokenizer.special
    end: int | list[int] | None = special.end
    if len(special.stop_ids) > 1:
        end = list(special.stop_ids)
    start, before = special.start, tokenizer.prefix_ids
    if not len(before):
        before = tokenizer.suffix_ids
    if start is None and len(before):
        start = int(before[-1])
    forced = {"forced_bos_token_id": special.forced_begin, "forced_eos_token_id": special.forced_end}
    return {
        "bos_token_id": special.bos,
        "eos_token_id": end,
        "pad_token_id": special.padding,
        START_KEY: start,
    } | forced


def check_tokenizer(tokenizer: Tokenizer | str | Path, folder: str | Path, texts: Iterable[str]) -> None:
    """Raise DataError unless transformers loads a tokenizer from the folder that encodes texts like ``generate``.

    The check covers ``texts``, and every piece in a SentencePiece vocabulary. For our own models, decoding must restore
    the text. For files that came with a model, texts that spell a special token are skipped: the model's own settings
    decide whether transformers reads them as the token.
    """
    from transformers import AutoTokenizer

    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    fast = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    # Long texts must not log warnings from this instance.
    fast.model_max_length = 2**60
    if not came_from_hf(tokenizer) and has_templates(tokenizer.files):
        # With a chat template, transformers reads control tokens in text as tokens; this check compares plain text.
        fast.split_special_tokens = True
    texts, is_reversible = _texts_to_check(tokenizer, fast, texts)
    for text in texts:
        expected_ids, actual_ids = tokenizer.encode_prompt(text), fast(text)["input_ids"]
        if not is_reversible:
            # Some tokenizers also append an end id, which a prompt does not have.
            actual_ids = actual_ids[: len(actual_ids) - _num_appended_ids(fast)]
        if expected_ids != actual_ids:
            at = next(
                (i for i, (a, b) in enumerate(zip(expected_ids, actual_ids, strict=False)) if a != b), len(expected_ids)
            )
            raise DataError(
                f"the exported tokenizer differs from {tokenizer.path} on {text!r}, from token {at} on: "
                f"{actual_ids[at : at + 8]} instead of {expected_ids[at : at + 8]}.\n"
                "Export with the model's own files (--tokenizer DIR), or without a tokenizer (--tokenizer none)."
            )
        decoded = fast.decode(actual_ids, skip_special_tokens=True)
        if is_reversible and decoded != text:
            raise DataError(f"the exported tokenizer decodes {text!r} as {decoded!r}.")


def _texts_to_check(tokenizer: Tokenizer, fast: Any, texts: Iterable[str]) -> tuple[Iterable[str], bool]:
    """Return the texts to compare, and True if each must be restored exactly."""
    if came_from_hf(tokenizer):
        return [text for text in texts if not any(special in text for special in fast.all_special_tokens)], False
    from longctx.tokenizer.export import piece_texts
    from longctx.tokenizer.sentencepiece_model import SentencePieceTokenizer

    assert isinstance(tokenizer, SentencePieceTokenizer)
    if len(fast) != tokenizer.vocab_size:
        raise DataError(f"the export has {len(fast)} token ids, {tokenizer.path} has {tokenizer.vocab_size}.")
    return itertools.chain(texts, piece_texts(tokenizer)), tokenizer.is_own


def _num_appended_ids(fast: Any) -> int:
    """Count the ids that transformers appends to a text."""
    with_frame, without = fast("a")["input_ids"], fast("a", add_special_tokens=False)["input_ids"]
    # The plain ids occur within the framed ones; all ids after them were appended.
    for start in range(len(with_frame)):
        if with_frame[start : start + len(without)] == without:
            return len(with_frame) - start - len(without)
    return 0
