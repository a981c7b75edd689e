"""What no row holds is said before a run and by `data plan`: of pairs how many, of texts how many tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.cli.data_rows import truncation_counts
from launcher.demos.pairs import written_pairs
from launcher.training.summary import details
from tests.launcher.cli.calls import refused, succeed
from tests.launcher.training.test_summary import packing, start

SIDES = ["--source-field", "en", "--text-field", "de"]
MODEL = {
    "model.preset": "bart-base",
    "model.vocab_size": 330,
    "model.hidden_size": 32,
    "model.num_layers": 1,
    "model.encoder_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 16,
    "model.ffn_size": 64,
    "model.max_positions": 128,
    "train.micro_batch_rows": 2,
    "run.hostfile": "none",
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("left_out")
    texts = [texts for _, texts in written_pairs()][:200]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in texts))
    source, tokenizer = ["--source", f"{folder}/pairs.jsonl", *SIDES], folder / "t.model"
    asked = ["--vocab-size", "330", "--sentinels", "30", "--output", str(tokenizer)]
    assert main(["tokenizer", "train", *source, *asked]) == 0
    assert main(["data", "build", *source, "--tokenizer", str(tokenizer), "--output", f"{folder}/shards"]) == 0
    text = ["--source", f"{folder}/pairs.jsonl", "--text-field", "de", "--tokenizer", str(tokenizer)]
    assert main(["data", "build", *text, "--output", f"{folder}/texts"]) == 0
    return folder


def plan(pairs: Path, data: str, seq_len: int, source_seq_len: int, **options: object) -> list[object]:
    lengths = {"data.seq_len": seq_len, "data.source_seq_len": source_seq_len, "train.tokens_per_step": 4 * seq_len}
    words = MODEL | lengths | {"data.train": pairs / data} | {f"train.{name}": x for name, x in options.items()}
    return ["data", "plan", *(word for name, value in words.items() for word in (f"--{name}", value))]


def test_a_plan_counts_the_pairs_that_are_left_out(capsys, pairs):
    out = succeed(capsys, *plan(pairs, "shards", 64, 64))
    (line,) = [line for line in out.splitlines() if line.startswith("pairs left out, longer than a row on either side")]
    assert int(line.split()[-1]) > 10
    assert "truncated" not in out
    assert "documents longer" not in out
    err = refused(capsys, 2, *plan(pairs, "shards", 2, 2))
    assert "no pair in" in err


def test_a_plan_of_spans_knows_both_sides_and_refuses_pairs(capsys, pairs):
    out = succeed(capsys, *plan(pairs, "texts", 64, 128, objective="spans"))
    assert "busiest rank" in out
    err = refused(capsys, 2, *plan(pairs, "shards", 64, 128, objective="spans"))
    assert "train.objective=spans requires texts" in err


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (
            {"pairs_left_out": 12, "truncated_tokens": 300},
            "padding, pairs dropped because a side exceeds a row: 12.",
        ),
        ({"pairs_left_out": 0}, "padding, pairs dropped because a side exceeds a row: 0."),
        (
            {"pairs_left_out": 1200, "exact": False},
            "padding, pairs dropped because a side exceeds a row: about 1,200, estimated from its first 5,000",
        ),
        ({"truncated_tokens": 300}, "padding, 300 remainder tokens dropped."),
        ({}, "1.25 % padding."),
    ],
)
def test_the_first_lines_say_what_is_left_out(figures, words):
    (line,) = [line for line in details(start(packing=packing(**figures))) if line.startswith("Data: ")]
    assert words in line


def test_a_table_says_it_of_pairs_and_of_texts():
    of_pairs = packing(documents_cut=1200, pairs_left_out=1200, truncated_tokens=40_000)
    assert truncation_counts(of_pairs) == {"pairs left out, longer than a row on either side": "1,200"}
    of_texts = packing(truncated_tokens=300, exact=False)
    assert truncation_counts(of_texts) == {"documents longer than a row": "about 3", "truncated tokens": "about 300"}
