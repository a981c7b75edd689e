"""Texts that spell special tokens of their tokenizer: counted and warned of, or, if asked, made into ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.prepare.control_tokens import encode_parsed
from data_pipeline.prepare.source_items import Document
from data_pipeline.shards.reader import ShardSet
from longctx.tokenizer import load_tokenizer
from tests.launcher.cli.calls import call, refused, succeed
from tests.longctx.chat.templates import START, STOP, chat_tokenizer
from tests.longctx.tokenizer.byte_level import frame, tokenizer_json, write_tokenizer
from tests.longctx.tokenizer.families import build

RENDERED = f"{START}user\nWhat is it?{STOP}\n{START}assistant\nA number.{STOP}\n"
TEXTS = [RENDERED, f"ends in {STOP}", "plain text of no conversation", "a <| and a |> alone"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    chat_tokenizer(tmp_path / "tokenizer", template=None)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def words(corpus: Path, output: str, *more: object) -> list[object]:
    source = ["--source", corpus / "texts.jsonl", "--tokenizer", corpus / "tokenizer", "--output", corpus / output]
    return ["data", "build", *source, "--workers", 1, "--validation-fraction", 0, *more]


def ids_of(folder: Path) -> list[list[int]]:
    shards = ShardSet.open(folder)
    return [shards.document(number).tolist() for number in range(shards.num_documents)]


def test_they_stay_text_and_are_counted_by_name(capsys, corpus):
    out = succeed(capsys, *words(corpus, "shards"))
    assert f"2 documents with special tokens of the tokenizer, encoded as text: {STOP} (2), {START} (1)" in out
    assert "--special-tokens parse" in out
    tokenizer = load_tokenizer(corpus / "tokenizer")
    controls = [token for token in range(tokenizer.vocab_size) if tokenizer.piece(token) in (START, STOP)]
    assert len(controls) == 2
    assert not set(controls) & {token for ids in ids_of(corpus / "shards") for token in ids}
    told = json.loads(succeed(capsys, *words(corpus, "again", "--json")))
    assert (told["spelling"], told["spelt"]) == (2, {STOP: 2, START: 1})


def test_parsed_they_are_the_ids_of_transformers(capsys, corpus):
    import transformers

    out = succeed(capsys, *words(corpus, "shards", "--special-tokens", "parse"))
    assert "with special tokens" not in out
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(corpus / "tokenizer" / "tokenizer.json"))
    tokenizer = load_tokenizer(corpus / "tokenizer")
    begin, end = tokenizer.prefix_ids.tolist(), tokenizer.suffix_ids.tolist()
    wanted = [begin + theirs(text, add_special_tokens=False)["input_ids"] + end for text in TEXTS]
    assert sorted(ids_of(corpus / "shards")) == sorted(wanted)
    # Another folder than that of the same texts as they are.
    assert "built from another options" in refused(capsys, 1, *words(corpus, "shards"))


def test_a_document_that_has_its_frame_gets_it_once(tmp_path):
    write_tokenizer(tmp_path / "tokenizer", tokenizer_json(post_processor=frame(begins=True, ends=True)))
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    before, after = (tokenizer.piece(token) for token in (*tokenizer.prefix_ids, *tokenizer.suffix_ids))
    documents = [Document(name="bare", text="text"), Document(name="framed", text=f"{before}text{after}")]
    (bare, _), (framed, _) = encode_parsed(documents, tokenizer)
    assert np.array_equal(bare.tokens, framed.tokens)
    assert (bare.tokens[0], bare.tokens[-1]) == (tokenizer.document_begin, tokenizer.document_end)


def test_what_cannot_be_parsed_is_refused(capsys, corpus):
    """A SentencePiece model of somebody else does not say how its control tokens are found; nor is that offered."""
    foreign = build("llama2", corpus / "llama2")
    (foreign / "tokenizer.json").unlink(missing_ok=True)
    more = ["--tokenizer", foreign / "tokenizer.model"]
    code, _, err = call(capsys, *words(corpus, "shards", *more, "--special-tokens", "parse"))
    assert (code, "is a SentencePiece model" in err) == (1, True), err
    assert "--exact compares texts" in refused(capsys, 1, *words(corpus, "x", "--special-tokens", "parse", "--exact"))
    both = words(corpus, "shards", "--special-tokens", "parse", "--paragraphs")
    assert "--paragraphs cannot be combined" in refused(capsys, 1, *both)
    assert not (corpus / "shards").exists()
