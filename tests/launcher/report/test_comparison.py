"""Several runs on one page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.report.comparison import write_comparison
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
    assert cells["Training loss"] == ["7.8000", "3.0000"]
    assert cells["Validation loss"] == ["6.8000", "–"]
    assert cells["State"][0].startswith("at step 2 of 20")
    labels = re.findall(r">([^<>]*)</text>", section_of(page, "Loss"))
    assert (labels.count("a/run"), labels.count("b/run")) == (1, 1)
    differing = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", section_of(page, "What differs"))
    assert differing == [("run.seed", "1", "2"), ("data.train", "a &lt;b&gt; &amp; c", "–"), ("train.lr", "–", "0.1")]
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_run_named_twice_is_refused(folders: list[Path]) -> None:
    with pytest.raises(ConfigError, match="named twice"):
        write_comparison([folders[0], folders[0] / ".." / "run"])
