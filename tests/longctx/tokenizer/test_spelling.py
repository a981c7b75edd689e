"""The table that proves that texts come back says what decoding says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.hard_texts import HARD_TEXTS
from longctx.tokenizer.spelling import Spelling
from tests.longctx.conversion.tiny_tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("own") / "a.model"))


def spelling_of(tokenizer: Tokenizer) -> Spelling:
    assert tokenizer.spelling is not None
    return tokenizer.spelling


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_every_text_of_our_own_models_is_proved(own: Tokenizer, text: str):
    ids = own.encode(text)
    assert spelling_of(own).spells(ids, text)
    assert own.decode(ids) == text


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_are_proved(own: Tokenizer, text: str):
    assert spelling_of(own).spells(own.encode(text), text)


@given(data=st.data())
def test_the_table_says_of_any_ids_what_decoding_says(own: Tokenizer, data: st.DataObject):
    ids = np.array(data.draw(st.lists(st.integers(0, own.vocab_size - 1), max_size=30)), dtype=np.int32)
    text = own.decode(ids)
    texts = [text, text + "a", text[1:], "a" + text[1:], "", text.replace(" ", "\u2581")]
    for other in texts:
        if spelling_of(own).spells(ids, other):
            assert other == text
    # Control ids, the unknown id and broken UTF-8 stand for no bytes of a text: those are decoded.
    assert spelling_of(own).spells(ids, text) or (ids < 4).any() or "\ufffd" in text
