"""Several runs on one page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.report.comparison import bits_per_byte_factors, write_comparison
from launcher.report.report_run import load_run
from longctx.errors import ConfigError
from tests.launcher.report.test_report import dense, make_run, section_of, validation


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    first = make_run(tmp_path / "a" / "run", [dense(1), dense(2), validation(2)])
    second = make_run(tmp_path / "b" / "run", [dense(step, loss=3.0) for step in range(1, 6)])
    (second / "config.toml").write_text("[run]\nseed = 2\n\n[train]\nsteps = 20\nlr = 0.1\n")
    return [first, second]


def test_figures_curves_and_configs_stand_side_by_side(folders: list[Path], tmp_path: Path) -> None:
    page = write_comparison(folders, tmp_path / "page.html").read_text()
    rows = re.findall(r"<tr>(.*?)</tr>", section_of(page, "Side by side"))
    assert re.findall(r"<th>(.*?)</th>", rows[0]) == ["", "a/run", "b/run"]
    cells = {found[0]: found[1:] for found in (re.findall(r"<td>(.*?)</td>", row) for row in rows[1:])}
    assert cells["Training loss"] == ["7.8500", "3.0000"]
    assert cells["Validation loss"] == ["6.8000", "–"]
    assert cells["State"][0].startswith("at step 2 of 20")
    labels = re.findall(r">([^<>]*)</text>", section_of(page, "Loss"))
    assert (labels.count("a/run"), labels.count("b/run")) == (1, 1)
    differing = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", section_of(page, "What differs"))
    assert differing == [("run.seed", "1", "2"), ("data.train", "a &lt;b&gt; &amp; c", "–"), ("train.lr", "–", "0.1")]
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_runs_whose_tokens_differ_are_compared_in_bits_a_byte(tmp_path: Path) -> None:
    """A nat of the second run's tokens, which are twice as long, is half as many bits of a byte."""
    runs = []
    for name, bits in (("a", 2.0), ("b", 1.0)):
        checked = validation(2) | {"loss": 4.0, "bits_per_byte": bits}
        runs.append(make_run(tmp_path / name / "run", [dense(1), dense(2, loss=4.0), checked]))
    section = section_of(write_comparison(runs, tmp_path / "page.html").read_text(), "Loss")
    assert "loss (bits per byte)" in section
    assert "tokenizers differ" in section
    assert bits_per_byte_factors([load_run(run) for run in runs]) == [0.5, 0.25]
    assert bits_per_byte_factors([load_run(runs[0])] * 2) is None


def test_losses_by_position_stand_in_one_picture(folders: list[Path], tmp_path: Path) -> None:
    page = write_comparison(folders, tmp_path / "page.html").read_text()
    section = section_of(page, "Loss by position")
    labels = re.findall(r">([^<>]*)</text>", section)
    assert (labels.count("a/run"), labels.count("b/run")) == (1, 0), "the second run has no validation"


def test_a_run_named_twice_is_refused(folders: list[Path]) -> None:
    with pytest.raises(ConfigError, match="named twice"):
        write_comparison([folders[0], folders[0] / ".." / "run"])
