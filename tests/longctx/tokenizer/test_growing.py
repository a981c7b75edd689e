"""Tokenizers that multiply a text, or the time for one: each is refused by name, in bounded memory."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import sentencepiece_model_pb2

from tests.growing import grow

ACTION = """
from longctx.errors import LongCtxError
from longctx.tokenizer.load_tokenizer import load_tokenizer
RUNS = "a" * 3000, " " * 2000 + "x", "1" * 2000 + "x", "x" * 2000 + "!?"
TEXTS = [*RUNS, "é漢\U0001f600" * 300 + "!", "ab c\\n" * 500]

def action(path):
    tokenizer = load_tokenizer(path)
    ids = [tokenizer.encode(text) for text in TEXTS]
    for number in ids:
        tokenizer.decode(number)
    return f"{sum(map(len, ids))} ids"
"""
Content = dict[str, Any]


def bpe(**parts: Any) -> Content:
    vocab = {chr(c): number for number, c in enumerate(range(32, 0x180))}
    model = {"type": "BPE", "unk_token": None, "vocab": vocab, "merges": []} | parts.pop("model", {})
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": [], **empty, **parts, "model": model}


def word_piece(**more: Any) -> Content:
    vocab = {"[UNK]": 0, "a": 1, "##a": 2}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocab}
    return bpe() | {"model": model | {"max_input_chars_per_word": 100} | more}


def unigram(length: int) -> Content:
    vocab = [["<unk>", 0.0], ["a", -1.0], ["a" * length, -2.0]]
    return bpe() | {"model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}}


def normalizers(*steps: Content) -> Content:
    return bpe(normalizer={"type": "Sequence", "normalizers": list(steps)})


def pre_tokenizers(*steps: Content) -> Content:
    return bpe(pre_tokenizer={"type": "Sequence", "pretokenizers": list(steps)})


def decoders(*steps: Content) -> Content:
    return bpe(decoder={"type": "Sequence", "decoders": list(steps)})


def replace(pattern: str, content: str, kind: str = "String") -> Content:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(pattern: str) -> Content:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def template(*single: Content, ids: int = 1) -> Content:
    special = {"X": {"id": "X", "ids": [1] * ids, "tokens": ["a"] * ids}}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": list(single), "pair": pair, "special_tokens": special}


def charsmap() -> bytes:
    """A map without a table, of one text of a megabyte."""
    return (0).to_bytes(4, "little") + b"b" * 1_000_000 + b"\0"


def sentencepiece(*, piece: str = "a", **norm: Any) -> bytes:
    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    for text, kind in (("<unk>", 2), ("<s>", 3), ("</s>", 3), ("▁", 1), (piece, 1)):
        proto.pieces.add(piece=text, score=-1.0, type=kind)
    proto.trainer_spec.unk_surface = norm.pop("unk_surface", " ? ")
    for name, value in norm.items():
        setattr(proto.normalizer_spec, name, value)
    return proto.SerializeToString()


def trained_charsmap(tmp_path: Path) -> bytes:
    """The map that makes 100,000 letters of one, as SentencePiece's trainer writes it."""
    import sentencepiece

    (tmp_path / "map.tsv").write_text("61\t" + " ".join(["62"] * 100_000) + "\n")
    (tmp_path / "text").write_text("a b c d e f g\n" * 100)
    options = {"vocab_size": 12, "model_type": "char", "minloglevel": 2, "hard_vocab_limit": False}
    options["normalization_rule_tsv"] = str(tmp_path / "map.tsv")
    sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "trained"), **options
    )
    return (tmp_path / "trained.model").read_bytes()


META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GROWS = "may expand one character to"
SLOW = "regular expression in its|fails on it"
ONE = {"Sequence": {"id": "A", "type_id": 0}}
X = {"SpecialToken": {"id": "X", "type_id": 0}}

CASES: dict[str, tuple[Callable[[Path], Content | bytes], str]] = {
    "a letter becomes a megabyte": (lambda _: normalizers(replace("a", "b" * 1_000_000)), GROWS),
    "nothing becomes a letter, 40 times": (lambda _: normalizers(*[replace("", "x")] * 40), GROWS),
    "a letter becomes a sentence, 8 times": (
        lambda _: normalizers(*[replace(".", "\ufdfa", "Regex"), {"type": "NFKD"}] * 8),
        GROWS,
    ),
    "bytes of bytes in a normalizer": (lambda _: normalizers(*[{"type": "ByteLevel"}] * 30), GROWS),
    "bytes of bytes in a pre-tokenizer": (lambda _: pre_tokenizers(*[BYTES] * 30), GROWS),
    "bytes of bytes in both": (
        lambda _: (
            normalizers(*[{"type": "ByteLevel"}] * 4) | {"pre_tokenizer": pre_tokenizers(*[BYTES] * 4)["pre_tokenizer"]}
        ),
        GROWS,
    ),
    "spaces around characters, 200 times": (lambda _: normalizers(*[BERT] * 200), GROWS),
    "a space before each part, 30 times": (lambda _: pre_tokenizers(*[split("."), META] * 30), GROWS),
    "a prefix of a megabyte": (lambda _: normalizers({"type": "Prepend", "prepend": "a" * 1_000_000}), GROWS),
    "a map of characters in json": (
        lambda _: normalizers({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap()).decode()}),
        GROWS,
    ),
    "300 steps": (lambda _: pre_tokenizers(*[split("q")] * 300), GROWS),
    "an empty suffix, decoded 30 times": (lambda _: decoders(*[{"type": "BPEDecoder", "suffix": ""}] * 30), GROWS),
    "an empty delimiter, decoded 30 times": (
        lambda _: decoders(*[{"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}] * 30),
        GROWS,
    ),
    "a decoder that panics": (
        lambda _: bpe(decoder={"type": "Strip", "content": "a", "start": 10**15, "stop": 10**15}),
        "fails on it",
    ),
    "a template of a million ids": (lambda _: bpe(post_processor=template(*[X] * 1000, ONE, ids=1000)), GROWS),
    "a template that doubles, 30 times": (
        lambda _: bpe(post_processor={"type": "Sequence", "processors": [template(ONE, ONE)] * 30}),
        GROWS,
    ),
    "parts of no length": (lambda _: bpe(pre_tokenizer={"type": "FixedLength", "length": 0}), "fails on it"),
    "a BPE's prefix of a megabyte": (
        lambda _: bpe(model={"continuing_subword_prefix": "x" * 1_000_000}),
        "continuing_subword_prefix",
    ),
    "a BPE's suffix of a megabyte": (lambda _: bpe(model={"end_of_word_suffix": "x" * 10**6}), "end_of_word_suffix"),
    "a WordPiece's words of 10⁹": (lambda _: word_piece(max_input_chars_per_word=10**9), "max_input_chars_per_word"),
    "a Unigram's piece of 100,000": (lambda _: unigram(100_000), "a piece of length"),
    "(a+)+$": (lambda _: pre_tokenizers(split("(a+)+$")), SLOW),
    "(.*)*x": (lambda _: pre_tokenizers(split("(.*)*x")), "ids|" + SLOW),
    "(x+x+)+y, replaced": (lambda _: normalizers(replace("(x+x+)+y", "z", "Regex")), SLOW),
    "three stars": (lambda _: pre_tokenizers(split(r"\w+\w+\w+\w+:|(?:.*.*.*)(?<=!)q")), SLOW),
    "(a+)+$, decoded": (lambda _: decoders(replace("(a+)+$", "z", "Regex")), SLOW),
    "SentencePiece, a map of 100,000": (trained_charsmap, "its map produces a text"),
    "SentencePiece, an unknown of a megabyte": (lambda _: sentencepiece(unk_surface="x" * 1_000_000), "unk_surface"),
    "SentencePiece, a piece of 3,000": (lambda _: sentencepiece(piece="a" * 3_000), "a piece of length"),
}
QUICK = (
    "a letter becomes a megabyte", "bytes of bytes in a pre-tokenizer", "an empty suffix, decoded 30 times", "(a+)+$",
)  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]
)
def test_a_tokenizer_that_grows_is_refused_by_name(name: str, tmp_path: Path):
    make, said = CASES[name]
    content = make(tmp_path)
    path = tmp_path / "tokenizer.json"
    if isinstance(content, bytes):
        path = tmp_path / "tokenizer.model"
        path.write_bytes(content)
    else:
        path.write_text(json.dumps(content))
    outcome = grow(name, path, ACTION)
    assert re.search(said, outcome.said), outcome
