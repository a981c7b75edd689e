"""A SentencePiece BPE as Hugging Face fast tokenizer files, checked id for id.

SentencePiece writes a space as U+2581 inside its pieces. The exported pieces have real spaces instead, so no normaliser
is needed, and U+2581 itself in a text falls back to its three bytes, as it does when training data is built.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from longctx.conversion.weights.json_files import write_json
from longctx.errors import ConfigError, DataError

SPACE_MARK = "\u2581"
SENTENCEPIECE_FILE = "tokenizer.model"

HARD_TEXTS = (
    "",
    " ",
    "   leading, trailing   ",
    "def f(x):\n\tif x:\n\t\treturn  [x,   2]\n\n\n",
    "a\r\nb\rc\n\r",
    "nul \x00 bell \x07 delete \x7f escape \x1b[0m",
    "\ufeffBOM, zero\u200bwidth, no\u00a0break, ideographic\u3000space, separators \u2028\u2029\x85",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈 and \U0010ffff",
    "e\u0301 é ﬁ ① Å ｆｕｌｌ ẛ̣ 가 각",
    "中文，日本語、한국어 עברית العربية हिन्दी",
    "1234567890 3.14159 0x00FF 1e-10",
    "<s></s><unk><pad><0x41><0x00><|endoftext|> <|document_begin|>text<|document_end|><|padding|>",
    f"{SPACE_MARK}raw{SPACE_MARK}{SPACE_MARK}mark {SPACE_MARK}",
    "=" * 67 + "-" * 33 + " " * 41 + "\t" * 9 + "ababababa" + "aaaaaaaaaaaa",
)
"""Texts that exports are checked on: tokenizers have differed on each kind of them."""


def export_tokenizer(
    sentencepiece_model: str | Path, folder: str | Path, *, max_vocab_size: int, max_positions: int
) -> dict[str, int | None]:
    """Write tokenizer.json, tokenizer_config.json and tokenizer.model; return the begin, end and padding ids.

    DataError for a model whose ids a fast tokenizer cannot reproduce (not BPE, no byte fallback, a normaliser).
    """
    source, folder = Path(sentencepiece_model), Path(folder)
    model = _load(source)
    _check_supported(model, source)
    if model.vocab_size() > max_vocab_size:
        raise DataError(f"{source} has {model.vocab_size()} ids, more than model.vocab_size={max_vocab_size}.")
    write_json(folder / "tokenizer.json", _tokenizer_json(model))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(model, max_positions))
    shutil.copyfile(source, folder / SENTENCEPIECE_FILE)
    ids: dict[str, int | None] = {}
    for key, value in (
        ("bos_token_id", model.bos_id()),
        ("eos_token_id", model.eos_id()),
        ("pad_token_id", model.pad_id()),
    ):
        # SentencePiece says −1 of a token that the model does not have.
        ids[key] = None
        if value >= 0:
            ids[key] = value
    return ids


def check_tokenizer(sentencepiece_model: str | Path, folder: str | Path, texts: Iterable[str]) -> None:
    """DataError unless the folder's tokenizer, as transformers loads it, gives SentencePiece's ids and the text back.

    ``texts`` and every piece of the vocabulary are compared. U+2581 is expected as its three bytes: SentencePiece alone
    would read it as a space, training data never does.
    """
    model = _load(Path(sentencepiece_model))
    fast = _auto_tokenizer().from_pretrained(str(folder), local_files_only=True)
    # This instance shall not warn of long texts.
    fast.model_max_length = 2**60
    if len(fast) != model.vocab_size():
        raise DataError(f"{folder} has {len(fast)} token ids, {sentencepiece_model} has {model.vocab_size()}.")
    for text in itertools.chain(texts, _piece_texts(model)):
        wanted = sentencepiece_ids(model, text)
        found = fast(text)["input_ids"]
        if wanted != found:
            at = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), len(wanted))
            raise DataError(
                f"the exported tokenizer differs from {sentencepiece_model} on {text!r}, from token {at} on: "
                f"{found[at : at + 8]} instead of {wanted[at : at + 8]}."
            )
        back = fast.decode(found)
        if back != text:
            raise DataError(f"the exported tokenizer does not give {text!r} back, but {back!r}.")


def sentencepiece_ids(model: Any, text: str) -> list[int]:
    """The ids of a text as training data has them: SentencePiece's, but U+2581 as its bytes and not as a space."""
    # Training data is built that way (``data_pipeline.tokenizer``), so that every text comes back as it was.
    mark = [model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
    first, *others = text.split(SPACE_MARK)
    ids = model.encode(first)
    for part in others:
        ids += mark + model.encode(part)
    return ids


def _piece_texts(model: Any, group: int = 100) -> Iterator[str]:
    """Yield the names of all pieces, ``group`` at a time, with and without white space between them."""
    names = _texts(model)
    for start in range(0, len(names), group):
        for between in ("", " ", "\n"):
            yield between.join(names[start : start + group])


def _load(path: Path) -> Any:
    """The SentencePiece model; its library is imported only where a tokenizer is exported."""
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path} is not a readable SentencePiece model: {error}.") from error


def _auto_tokenizer() -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            "exporting a tokenizer checks it with transformers, which is not installed.\nTry: pip install transformers"
        ) from error
    return AutoTokenizer


def _check_supported(model: Any, path: Path) -> None:
    """DataError for a model whose ids a fast tokenizer cannot reproduce."""
    pieces = range(model.vocab_size())
    # Every usual normaliser changes something in it.
    probe = " ①  ﬁ\tx  "
    reasons = {
        "it is not a BPE": any(not model.get_score(i).is_integer() or model.get_score(i) > 0 for i in pieces),
        "it has no byte fallback": sum(model.is_byte(i) for i in pieces) != 256,
        "it has user-defined symbols": len([i for i in _learned(model) if model.get_score(i) == 0]) > 1,
        "it has unused pieces": any(model.is_unused(i) for i in pieces),
        "it normalises text": model.normalize(probe) != probe.replace(" ", SPACE_MARK),
        "it has no piece for a space": model.is_unknown(model.piece_to_id(SPACE_MARK)),
        "two of its pieces differ by U+2581 and a space only": len(set(_texts(model))) != model.vocab_size(),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise DataError(
            f"{path} has no exact fast tokenizer: {'; '.join(found)}.\n"
            "Train it with `longctx tokenizer train`, or export without a tokenizer."
        )


def _texts(model: Any) -> list[str]:
    """The text of each piece; the names of control and byte pieces as they are."""
    names = model.id_to_piece(list(range(model.vocab_size())))
    for i in _learned(model):
        names[i] = names[i].replace(SPACE_MARK, " ")
    return names


def _learned(model: Any) -> list[int]:
    """Pieces that text can become by merging. The best has score 0, and so has every user-defined symbol."""
    special = (model.is_control, model.is_byte, model.is_unknown)
    return [i for i in range(model.vocab_size()) if not any(is_kind(i) for is_kind in special)]


def _tokenizer_json(model: Any) -> dict[str, Any]:
    """The contents of tokenizer.json."""
    texts = _texts(model)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, texts[i]) for i in range(len(texts)) if model.is_control(i)],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(texts)},
            "merges": list(_merges(model, texts)),
        },
    }


def _added(token: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token, "content": content, **flags}


def _merges(model: Any, texts: list[str]) -> Iterator[list[str]]:
    """Yield every way to make a piece of two others, best piece first.

    SentencePiece ranks pieces and a fast tokenizer ranks merges, so the merges of one piece get an order that
    SentencePiece does not have. The order did not matter in 1,500 vocabularies of one to three letters.
    """
    learned = _learned(model)
    known = {texts[i] for i in learned}
    for i in sorted(learned, key=model.get_score, reverse=True):
        text = texts[i]
        for at in range(1, len(text)):
            if text[:at] in known and text[at:] in known:
                yield [text[:at], text[at:]]


def _tokenizer_config(model: Any, max_positions: int) -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    roles = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "pad_token": model.pad_id()}
    controls = [i for i in range(model.vocab_size()) if model.is_control(i)]
    others = [model.id_to_piece(i) for i in controls if i not in roles.values()]
    tokenizer: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, token in roles.items():
        # SentencePiece says −1 of a token that the model does not have.
        tokenizer[role] = None
        if token >= 0:
            tokenizer[role] = model.id_to_piece(token)
    return tokenizer | {
        "additional_special_tokens": others,
        # Control symbols in a text are text, as for SentencePiece; control tokens are given as ids.
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
