"""``data build --kind preferences`` and what ``data inspect`` and ``data verify`` say of its folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.shards.references import write_references
from longctx.tokenizer import load_tokenizer
from tests.data_pipeline.preference_records import write_preferences
from tests.launcher.cli.calls import call, refused, succeed


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("records") / "pairs.jsonl"
    records = [{"prompt": f"q{n}", "chosen": f"yes {n}", "rejected": "no"} for n in range(20)]
    path.write_text("".join(json.dumps(one) + "\n" for one in [*records, {**records[0], "chosen": "no"}]))
    return path


def test_pairs_are_built_and_shown(capsys, world: Path, pairs: Path, tmp_path: Path):
    words = ["--kind", "preferences", "--source", pairs, "--tokenizer", world / "tokenizer.model"]
    out = succeed(capsys, "data", "build", *words, "--output", tmp_path / "out", "--validation-fraction", 0.2)
    assert "1 equal replies: pairs.jsonl:21" in out
    assert "translate" not in out
    shown = succeed(capsys, "data", "inspect", tmp_path / "out", "--seq-len", 64)
    assert "── chosen\nyes 0" in shown
    assert "── rejected\nno" in shown
    assert "records left out, longer than a row" in shown
    assert "is intact" in succeed(capsys, "data", "verify", tmp_path / "out")
    found = json.loads(succeed(capsys, "data", "inspect", tmp_path / "out", "--json"))
    assert found["preferences"]["has_labels"] is False
    write_references(tmp_path / "out", -np.ones((found["documents"], 2)), {"weights": "abcdef"})
    assert "weights abcdef" in succeed(capsys, "data", "inspect", tmp_path / "out")


def test_single_replies_are_built_and_shown(capsys, world: Path, tmp_path: Path):
    path = tmp_path / "replies.jsonl"
    records = [{"prompt": f"q{n}", "completion": f"a{n}", "label": n % 2} for n in range(6)]
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    words = ["--source", path, "--tokenizer", world / "tokenizer.model", "--validation-fraction", 0]
    succeed(capsys, "data", "build", "--kind", "preferences", *words, "--output", tmp_path / "out")
    shown = succeed(capsys, "data", "inspect", tmp_path / "out")
    assert "── undesirable\na0" in shown
    assert "── reply to another prompt\na1" in shown
    assert "undesirable replies" in shown


def test_they_are_no_texts_to_evaluate(capsys, world: Path, run: Path, tmp_path: Path):
    folder = write_preferences(tmp_path / "data", load_tokenizer(world / "tokenizer.model"), [(9, 60, 60)]).folder
    checkpoint = ["--checkpoint", run, "--output", tmp_path / "out"]
    for task, length in (("ppl", 64), ("niah", 256)):
        words = ["evaluate", *checkpoint, "--tasks", task, "--lengths", length, "--haystack", folder, "--samples", 1]
        code, out, err = call(capsys, *words)
        assert code, task
        assert "contains preferences" in out + err, task
    assert "contains preferences" in refused(capsys, 2, "score", *checkpoint, "--data", folder)


# Options that contradict each other are usage errors; those that do not suit the records are found with them.
REFUSED = [
    (["--format", "messages"], 2, "--format messages selects other records than --kind preferences"),
    (["--exact"], 2, "apply to texts, not to preferences"),
    (["--paragraphs"], 2, "apply to texts, not to preferences"),
    (["--source-field", "prompt"], 1, "do not apply to preferences"),
    (["--train-on", "all"], 1, "--train-on all"),
    (["--max-tokens", "9", "--too-long", "keep-begin"], 1, "--too-long keep-begin"),
]


@pytest.mark.parametrize(("words", "code", "said"), REFUSED)
def test_options_of_other_data_are_refused(capsys, world: Path, pairs: Path, tmp_path: Path, words, code, said):
    command = ["--kind", "preferences", "--source", pairs, "--tokenizer", world / "tokenizer.model", *words]
    assert said in refused(capsys, code, "data", "build", *command, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
