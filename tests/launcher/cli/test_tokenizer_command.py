"""``tokenizer train``."""

from __future__ import annotations

import re
import shutil

from tests.launcher.cli.calls import VOCAB_SIZE, call, refused, succeed


def test_tokenizer_says_what_it_made_and_what_comes_next(capsys, world, tmp_path):
    output = tmp_path / "f.model"
    words = ["tokenizer", "train", "--source", world / "corpus", "--vocab-size", VOCAB_SIZE, "--output", output]
    out = succeed(capsys, *words, "--exclude", "*.txt")
    assert output.read_bytes() == (world / "tokenizer.model").read_bytes()
    made, following = out.splitlines()
    assert made.startswith(f"{output}: 600 ids, trained on 24 documents, ")
    assert following.startswith("Next: ")
    assert f"data build --source {world / 'corpus'} --exclude '*.txt' --tokenizer {output} --output DIR" in following


def test_other_kinds_and_the_space_mark_are_named(capsys, world, tmp_path):
    shutil.copytree(world / "corpus", tmp_path / "corpus")
    (tmp_path / "corpus" / "mark.txt").write_text("a \u2581 b")
    words = ["tokenizer", "train", "--source", tmp_path / "corpus", "--vocab-size", 300, "--output"]
    out = succeed(capsys, *words, tmp_path / "f", "--kind", "char")
    assert "\n1 document with U+2581, SentencePiece's mark for a space: " in out
    assert "SentencePiece characters, 300 ids" in call(capsys, "tokenizer", "show", tmp_path / "f")[1]
    assert call(capsys, *words, tmp_path / "g", "--kind", "morpheme")[0] == 2


def test_a_training_that_was_stopped_goes_on_without_reading(capsys, world, tmp_path, monkeypatch):
    words = ["tokenizer", "train", "--source", world / "corpus", "--vocab-size", 400, "--output", tmp_path / "f"]

    def interrupted(**_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sentencepiece.SentencePieceTrainer.train", interrupted)
        assert call(capsys, *words)[0] == 130
    assert [path.name for path in tmp_path.iterdir()] == [".f.sample"]
    code, out, err = call(capsys, *words)
    assert (code, "resuming: 24 documents, " in err) == (0, True)
    assert "400 ids, trained on 24 documents, " in out
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_vocabulary_that_cannot_be_is_refused(capsys, world, tmp_path):
    words = ["tokenizer", "train", "--source", world / "corpus", "--output", tmp_path / "f", "--vocab-size"]
    err = refused(capsys, 1, *words, 100_000)
    assert re.search(r"Try \d+ or less", err)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_is_not_overwritten_unasked(capsys, world, tmp_path):
    output = tmp_path / "f.model"
    output.write_text("precious")
    words = ["tokenizer", "train", "--source", world / "corpus", "--vocab-size", 400, "--output", output]
    code, _, err = call(capsys, *words)
    assert (code, output.read_text()) == (1, "precious")
    assert "--overwrite" in err
    assert call(capsys, *words, "--overwrite")[0] == 0
    assert output.read_bytes() != b"precious"
