from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from data_pipeline.prepare.source_items import Document
from data_pipeline.prepare.sources import TextSource
from data_pipeline.prepare.train_tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.sentencepiece_model import DOCUMENT_END
from longctx.tokenizer.text_chunks import SPACE_MARK

WORDS = [
    "river",
    "stone",
    "cloud",
    "market",
    "window",
    "garden",
    "letter",
    "winter",
    "bridge",
    "silver",
    "engine",
    "forest",
    "harbour",
    "morning",
]


def test_documents_are_framed_by_ids_that_text_cannot_make(tokenizer: Tokenizer):
    ids = tokenizer.encode_document(DOCUMENT_END)
    assert ids.dtype == np.int32
    assert (ids[0], ids[-1]) == (tokenizer.document_begin, tokenizer.document_end)
    assert tokenizer.document_end not in ids[:-1]
    assert len({tokenizer.document_begin, tokenizer.document_end, tokenizer.padding}) == 3


def test_digits_stand_alone(tokenizer: Tokenizer):
    assert len(tokenizer.encode("2026")) >= 4


def test_training_writes_nothing_to_the_terminal(source: TextSource, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    train_tokenizer(source, tmp_path / "a.model", vocab_size=400)
    assert capfd.readouterr() == ("", "")


def test_a_large_corpus_is_sampled_by_hash_and_not_by_order(source: TextSource, tmp_path: Path):
    documents = list(source)

    def train(name: str, **options) -> bytes:
        return train_tokenizer(documents, tmp_path / name, vocab_size=380, **options).path.read_bytes()

    half = train("half", max_text_bytes=80_000)
    assert half == train("again", max_text_bytes=80_000)
    assert half != train("seeded", max_text_bytes=80_000, seed=1)
    assert half != train("all")
    calls: list[tuple[int, int]] = []
    train("small", max_text_bytes=1, progress=lambda *numbers: calls.append(numbers))  # one document is always kept
    assert calls[-1] == (len(documents), sum(len(d.text.encode()) for d in documents))


def test_a_vocabulary_that_does_not_fit_names_one_that_does(source: TextSource, tmp_path: Path):
    output = tmp_path / "bad.model"
    with pytest.raises(DataError, match=f"vocab_size=100 leaves no room.*Try {MIN_VOCAB_SIZE}"):
        train_tokenizer(source, output, vocab_size=100)
    with pytest.raises(DataError, match=r"vocab_size=270 is too small for .*\nTry (\d+) or more") as caught:
        train_tokenizer(source, output, vocab_size=270)
    with pytest.raises(DataError, match=r"vocab_size=900000 is more than this corpus can fill. Try \d+ or less"):
        train_tokenizer(source, output, vocab_size=900_000)
    assert not output.exists()
    nearest = int(str(caught.value).split("Try ")[1].split()[0])
    assert train_tokenizer(source, output, vocab_size=nearest).vocab_size == nearest


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_rare_characters_of_a_small_vocabulary_become_bytes(tmp_path: Path, caplog, kind: str):
    """A README in another script must not stop a tokenizer of 512 ids: every text comes back all the same."""
    rare = "".join(map(chr, range(0x4E00, 0x4E00 + 2000)))
    draw = Random(0)
    plain = [" ".join(draw.choices(WORDS, k=9)) + "." for _ in range(400)]
    plain += ["".join(draw.choices("aeiounrst", k=6)) for _ in range(400)]
    plain += [f"The {word} is here, and it is long enough." for word in WORDS]
    texts = [*plain, rare, "naïve Fußgänger"]
    tokenizer = train_tokenizer(documents_of(texts), tmp_path / "a.model", vocab_size=512, kind=kind)
    assert tokenizer.vocab_size == 512
    assert "rarer ones are encoded as bytes" in caplog.text
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("river stone cloud")) < 12, "common words have pieces"
    assert train_tokenizer(documents_of(texts), tmp_path / "b.model", vocab_size=512, kind=kind) is not None
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()


def documents_of(texts: list[str]) -> list[Document]:
    return [Document(name=f"{number}", text=text) for number, text in enumerate(texts)]


def test_no_documents_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match="No documents"):
        train_tokenizer([], tmp_path / "a.model", vocab_size=500)


def test_a_corpus_of_space_marks_trains(tmp_path: Path):
    documents = [Document("a", f"a{SPACE_MARK}b abc abc bca cab ")] * 3
    assert train_tokenizer(documents, tmp_path / "a.model", vocab_size=266).encode("abc").size


def test_every_truncation_of_a_model_is_noticed(tokenizer: Tokenizer, tmp_path: Path):
    content = tokenizer.path.read_bytes()
    for size in range(1, len(content), 11):
        (tmp_path / "cut.model").write_bytes(content[:size])
        with pytest.raises(DataError):
            load_tokenizer(tmp_path / "cut.model")


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer):
    with pytest.raises(DataError, match="surrogate"):
        tokenizer.encode("half \ud800")


def test_an_output_that_cannot_be_written_says_why(source: TextSource, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"could not be written .*\n.*already exists"):
        train_tokenizer(source, tmp_path / "file" / "a.model", vocab_size=400)
