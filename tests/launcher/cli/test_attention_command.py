"""``attention``: the picture, its numbers, the page of a short text, and what is refused."""

from __future__ import annotations

import base64
import csv
import re
from pathlib import Path

import numpy as np
import pytest

from tests.launcher.cli.calls import refused, succeed

NAME = "attention_layer1_head3"


def words(run: Path, output: Path, **options: object) -> list[object]:
    given = {"checkpoint": run, "text": run.parent / "data/validation", "length": 400, "layer": 1, "head": 3}
    given |= {"output": output, "blocks": 16, **options}
    return ["attention", *(f"--{name}={value}" for name, value in given.items() if value is not None)]


def test_rows_of_the_picture_are_shares_of_what_a_query_sees(capsys, run, tmp_path):
    out = succeed(capsys, *words(run, tmp_path))
    assert [Path(line).suffix for line in out.splitlines()] == [".svg", ".csv", ".html"]
    rows = list(csv.DictReader((tmp_path / f"{NAME}.csv").read_text().splitlines()))
    sums: dict[int, float] = {}
    for row in rows:
        start, stop = int(row["query_start"]), int(row["query_stop"])
        assert int(row["key_start"]) < stop
        assert stop - start == 25
        sums[start] = sums.get(start, 0.0) + float(row["share"])
    assert sums == pytest.approx(dict.fromkeys(range(0, 400, 25), 1.0), abs=1e-5)
    svg = (tmp_path / f"{NAME}.svg").read_text()
    assert re.search(r"run step_000100 · layer 1, head 3 · length 400 · \d{4}-\d\d-\d\d · n = 400 queries", svg)


def test_the_page_of_a_short_text_holds_each_token_and_its_weights(capsys, run, tmp_path):
    (tmp_path / "text").write_text("def <main>(x):\n    return 'ä'\n")
    succeed(capsys, *words(run, tmp_path, text=tmp_path / "text", length=None))
    page = (tmp_path / f"{NAME}.html").read_text()
    assert "<main>(" not in page
    tokens = re.findall(r'<span class="token"[^>]*>(.*?)</span>', page, flags=re.DOTALL)
    count = int(re.search(r"count = (\d+)", page)[1])  # type: ignore[index]
    assert len(tokens) == count
    assert "".join(tokens[1:]).replace("·", "").startswith("def &lt;m")
    data = re.search(r'atob\("([^"]+)"\)', page)
    assert data is not None
    shares = np.frombuffer(base64.b64decode(data[1]), dtype="<u2").reshape(count, count) / 65535
    assert not np.triu(shares, 1).any()
    assert np.abs(shares.sum(1) - 1).max() < 1e-3


def test_a_long_text_gets_no_page(capsys, run, tmp_path):
    out = succeed(capsys, *words(run, tmp_path, length=600))
    assert ".html" not in out


BAD = [
    ({"layer": 2}, 2, "the model has layers 0 to 1"),
    ({"length": 1}, 2, "at least 2 tokens"),
    ({"length": 10_000_000}, 1, "10,000,000 are requested"),
    ({"text": "NOWHERE"}, 2, "NOWHERE does not exist"),
]


@pytest.mark.parametrize(("options", "code", "said"), BAD, ids=[str(options) for options, _, _ in BAD])
def test_bad_input_says_what_would_work(capsys, run, tmp_path, options, code, said):
    err = refused(capsys, code, *words(run, tmp_path / "out", **options))
    assert said in err
    assert not (tmp_path / "out").exists()
