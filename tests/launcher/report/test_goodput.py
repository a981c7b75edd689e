"""The report's part on stalls and lost time."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.metrics.goodput.account import LEAST, read_goodput
from launcher.report.page import goodput_section
from launcher.report.report_text import duration
from tests.launcher.metrics.goodput.test_account import World
from tests.launcher.report.test_report import dense, make_run, page_of, section_of


def killed_and_stopped(folder: Path) -> None:
    """An attempt that is killed behind a stalled step, one that is stopped for a day, and one that ends."""
    folder.mkdir(exist_ok=True)
    world = World()
    timeline = world.start(folder, step=0)
    world.steps(timeline, *range(1, LEAST + 3))
    world.steps(timeline, LEAST + 3, seconds=100.0)
    world.now += 100.0
    timeline = world.start(folder, step=4)
    world.steps(timeline, 5, 6)
    world.spend(timeline, "saving", 3.0)
    timeline.end("stopped")
    world.now += 86400
    timeline = world.start(folder, step=6)
    world.steps(timeline, 7)
    timeline.end("done")


def test_a_page_has_the_share_the_stalls_and_the_kinds(tmp_path):
    killed_and_stopped(tmp_path / "run")
    page = page_of(make_run(tmp_path / "run", [dense(1), dense(2)]))
    goodput = read_goodput(tmp_path / "run")
    seconds = goodput.seconds()
    assert goodput.stalls == 1
    figures = dict(re.findall(r'class="label">(.*?)</div><div class="value">(.*?)</div>', page))
    share = seconds["productive"] / (goodput.wall - seconds["paused"])
    assert figures["Effective training time"] == f"{share:.1%}"
    part = section_of(page, "Stalls and lost time")
    assert f"{share:.1%} of" in part
    assert "1 step stalled" in part
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", part)[1:]]
    assert {row[0]: row[1] for row in rows} == {
        kind.replace("_", " "): duration(spent) for kind, spent in seconds.items() if spent > 0
    }
    assert [row[2] for row in rows if row[0] == "paused"] == ["–"]


def test_clocks_that_disagree_are_named(tmp_path):
    world = World()
    world.start(tmp_path, step=3).end("failed")
    world.now, world.set_by, world.machine = world.now + 20.0, -300.0, "b"
    world.start(tmp_path, step=3).end("done")
    assert "Clocks disagree: 1 attempt began before" in goodput_section(read_goodput(tmp_path))[0].caption
