"""WordPiece: BERT's own reading of a vocabulary, the same file each time, and sizes that fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.prepare.source_items import Document
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from data_pipeline.prepare.train_wordpiece import SPECIAL_TOKENS
from longctx.errors import DataError
from longctx.tokenizer import load_tokenizer

TEXTS = ["The quick brown fox jumps over the lazy dog.", "Été: le café est FERMÉ!", "a\u2581b 12345 quickly"]


def documents(copies: int = 30) -> list[Document]:
    return [Document(str(number), text) for number, text in enumerate(TEXTS * copies)]


def test_bert_reads_it_as_we_do_and_both_frame_a_text(tmp_path: Path):
    import transformers

    tokenizer = train_tokenizer(documents(), tmp_path / "t.json", vocab_size=120, kind="wordpiece")
    assert tokenizer.vocab_size == 120
    assert [tokenizer.piece(token) for token in range(5)] == list(SPECIAL_TOKENS)
    assert tokenizer.special.mask == 4
    assert (tokenizer.prefix_ids.tolist(), tokenizer.suffix_ids.tolist()) == ([2], [3])
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(tokenizer.piece(token) for token in range(120)))
    theirs = transformers.BertTokenizer(str(vocabulary))
    for text in (*TEXTS, "unquick foxes, jumped; naïve 東京"):
        assert tokenizer.encode_document(text).tolist() == theirs(text)["input_ids"], text


def test_case_and_accents_are_kept_if_asked(tmp_path: Path):
    cased = train_tokenizer(documents(), tmp_path / "t.json", vocab_size=140, kind="wordpiece", keep_case=True)
    plain = train_tokenizer(documents(), tmp_path / "p.json", vocab_size=120, kind="wordpiece")
    for tokenizer, wanted in ((cased, "FERMÉ"), (plain, "ferme")):
        assert tokenizer.decode(tokenizer.encode("FERMÉ")) == wanted


def test_the_same_texts_give_the_same_file(tmp_path: Path):
    for name in ("a", "b"):
        train_tokenizer(documents(), tmp_path / name, vocab_size=130, kind="wordpiece")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert load_tokenizer(tmp_path / "a").fingerprint == load_tokenizer(tmp_path / "b").fingerprint


def test_a_size_that_does_not_fit_names_one_that_does(tmp_path: Path):
    for size, said in ((30, "letter in this corpus needs"), (90_000, "more than this corpus can fill")):
        with pytest.raises(DataError, match=said) as caught:
            train_tokenizer(documents(), tmp_path / "t.json", vocab_size=size, kind="wordpiece")
        nearest = int(str(caught.value).split("Try ")[1].split()[0])
        assert (
            train_tokenizer(documents(), tmp_path / "t.json", vocab_size=nearest, kind="wordpiece").vocab_size
            == nearest
        )
    advised = set()
    for size in (8, 20, 30):
        with pytest.raises(DataError) as caught:
            train_tokenizer(documents(), tmp_path / "t.json", vocab_size=size, kind="wordpiece")
        advised.add(str(caught.value).split("Try ")[1])
    assert len(advised) == 1, "the least size, wherever one starts"
    with pytest.raises(DataError, match="no text to train on"):
        train_tokenizer([Document("a", "\u200b\n")], tmp_path / "t.json", vocab_size=90, kind="wordpiece")
    with pytest.raises(DataError, match="leaves no room for text after 5 control ids"):
        train_tokenizer(documents(), tmp_path / "t.json", vocab_size=6, kind="wordpiece")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "wordpiece", "fim": True}, "--fim requires a SentencePiece"),
        ({"kind": "wordpiece", "sentinels": 3}, "--sentinels 3 requires a SentencePiece"),
        ({"kind": "wordpiece", "mask": True}, "--kind wordpiece already includes --mask"),
        ({"kind": "bpe", "keep_case": True}, "--cased requires --kind wordpiece"),
    ],
)
def test_what_a_kind_does_not_have_is_refused(tmp_path: Path, options, said):
    with pytest.raises(DataError, match=said):
        train_tokenizer(documents(), tmp_path / "t", vocab_size=300, **options)
