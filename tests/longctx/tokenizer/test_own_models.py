"""Our own models: pieces of a long text change no id, and the table of spellings says what decoding says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.byte_table import ByteTable
from longctx.tokenizer.hard_texts import HARD_TEXTS
from longctx.tokenizer.sentencepiece_model import SentencePieceTokenizer
from longctx.tokenizer.text_chunks import SPACE_MARK
from tests.longctx.conversion.tiny_tokenizer import corpus, train_tokenizer


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    tokenizer = load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("own") / "a.model"))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert tokenizer.is_own
    return tokenizer


CHARACTERS = st.one_of(st.sampled_from("ab (\n\t_.é日🙂1"), st.characters(exclude_categories=["Cs"]))


@given(text=st.text(CHARACTERS, max_size=300).map(lambda text: text.replace(SPACE_MARK, "")), size=st.integers(1, 20))
def test_pieces_change_no_id(own: SentencePieceTokenizer, text: str, size: int):
    whole = own.processor.encode(text, return_type="numpy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longctx.tokenizer.sentencepiece_model._QUICK_CHARACTERS", size)
        assert np.array_equal(own.encode(text), whole)


@pytest.mark.parametrize("size", [7, 100, 1 << 15])
def test_pieces_of_real_texts_change_no_id(own: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch, size: int):
    text = "".join(text.replace(SPACE_MARK, "") for text in (*corpus(), *HARD_TEXTS))
    words = text.split(" ")
    random.Random(0).shuffle(words)
    for whole_text in (text, " ".join(words), text[::-1]):
        monkeypatch.setattr("longctx.tokenizer.sentencepiece_model._QUICK_CHARACTERS", size)
        found = own.encode(whole_text)
        assert np.array_equal(found, own.processor.encode(whole_text, return_type="numpy"))
        assert own.decode(found) == whole_text


def spelling_of(tokenizer: SentencePieceTokenizer) -> ByteTable:
    assert tokenizer.byte_table is not None
    return tokenizer.byte_table


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_every_text_of_our_own_models_is_proved(own: SentencePieceTokenizer, text: str):
    ids = own.encode(text)
    assert spelling_of(own).matches(ids, text)
    assert own.decode(ids) == text


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_are_proved(own: SentencePieceTokenizer, text: str):
    assert spelling_of(own).matches(own.encode(text), text)


@given(data=st.data())
def test_the_table_says_of_any_ids_what_decoding_says(own: SentencePieceTokenizer, data: st.DataObject):
    ids = np.array(data.draw(st.lists(st.integers(0, own.vocab_size - 1), max_size=30)), dtype=np.int32)
    text = own.decode(ids)
    texts = [text, text + "a", text[1:], "a" + text[1:], "", text.replace(" ", "\u2581")]
    for other in texts:
        if spelling_of(own).matches(ids, other):
            assert other == text
    # Control ids, the unknown id and broken UTF-8 stand for no bytes of a text: those are decoded.
    assert spelling_of(own).matches(ids, text) or (ids < 4).any() or "\ufffd" in text
