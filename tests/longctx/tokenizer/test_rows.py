"""A tokenizer with more ids than its model has rows: refused is a text that needs one, by the token's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from longctx.errors import DataError
from longctx.tokenizer import load_tokenizer
from tests.longctx.tokenizer.byte_level import SIZE, tokenizer_json, write_tokenizer

ADDED = (("<image>", SIZE, True), ("<tool>", SIZE + 1, False))


def test_a_text_is_refused_that_has_a_token_without_a_row(tmp_path: Path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, tokenizer_json(*ADDED)))
    limited = tokenizer.for_model(SIZE)
    for text in ("def main", "what spells a special token is text: <image>"):
        assert limited.encode_prompt(text) == tokenizer.encode_prompt(text)
        assert (limited.encode_document(text) == tokenizer.encode_document(text)).all()
    # Without a model nothing is refused, and with the model it is named.
    assert SIZE + 1 in tokenizer.encode("a <tool>")
    for encode in (limited.encode, limited.encode_prompt, limited.encode_document):
        with pytest.raises(DataError, match=rf"the text holds the token <tool> \({SIZE + 1}\), and the model has rows"):
            encode("a <tool>")


@pytest.mark.parametrize("role", ["begin", "end"])
def test_a_frame_without_a_row_is_refused_by_name(tmp_path: Path, role: str):
    content = tokenizer_json(("<image>", SIZE, True))
    if role == "end":
        limited = load_tokenizer(write_tokenizer(tmp_path, content, eos_token="<image>")).for_model(SIZE)
        assert limited.encode_prompt("def")
    else:
        special = {"<image>": {"id": "<image>", "ids": [SIZE], "tokens": ["<image>"]}}
        single = [{"SpecialToken": {"id": "<image>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        content["post_processor"] = {
            "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special,
        }  # fmt: skip
        limited = load_tokenizer(write_tokenizer(tmp_path, content)).for_model(SIZE)
        with pytest.raises(DataError, match="the beginning of every document holds the token <image>"):
            limited.encode_prompt("def")
    with pytest.raises(DataError, match="every document holds the token <image>") as caught:
        limited.encode_document("def")
    # It stands in no text, so there is nothing to leave out.
    assert "Leave it out" not in str(caught.value)


@pytest.mark.parametrize(("named", "padding"), [(-1, 1), (9999, 1), (SIZE - 1, SIZE - 1)])
def test_a_padding_id_of_no_token_is_not_taken(tmp_path: Path, named: int, padding: int):
    write_tokenizer(tmp_path, tokenizer_json())
    (tmp_path / "config.json").write_text(f'{{"pad_token_id": {named}}}')
    assert load_tokenizer(tmp_path).padding == padding
