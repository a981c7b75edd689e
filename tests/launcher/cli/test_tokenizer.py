"""``tokenizer train``."""

from __future__ import annotations

import re

from tests.launcher.cli.calls import VOCAB_SIZE, call


def test_tokenizer_says_what_it_made_and_what_comes_next(capsys, world, tmp_path):
    output = tmp_path / "f.model"
    words = ["tokenizer", "train", "--source", world / "corpus", "--vocab-size", VOCAB_SIZE, "--output", output]
    code, out, _ = call(capsys, *words, "--exclude", "*.txt")
    assert code == 0
    assert output.read_bytes() == (world / "tokenizer.model").read_bytes()
    made, following = out.splitlines()
    assert made.startswith(f"{output}: 600 ids, trained on 24 documents, ")
    assert following.startswith("Next: ")
    assert f"data build --source {world / 'corpus'} --exclude '*.txt' --tokenizer {output} --output DIR" in following


def test_tokenizer_of_a_sample_says_so(capsys, world, tmp_path):
    words = ["--source", world / "corpus", "--vocab-size", 400, "--output", tmp_path / "f"]
    _, out, _ = call(capsys, "tokenizer", "train", *words, "--max-text-bytes", 30_000)
    assert "a sample of 29.3 KiB from 24 documents" in out


def test_a_vocabulary_that_cannot_be_is_refused(capsys, world, tmp_path):
    words = ["tokenizer", "train", "--source", world / "corpus", "--output", tmp_path / "f", "--vocab-size"]
    code, _, err = call(capsys, *words, 100_000)
    assert code == 1
    assert re.search(r"Try \d+ or less", err)
    assert list(tmp_path.iterdir()) == []
