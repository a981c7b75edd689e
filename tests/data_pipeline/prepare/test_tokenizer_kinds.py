"""Models of every kind: what text can make of them, and a training that is cut off."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.prepare import train_tokenizer as training
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.source_items import Document
from data_pipeline.prepare.sources import TextSource, open_source
from data_pipeline.prepare.train_tokenizer import (
    KINDS,
    TextSample,
    load_sample,
    sample_file,
    save_sample,
    train_tokenizer,
)
from longctx.errors import DataError
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.hard_texts import HARD_TEXTS
from longctx.tokenizer.sentencepiece_model import DOCUMENT_END, SentencePieceTokenizer
from longctx.tokenizer.text_chunks import SPACE_MARK

SIZES = {"bpe": 400, "unigram": 380, "word": 320, "char": 330}
# Words of the corpus, words it never saw, spellings of control symbols, the space mark, and what stands between.
FRAGMENTS = st.sampled_from(
    [
        "self",
        "import ",
        "zzqj",
        "\n",
        "\t",
        " ",
        "  ",
        SPACE_MARK,
        "é",
        "🙂",
        "\0",
        "</s>",
        "<0x20>",
        "<unk>",
        DOCUMENT_END,
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=20).map("".join)


@pytest.fixture(scope="module")
def documents(source: TextSource) -> list[Document]:
    return [Document(document.name, document.text[:2500]) for document in itertools.islice(source, 10)]


@pytest.fixture(scope="module")
def models(documents: list[Document], tmp_path_factory: pytest.TempPathFactory) -> dict[str, SentencePieceTokenizer]:
    """A small model of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    return {
        kind: train_tokenizer(documents, folder / f"{kind}.model", vocab_size=SIZES[kind], kind=kind) for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(text=TEXTS)
def test_any_text_comes_back_and_makes_no_control_id(models: dict[str, SentencePieceTokenizer], kind: str, text: str):
    tokenizer = models[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_table is not None
    assert tokenizer.byte_table.matches(ids, text)
    assert not set(ids.tolist()) & {0, tokenizer.document_begin, tokenizer.document_end, tokenizer.padding}


@pytest.mark.parametrize("kind", KINDS)
def test_hard_texts_come_back_in_documents_and_shards(
    models: dict[str, SentencePieceTokenizer], tmp_path: Path, kind: str
):
    tokenizer = load_tokenizer(models[kind].path)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert tokenizer.is_own
    for number, text in enumerate(HARD_TEXTS[1:]):
        assert tokenizer.decode(tokenizer.encode_document(text)) == text
        if "\0" not in text:
            (tmp_path / "in").mkdir(exist_ok=True)
            (tmp_path / "in" / f"{number}.txt").write_bytes(text.encode())
    report = build_shards(
        open_source(tmp_path / "in"), tokenizer, tmp_path / "out", exact=True, validation_fraction=0, workers=1
    )
    assert report.inexact == 0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(text=TEXTS)
def test_where_a_text_is_cut_for_the_library_changes_no_id(
    models: dict[str, SentencePieceTokenizer], kind: str, text: str
):
    tokenizer = models[kind]
    # As long as the pieces that the library is given at once, so that each text is cut somewhere.
    long = f"{text} self.x = zzqj "
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longctx.tokenizer.sentencepiece_model._QUICK_CHARACTERS", 8)
        cut = tokenizer.encode(long).tolist()
    assert tokenizer.encode(long).tolist() == cut


def test_a_word_model_knows_words_and_spells_others(models: dict[str, SentencePieceTokenizer]):
    tokenizer = models["word"]
    assert [tokenizer.piece(token) for token in tokenizer.encode("a import")][-1] == "▁import"
    # The space of a word that it does not know is a space, and not U+2581, whose bytes the library writes.
    assert [tokenizer.piece(token) for token in tokenizer.encode("a zq")][1:] == ["<0x20>", "<0x7A>", "<0x71>"]
    assert tokenizer.encode(SPACE_MARK).tolist() != tokenizer.encode(" ").tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_documents_give_the_same_file(
    models: dict[str, SentencePieceTokenizer], documents: list[Document], tmp_path: Path, kind: str
):
    # Unigram trains with threads: their number is the same everywhere.
    train_tokenizer(documents, tmp_path / "again", vocab_size=SIZES[kind], kind=kind)
    assert (tmp_path / "again").read_bytes() == models[kind].path.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_that_cannot_be_filled_names_one_that_can(documents: list[Document], tmp_path: Path, kind: str):
    few = documents[:1]
    with pytest.raises(DataError, match=r"vocab_size=90000 .*Try \d+ or less") as caught:
        train_tokenizer(few, tmp_path / "a", vocab_size=90_000, kind=kind, stamp={})
    nearest = int(str(caught.value).split("Try ")[1].split()[0])
    assert not list(tmp_path.iterdir())
    assert train_tokenizer(few, tmp_path / "a", vocab_size=nearest, kind=kind).vocab_size == nearest


def test_a_kind_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"kind=syllable is not known\. Try bpe, unigram, word, char"):
        train_tokenizer([], tmp_path / "a", vocab_size=300, kind="syllable")


class TestGoingOn:
    STAMP = {"listing": "1"}  # noqa: RUF012

    def interrupt(self, documents: list[Document], output: Path, monkeypatch: pytest.MonkeyPatch, **options) -> None:
        """Ctrl-C while the library learns."""

        def interrupted(**_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(training.spm.SentencePieceTrainer, "train", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train_tokenizer(documents, output, vocab_size=400, stamp=self.STAMP, **options)
        assert [path.name for path in output.parent.iterdir()] == [sample_file(output).name]

    def unread(self) -> Iterator[Document]:
        """Documents that nobody may ask for."""
        raise AssertionError("the corpus is read again")
        yield

    def test_a_sample_is_drawn_once(
        self,
        models: dict[str, SentencePieceTokenizer],
        documents: list[Document],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ):
        documents = [*documents, Document("mark", f"a{SPACE_MARK}b")]
        output = tmp_path / "f.model"
        self.interrupt(documents, output, monkeypatch)
        told: list[tuple[TextSample, bool]] = []
        options = {"vocab_size": 400, "stamp": self.STAMP, "on_sample": lambda *found: told.append(found)}
        train_tokenizer(self.unread(), output, **options)
        ((sample, was_kept),) = told
        assert was_kept
        assert (sample.documents, sample.marked) == (len(documents), 1)
        assert sample.text_bytes == sum(len(document.text.encode()) for document in documents)
        train_tokenizer(documents, tmp_path / "plain", vocab_size=400)
        assert output.read_bytes() == (tmp_path / "plain").read_bytes()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["f.model", "plain"]

    @pytest.mark.parametrize("other", ["stamp", "seed", "size", "damage", "cut", "format"])
    def test_the_sample_of_something_else_is_not_taken(
        self, documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
    ):
        output = tmp_path / "f.model"
        self.interrupt(documents, output, monkeypatch)
        kept = sample_file(output)
        content = kept.read_bytes()
        if other == "damage":
            kept.write_bytes(content[:900] + bytes([content[900] ^ 1]) + content[901:])
        elif other == "cut":
            kept.write_bytes(content[:-100])
        elif other == "format":
            kept.write_bytes(content.replace(b"longctx-sample-1", b"longctx-sample-0"))
        options: dict = {"stamp": self.STAMP, "vocab_size": 400}
        options |= {"stamp": {"stamp": {"listing": "2"}}, "seed": {"seed": 1}, "size": {"max_text_bytes": 9000}}.get(
            other, {}
        )
        told: list[bool] = []
        train_tokenizer(documents, output, on_sample=lambda _, was_kept: told.append(was_kept), **options)
        assert told == [False]

    @settings(max_examples=15)
    @given(st.lists(st.text(), min_size=1, max_size=5))
    def test_a_sample_comes_back(self, tmp_path_factory: pytest.TempPathFactory, texts: list[str]):
        path = tmp_path_factory.mktemp("sample") / ".f.sample"
        texts = [text.encode("utf-8", "replace").decode() for text in texts]
        sample = TextSample(texts=texts, documents=9, text_bytes=10, marked=1)
        save_sample(path, sample, self.STAMP)
        assert load_sample(path, self.STAMP) == sample
        assert load_sample(path, {}) is None


def test_a_source_is_told_from_another_one_without_reading_it(corpus: Path, tmp_path: Path):
    (tmp_path / "a.txt").write_text("one")
    stamp = open_source(tmp_path).stamp()
    assert open_source(tmp_path).stamp() == stamp
    (tmp_path / "a.txt").write_text("two")
    changed = open_source(tmp_path).stamp()
    assert open_source(tmp_path, as_text=["*.txt"]).stamp() != changed != stamp
