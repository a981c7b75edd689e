"""``attention``: tables, pictures and the page by tokens, of a text, a packed row and a task's prompt."""

from __future__ import annotations

import csv
import json
import re
from html import unescape
from pathlib import Path

import pytest

from tests.launcher.cli.calls import call

TEXT = "def main():\n    return '</script><b>&'\n"


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def row_sums(rows: list[dict[str, str]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for row in rows:
        sums[row["query_start"]] = sums.get(row["query_start"], 0.0) + float(row["share"])
    return sums


def spans_of(page: str) -> list[str]:
    return [unescape(text) for text in re.findall(r'<span data-at="\d+">(.*?)</span>', page, re.S)]


def heads_of(page: str) -> list[dict]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])["heads"]


def test_a_text(capsys, run, tmp_path):
    code, out, _ = call(
        capsys, "attention", "--checkpoint", run, "--text", TEXT, "--heads", "1,0", "--blocks", 5, "--output", tmp_path
    )
    assert code == 0
    names = [Path(line).name for line in out.splitlines()]
    last = names[0].removeprefix("attention_layer").removesuffix("_head1.svg")
    assert names == [f"attention_layer{last}_head1.svg", f"attention_layer{last}_head0.svg", "attention.html"]
    page = (tmp_path / "attention.html").read_text()
    # The text's own "</script>" is text: the data does not end there, and nothing of it is a tag.
    assert "".join(spans_of(page)).endswith(TEXT)
    assert "<b>" not in page
    heads = heads_of(page)
    assert [head["head"] for head in heads] == [1, 0]
    for head in heads:
        assert len(head["rows"]) == len(spans_of(page))
        for query, row in enumerate(head["rows"]):
            assert all(key <= query for key in row[::2])
            assert sum(row[1::2]) == pytest.approx(1000, abs=60)
    for head in (0, 1):
        sums = row_sums(rows_of(tmp_path / f"attention_layer{last}_head{head}.csv"))
        assert len(sums) <= 5
        assert all(total == pytest.approx(1, abs=1e-5) for total in sums.values())
        svg = (tmp_path / f"attention_layer{last}_head{head}.svg").read_text()
        tokens = len(spans_of(page))
        caption = rf"run step_000100 · layer {last}, head {head} · a text · length {tokens}, .* · \d{{4}}-\d\d-\d\d · n ="
        assert re.search(caption, svg)


def test_a_packed_row_shows_its_documents(capsys, run, tmp_path):
    code, _, _ = call(
        capsys, "attention", "--checkpoint", run, "--data", run.parent / "data", "--length", 6000, "--row", 1,
        "--layer", 0, "--heads", 0, "--blocks", 20, "--output", tmp_path,
    )  # fmt: skip
    assert code == 0
    assert not (tmp_path / "attention.html").exists()
    rows = rows_of(tmp_path / "attention_layer0_head0.csv")
    assert all(int(row["key_start"]) <= int(row["query_start"]) for row in rows)
    # Blocks of other documents are masked, and so they are no rows: fewer than those of one long document.
    assert len(rows) < 20 * 21 // 2
    assert {float(row["queries_that_see"]) for row in rows} > {1.0}


def test_a_tasks_prompt_ends_in_its_answer(capsys, run, tmp_path):
    code, _, _ = call(
        capsys, "attention", "--checkpoint", run, "--task", "passkey", "--length", 450, "--sample", 4,
        "--heads", 0, "--output", tmp_path,
    )  # fmt: skip
    assert code == 0
    page = (tmp_path / "attention.html").read_text()
    assert re.search(r"The pass key is \d{5}\.$", "".join(spans_of(page)))
    assert "passkey, sample 4 at depth 0.4" in page


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--text", "a", "--layer", 99), 2, "layer=99"),
        (("--text", "a", "--heads", "x"), 2, "--heads x"),
        (("--task", "passkey"), 2, "need --length N"),
        (("--task", "ppl", "--length", 300, "--haystack", "."), 2, "name one task with prompts"),
        (("--text-file", "no-such-file"), 1, "no-such-file cannot be read"),
        (("--text", "a", "--data", "x"), 2, "--data"),
    ],
)
def test_refused(capsys, run, tmp_path, words, code, message):
    found, _, error = call(capsys, "attention", "--checkpoint", run, *words, "--output", tmp_path / "out")
    assert (found, (tmp_path / "out").exists()) == (code, False)
    assert message in error
