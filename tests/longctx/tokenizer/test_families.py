"""Every kind of tokenizer that a public model ships gives the ids that transformers gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.hard_texts import HARD_TEXTS
from longctx.tokenizer.text_chunks import SPACE_MARK
from tests.longctx.conversion.tiny_tokenizer import corpus
from tests.longctx.tokenizer.families import FAMILIES

EXACT = {"llama3", "tekken", "gpt2", "deepseek", "gpt_oss", "own"}
"""Families whose ids give every text back."""
BEGINS = {"llama2", "llama3", "mistral", "tekken", "deepseek", "gemma", "own"}
"""Families that begin a document with an id."""
NASTY = [
    *HARD_TEXTS,
    *corpus(),
    "<|begin_of_text|><|eot_id|> <｜begin▁of▁sentence｜>[INST]<bos></s><extra_id_0><tool_call><think>",
    "x  <mask>\n\n\n<start_of_turn>  two   three    four\n\n",
    "I'LL we're 'S don't\u2019t ALLCapsWord camelCase 123456 3,14\r\n\r\n\t",
]


def transformers_tokenizer(folder: Path) -> Any:
    """The tokenizer that transformers makes of the files, special tokens in a text read as text."""
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, split_special_tokens=True)
    loaded.model_max_length = 2**60
    return loaded


@pytest.fixture(params=[name for name in FAMILIES if name != "own"])
def pair(request: pytest.FixtureRequest, family: Callable[[str], Path]) -> tuple[str, Tokenizer, Any]:
    folder = family(request.param)
    return request.param, load_tokenizer(folder), transformers_tokenizer(folder)


@pytest.mark.few(5)
def test_ids_are_those_of_transformers(pair: tuple[str, Tokenizer, Any]):
    name, ours, theirs = pair
    for text in NASTY:
        wanted = theirs(text, add_special_tokens=False)["input_ids"]
        # A Unigram of transformers takes a special token's own piece for its spelling; here text is never a control id.
        if name == "t5" and set(wanted) & set(theirs.all_special_ids) - {theirs.unk_token_id}:
            continue
        # transformers 5 builds Llama's tokenizer anew: it puts no space before a text that begins with one, where
        # SentencePiece and the model's own tokenizer.json do.
        if name in ("llama2", "mistral") and text.startswith((" ", SPACE_MARK)):
            continue
        assert ours.encode(text).tolist() == wanted, text


@pytest.mark.parametrize("name", ["llama2", "mistral", "gemma", "own"])
def test_ids_of_a_model_file_are_those_of_sentencepiece(family: Callable[[str], Path], name: str):
    import sentencepiece

    path = family(name) / "tokenizer.model"
    ours, theirs = load_tokenizer(path), sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in NASTY:
        if name != "own" or SPACE_MARK not in text:
            assert ours.encode(text).tolist() == theirs.encode(text)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("llama2", "own")])
def test_ids_of_a_tokenizer_json_are_those_of_the_library(family: Callable[[str], Path], name: str):
    import tokenizers

    ours = load_tokenizer(family(name))
    theirs = tokenizers.Tokenizer.from_file(str(family(name) / "tokenizer.json"))
    for text in NASTY:
        if not any(token.content in text for token in theirs.get_added_tokens_decoder().values() if token.special):
            assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids


def test_a_document_begins_as_transformers_begins_a_text(pair: tuple[str, Tokenizer, Any]):
    name, ours, theirs = pair
    ids = theirs("def main(")["input_ids"]
    if name == "t5":
        assert ids.pop() == ours.document_end
    assert ours.encode_prompt("def main(") == ids
    assert (ours.document_begin is not None) == (name in BEGINS)
    assert ours.document_end == theirs.eos_token_id


@pytest.mark.parametrize("name", FAMILIES)
def test_no_text_becomes_a_control_id(family: Callable[[str], Path], name: str):
    tokenizer = load_tokenizer(family(name))
    spelt = " ".join(tokenizer.piece(token) for token in range(tokenizer.vocab_size))
    frame = {tokenizer.document_begin, tokenizer.document_end, tokenizer.special.bos}
    for text in (spelt, spelt.replace(" ", ""), *NASTY):
        assert not set(tokenizer.encode(text).tolist()) & (frame - {None})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_long_text_is_cut_without_a_trace(family: Callable[[str], Path], name: str):
    tokenizer = load_tokenizer(family(name))
    text = "".join(corpus()) + "  two words\n\n\nand <mask> 12345 \u00e9\u4e2d " * 30
    whole = tokenizer.encode(text, chunk_characters=1 << 30)
    chunks = list(tokenizer.cut(text, 300))
    assert len(chunks) > 50
    assert "".join(chunk.text for chunk in chunks) == text
    ids = tokenizer.encode_chunks(chunks)
    # Our own models are cut by lines, as they always were: few tokens cross one.
    if name != "own":
        np.testing.assert_array_equal(np.concatenate(ids), whole)
    back = tokenizer.decode_chunks(ids, chunks)
    if name in EXACT or name in ("llama2", "mistral", "gemma"):
        assert back == [chunk.text for chunk in chunks]


@pytest.mark.parametrize("name", sorted(EXACT))
def test_every_text_comes_back(family: Callable[[str], Path], name: str):
    tokenizer = load_tokenizer(family(name))
    for text in NASTY:
        assert tokenizer.decode(tokenizer.encode_document(text)) == text


def test_gemma_s_two_forms_divide_a_long_run_of_spaces_each_its_own_way(family: Callable[[str], Path]):
    """docs/data.md says so; each form gives the ids of its own library, and the text."""
    import sentencepiece

    path = family("gemma") / "tokenizer.model"
    folder, file = load_tokenizer(family("gemma")), load_tokenizer(path)
    theirs, model = transformers_tokenizer(family("gemma")), sentencepiece.SentencePieceProcessor(model_file=str(path))
    longest = max(len(file.piece(token)) for token in range(file.vocab_size) if not file.piece(token).strip(SPACE_MARK))
    differing = []
    for count in range(1, 4 * longest):
        text = f"a{' ' * count}b"
        ids = [folder.encode(text).tolist(), file.encode(text).tolist()]
        assert ids == [theirs(text, add_special_tokens=False)["input_ids"], model.encode(text)]
        assert [folder.decode(ids[0]), file.decode(ids[1])] == [text, text]
        if ids[0] != ids[1]:
            differing.append(count)
    assert differing[0] == longest + 1


def test_the_space_mark_is_a_space_but_for_our_own_models(family: Callable[[str], Path]):
    text = f"a{SPACE_MARK}b"
    for name in ("llama2", "mistral", "gemma"):
        tokenizer = load_tokenizer(family(name))
        assert tokenizer.decode(tokenizer.encode(text)) == "a b"
    own = load_tokenizer(family("own"))
    assert own.decode(own.encode(text)) == text


def test_a_line_without_an_end_is_cut_at_the_limit(family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("longctx.tokenizer.text_chunks.LIMIT_CHARACTERS", 1000)
    for name in ("llama2", "llama3", "gemma"):
        tokenizer = load_tokenizer(family(name))
        tokenizer.__dict__["_is_safe_cut"] = lambda text, at: False
        text = "a" * 4500
        chunks = list(tokenizer.cut(text, 100))
        assert [len(chunk.text) for chunk in chunks] == [1000] * 4 + [500]
        assert "".join(tokenizer.decode_chunks(tokenizer.encode_chunks(chunks), chunks)) == text


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "own"])
def test_a_line_of_ten_megabytes_has_the_ids_of_transformers(family: Callable[[str], Path], name: str):
    tokenizer = load_tokenizer(family(name))
    sentence = "the quick brown fox: {'id': 12345, 'text': \"Gr\u00fc\u00dfe, \u65e5\u672c\u8a9e\"}; it's 3,14  two "
    line = (sentence * (10**7 // len(sentence.encode()) + 1)).strip()
    wanted = transformers_tokenizer(family(name))(line, add_special_tokens=False)["input_ids"]
    np.testing.assert_array_equal(tokenizer.encode(line), wanted)
