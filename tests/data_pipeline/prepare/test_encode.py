"""Which texts are found that do not come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.prepare.encode import find_inexact
from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.contract import Chunk
from tests.longctx.conversion.tiny_tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("own") / "a.model"))


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("lossy")
    return load_tokenizer(train_tokenizer(folder / "a.model", add_dummy_prefix=True, remove_extra_whitespaces=True))


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), max_size=6))
def test_only_what_differs_is_found(own: Tokenizer, lossy: Tokenizer, texts: list[str]):
    chunks = [Chunk(text, True) for text in texts]
    assert find_inexact(own.encode_chunks(chunks), chunks, own) == {}
    swapped = own.encode_chunks([Chunk(f"{text}!", True) for text in texts])
    assert find_inexact(swapped, chunks, own) == {number: f"{text}!" for number, text in enumerate(texts)}
    assert lossy.spelling is None
    ids = lossy.encode_chunks(chunks)
    decoded = [lossy.decode(part) for part in ids]
    expected = {number: text for number, text in enumerate(decoded) if text != texts[number]}
    assert find_inexact(ids, chunks, lossy) == expected
