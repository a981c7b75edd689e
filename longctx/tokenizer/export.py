"""Export from SentencePiece to Hugging Face's fast tokenizer files.

Our own models are written with real spaces in their vocabulary pieces. They need no normaliser then, and U+2581 itself
in a text falls back to its three bytes, as in training data. Other models keep SentencePiece's spelling of spaces, with
the normaliser and the leading space that their own file requests.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from longctx.errors import DataError
from longctx.tokenizer.chat_templates import has_templates
from longctx.tokenizer.sentencepiece_model import SentencePieceTokenizer
from longctx.tokenizer.text_chunks import SPACE_MARK

_NEVER_CHOSEN = -1e4
"""Score for a control or byte piece in an exported Unigram: text that spells it is never cheaper as that piece."""


def fast_files(tokenizer: SentencePieceTokenizer, *, max_positions: int) -> dict[str, dict[str, Any]]:
    """Return tokenizer.json and tokenizer_config.json; raise DataError if they cannot express the model.

    The files start a text with ``document_begin``, as ``generate`` and training data do.
    """
    _check_expressible(tokenizer)
    return {"tokenizer.json": _content(tokenizer), "tokenizer_config.json": _config(tokenizer, max_positions)}


def piece_texts(tokenizer: SentencePieceTokenizer, group: int = 100) -> Iterator[str]:
    """Yield all piece names, ``group`` at a time, with and without white space between them."""
    names = _spaced(tokenizer)
    for start in range(0, len(names), group):
        for between in ("", " ", "\n"):
            yield between.join(names[start : start + group])


def _check_expressible(tokenizer: SentencePieceTokenizer) -> None:
    """Raise DataError if no tokenizer.json can give the model's ids."""
    model = tokenizer.processor
    pieces = range(tokenizer.vocab_size)
    # Collect all reasons: each one alone rules a tokenizer.json out.
    reasons = {
        f"its type is {tokenizer.model_type}, not BPE or Unigram": tokenizer.model_type not in ("BPE", "Unigram"),
        "it has unused pieces": any(model.is_unused(i) for i in pieces),
        "it writes spaces after words": tokenizer.trainer.treat_whitespace_as_suffix,
        "it has no piece for a space": tokenizer.is_own and model.is_unknown(model.piece_to_id(SPACE_MARK)),
        "two pieces differ only by U+2581 and a space": tokenizer.is_own
        and len(set(_spaced(tokenizer))) != tokenizer.vocab_size,
    }
    if found := [reason for reason, condition in reasons.items() if condition]:
        raise DataError(
            f"{tokenizer.path} has no exact fast tokenizer: {'; '.join(found)}.\n"
            "Export with the model's own files (--tokenizer DIR), or without a tokenizer (--tokenizer none)."
        )


def _content(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    """Return the contents of tokenizer.json."""
    normalizer = pre_tokenizer = unknown = None
    decoders: list[dict[str, Any]] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if tokenizer.is_own:
        # Pieces with real spaces need no normaliser.
        texts = _spaced(tokenizer)
    else:
        # As SentencePiece encodes it, with spaces written as U+2581.
        texts = [tokenizer.piece(i) for i in range(tokenizer.vocab_size)]
        unknown = texts[tokenizer.processor.unk_id()]
        normalizer = {"type": "Sequence", "normalizers": list(_normalizers(tokenizer))}
        pre_tokenizer = _prefix_step(tokenizer)
        decoders.insert(0, {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "})
        # Decoding drops the dummy prefix again.
        if tokenizer.normalizer.add_dummy_prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if tokenizer.model_type == "Unigram":
        model = _unigram(tokenizer, texts)
    else:
        model = _bpe(tokenizer, texts, unknown=unknown)
    added = [_added(i, texts[i], special=True) for i in _control_ids(tokenizer)]
    # These are matched in the text before any merge.
    added += [_added(i, texts[i], special=False) for i in tokenizer.user_defined]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _frame(tokenizer),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _normalizers(tokenizer: SentencePieceTokenizer) -> Iterator[dict[str, Any]]:
    """Yield the normalisation steps in the model's file."""
    spec = tokenizer.normalizer
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        yield {"type": "Precompiled", "precompiled_charsmap": charsmap}
    if spec.remove_extra_whitespaces:
        yield {"type": "Replace", "pattern": {"Regex": rf"\A +|[ {SPACE_MARK}]+\z"}, "content": ""}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    # With user-defined symbols ``_prefix_step`` adds the prefix.
    if spec.add_dummy_prefix and not tokenizer.user_defined:
        yield {"type": "Prepend", "prepend": SPACE_MARK}
    yield {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}


def _prefix_step(tokenizer: SentencePieceTokenizer) -> dict[str, Any] | None:
    """Return the step that puts a space before a text that user-defined symbols may cut."""
    if not tokenizer.normalizer.add_dummy_prefix or not tokenizer.user_defined:
        return None
    # A normaliser would put a space before each part of the text.
    return {"type": "Metaspace", "replacement": SPACE_MARK, "prepend_scheme": "first", "split": False}


def _bpe(tokenizer: SentencePieceTokenizer, texts: list[str], *, unknown: str | None) -> dict[str, Any]:
    """Return a BPE model from the pieces' ranks."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": tokenizer.has_byte_fallback,
        "ignore_merges": False,
        "vocab": {text: i for i, text in enumerate(texts)},
        "merges": list(_merges(tokenizer, texts)),
    }


def _unigram(tokenizer: SentencePieceTokenizer, texts: list[str]) -> dict[str, Any]:
    """Return a Unigram model from the pieces' scores."""
    bytes_alone = [i for i in range(tokenizer.vocab_size) if tokenizer.processor.is_byte(i)]
    fixed = {*_control_ids(tokenizer), *bytes_alone, tokenizer.processor.unk_id()}
    vocabulary: list[list[Any]] = []
    for i, text in enumerate(texts):
        score = tokenizer.processor.get_score(i)
        if i in fixed:
            score = _NEVER_CHOSEN
        vocabulary.append([text, score])
    return {
        "type": "Unigram",
        "unk_id": tokenizer.processor.unk_id(),
        "vocab": vocabulary,
        "byte_fallback": tokenizer.has_byte_fallback,
    }


def _merges(tokenizer: SentencePieceTokenizer, texts: list[str]) -> Iterator[list[str]]:
    """Yield every way to merge two pieces into a third, best result first."""
    # SentencePiece ranks pieces and a fast tokenizer ranks merges, so the merges for one piece get an order that
    # SentencePiece does not have. The order did not matter in 1,500 vocabularies with one to three letters.
    learned = _learned(tokenizer)
    known = {texts[i] for i in learned}
    for i in sorted(learned, key=tokenizer.processor.get_score, reverse=True):
        text = texts[i]
        for at in range(1, len(text)):
            if text[:at] in known and text[at:] in known:
                yield [text[:at], text[at:]]


def _learned(tokenizer: SentencePieceTokenizer) -> list[int]:
    """Return the pieces that text can become by merging."""
    model = tokenizer.processor
    fixed = {*_control_ids(tokenizer), *tokenizer.user_defined, model.unk_id()}
    return [i for i in range(tokenizer.vocab_size) if i not in fixed and not model.is_byte(i)]


def _control_ids(tokenizer: SentencePieceTokenizer) -> list[int]:
    return [i for i in range(tokenizer.vocab_size) if tokenizer.processor.is_control(i)]


def _spaced(tokenizer: SentencePieceTokenizer) -> list[str]:
    """Return each piece's text with real spaces; names of control and byte pieces are unchanged."""
    names = [tokenizer.piece(i) for i in range(tokenizer.vocab_size)]
    for i in _learned(tokenizer):
        names[i] = names[i].replace(SPACE_MARK, " ")
    return names


def _added(token: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "special": special}
    # A user-defined symbol is matched after spaces are spelt as in the vocabulary.
    return {"id": token, "content": content, "normalized": not special, **flags}


def _frame(tokenizer: SentencePieceTokenizer) -> dict[str, Any] | None:
    """Return the post-processor that puts the begin id before a text; None without a begin id."""
    begin = tokenizer.document_begin
    if begin is None:
        return None
    name = tokenizer.piece(begin)
    before = {"SpecialToken": {"id": name, "type_id": 0}}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [before, first],
        "pair": [before, first, second],
        "special_tokens": {name: {"id": name, "ids": [begin], "tokens": [name]}},
    }


def _config(tokenizer: SentencePieceTokenizer, max_positions: int) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json."""
    special = tokenizer.special
    roles = {"bos_token": special.bos, "eos_token": special.end, "pad_token": special.padding}
    others = [tokenizer.piece(i) for i in _control_ids(tokenizer) if i not in roles.values()]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, token in roles.items():
        config[role] = None
        if token is not None:
            config[role] = tokenizer.piece(token)
    if not tokenizer.is_own:
        config["unk_token"] = tokenizer.piece(tokenizer.processor.unk_id())
    return config | {
        "additional_special_tokens": others,
        # Control symbols in a text stay text, as in SentencePiece; but transformers must read those that a template
        # wrote.
        "split_special_tokens": not has_templates(tokenizer.files),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
