"""Begin and end as transformers has them, over every combination of what the files may say; and what is said of it.

Then tokenizers with more ids than their model has rows: refused is a text that needs one, by the token's name.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from longctx.errors import DataError
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.tokenizer_warnings import frame_warnings, missing_rows_warning
from tests.longctx.tokenizer.byte_level import SIZE, frame, tokenizer_json, write_tokenizer

_SAID = (None, True, False)
_FRAMES = {
    "none": None,
    "bytes": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
    "begin": frame(begins=True),
    "both": frame(begins=True, ends=True),
    "end": frame(ends=True),
}


def _settings(begins: bool | None, ends: bool | None) -> dict[str, bool]:
    said = {"add_bos_token": begins, "add_eos_token": ends}
    return {key: value for key, value in said.items() if value is not None}


@pytest.mark.parametrize(
    "named", ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"]
)
def test_begin_and_end_are_those_of_transformers(tmp_path: Path, named: str):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for (kind, content), begins, ends in itertools.product(_FRAMES.items(), _SAID, _SAID):
        settings = _settings(begins, ends)
        write_tokenizer(tmp_path, tokenizer_json(post_processor=content), tokenizer_class=named, **settings)
        ours = load_tokenizer(tmp_path)
        theirs = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
        found = theirs("def")["input_ids"]
        assert ours.encode_prompt("def") == found[: len(found) - (found[-1] == 1)], (kind, settings)
        assert (ours.special.bos, ours.document_end) == (theirs.bos_token_id, theirs.eos_token_id)
        # A disagreement is said, and nothing else is.
        said = " ".join(frame_warnings(ours))
        begins_text, ends_text = found[0] == 0, found[-1] == 1
        assert ("add_bos_token" in said) == (begins is not None and begins != begins_text)
        assert ("add_eos_token" in said) == (ends is not None and ends != ends_text)
        assert bool(said) == ("add_" in said or ends_text)


@pytest.mark.parametrize("named", ["GPTNeoXTokenizer", "GPTNeoXTokenizerFast"])
def test_a_class_that_begins_no_text_is_followed(tmp_path: Path, named: str):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    write_tokenizer(tmp_path, tokenizer_json(post_processor=frame(begins=True)), tokenizer_class=named)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert ours.encode_prompt("def") == theirs("def")["input_ids"]
    (said,) = frame_warnings(ours)
    assert f"tokenizer_class={named.removesuffix('Fast')} adds no begin token, but tokenizer.json's" in said


@pytest.mark.parametrize("lists_added_tokens", [False, True])
def test_of_two_files_that_name_the_end_transformers_choice_holds(tmp_path: Path, lists_added_tokens: bool):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    settings = {"added_tokens_decoder": {"0": {"content": "<|begin|>", "special": True}}} if lists_added_tokens else {}
    write_tokenizer(tmp_path, tokenizer_json(), **settings)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|end|>", "eos_token": "<|begin|>"}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert (ours.special.bos, ours.special.end) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special.end == int(lists_added_tokens)


@pytest.mark.parametrize(("begins", "ends"), itertools.product(_SAID, _SAID))
def test_a_model_file_alone_begins_as_its_settings_say(
    family: Callable[[str], Path], tmp_path: Path, begins: bool | None, ends: bool | None
):
    folder = Path(shutil.copytree(family("llama2"), tmp_path / "llama2"))
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"} | _settings(begins, ends)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ours = load_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    agree = (theirs("def")["input_ids"][0] == ours.special.bos) == (ours.document_begin is not None)
    # Without a word of it transformers begins no text, and a SentencePiece model does here: that is said.
    assert agree == (begins is not None or ends is not None)
    assert agree == (not list(frame_warnings(ours)))
    if not agree:
        (said,) = frame_warnings(ours)
        assert '"add_bos_token": false there to omit it' in said
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))
        assert load_tokenizer(folder).document_begin is None


def test_tokens_beyond_the_model_s_rows_are_named_once(tmp_path: Path):
    content = tokenizer_json(("<image>", SIZE, True))
    assert missing_rows_warning(load_tokenizer(write_tokenizer(tmp_path, content)), SIZE + 1) is None
    said = missing_rows_warning(load_tokenizer(tmp_path), SIZE)
    assert said is not None
    assert f"No text is encoded to the missing ids: <image> ({SIZE})" in said
    write_tokenizer(tmp_path, tokenizer_json(("<image>", SIZE, True), ("<tool>", SIZE + 1, False)))
    said = missing_rows_warning(load_tokenizer(tmp_path), SIZE)
    assert said is not None
    assert f"are rejected: <tool> ({SIZE + 1})." in said
    write_tokenizer(tmp_path, content, eos_token="<image>")
    said = missing_rows_warning(load_tokenizer(tmp_path), SIZE)
    assert said is not None
    assert "No document can be read" in said


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
