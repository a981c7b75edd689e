"""``data practice``: a file that the other verbs read, made again as it was."""

from __future__ import annotations

import json

from longctx.evaluation.recall_documents import Practice
from tests.launcher.cli.calls import call, succeed


def test_writes_the_documents_once(capsys, tmp_path):
    output = tmp_path / "new/recall.jsonl"
    words = ("data", "practice", "--output", output, "--documents", 7, "--pairs", 2, 3, "--seed", 5)
    out = succeed(capsys, *words)
    assert "7 documents" in out
    texts = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    drawn = Practice(words=(0, 60), pairs=(2, 3), mentions=(1, 2), questions=(1, 4), seed=5)
    assert texts == [drawn.document(number) for number in range(7)]
    before = output.read_bytes()
    code, _, error = call(capsys, *words)
    assert (code, output.read_bytes()) == (1, before)
    assert "--overwrite" in error
    assert call(capsys, *words, "--overwrite")[0] == 0
    assert output.read_bytes() == before


def test_refused(capsys, tmp_path):
    code, _, error = call(capsys, "data", "practice", "--output", tmp_path / "x.jsonl", "--documents", 0)
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert "--documents 0" in error
    code, _, error = call(
        capsys, "data", "practice", "--output", tmp_path / "x.jsonl", "--documents", 1, "--words", 5, 2
    )
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert "words=5 2" in error
