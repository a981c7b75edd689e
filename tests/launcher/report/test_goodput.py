"""The report's part on effective training time."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from launcher.metrics.goodput.account import KINDS, read_goodput
from launcher.report.goodput import MAX_ATTEMPTS, binned, goodput_section
from launcher.report.text import duration
from tests.launcher.metrics.goodput.test_account import World
from tests.launcher.report.test_report import dense, make_run, page_of, section_of

TOTALS = (83.62165000711694, 2429.6909588001135, 1945.2181984715398, 960.0)
"""Seconds of which a 480th, 480 times, is the whole, a little less, or just the whole."""


def killed_and_stopped(folder: Path, *, attempts: int = 3) -> None:
    """Attempts that are killed behind their fourth step, and the one before the last is stopped for a day."""
    folder.mkdir(exist_ok=True)
    world, step = World(), 0
    for number in range(attempts):
        timeline = world.start(folder, step=step)
        world.steps(timeline, *range(step + 1, step + 5), wait=0.5)
        world.spend(timeline, "saving", 3.0)
        step += 2
        if number == attempts - 2:
            step += 2
            timeline.end("stopped")
            world.now += 86400
        else:
            world.now += 100.0
    timeline.end("done")


def test_a_page_has_the_share_the_kinds_and_the_attempts(tmp_path):
    killed_and_stopped(tmp_path / "run")
    page = page_of(make_run(tmp_path / "run", [dense(1), dense(2)]))
    figures = dict(re.findall(r'class="label">(.*?)</div><div class="value">(.*?)</div>', page))
    seconds = read_goodput(tmp_path / "run").seconds()
    counted = sum(seconds.values()) - seconds["paused"]
    assert figures["Effective training time"] == f"{seconds['productive'] / counted:.1%}"
    part = section_of(page, "Effective training time")
    assert part.count("<svg") == 1
    assert "are not counted; with them it is 0.1%" in part
    for words in ("productive", "lost", "stopped", "paused", "saving", "starting"):
        assert f"<td>{words}</td>" in part
    rows = re.findall(r"<tr>(.*?)</tr>", section_of(page, "Attempts"))[1:]
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    assert [(row[0], row[3], row[4]) for row in cells] == [
        ("1", "1 to 4", "killed"),
        ("2", "3 to 6", "stopped on request"),
        ("3", "7 to 10", "done"),
    ]
    assert [row[8] for row in cells] == ["1 min 40 s stopped", "1 d 0 h paused", "–"]


def test_an_attempt_that_goes_on_has_no_end(tmp_path):
    killed_and_stopped(tmp_path)
    world = World()
    world.now += 90_000
    world.start(tmp_path, step=10)
    parts = goodput_section(read_goodput(tmp_path))
    assert parts[1].table is not None
    assert parts[1].table.rows[-1][3:5] == ("none", "–")


def test_of_many_attempts_the_last_are_shown_and_all_are_counted(tmp_path):
    killed_and_stopped(tmp_path, attempts=MAX_ATTEMPTS + 4)
    goodput = read_goodput(tmp_path)
    first, second = goodput_section(goodput)
    assert second.caption.startswith(f"The last {MAX_ATTEMPTS} of {MAX_ATTEMPTS + 4}.")
    assert second.table is not None
    assert [row[0] for row in second.table.rows] == [str(number) for number in range(5, MAX_ATTEMPTS + 5)]
    assert first.table is not None
    # Of each of the 20 attempts steps 1 and 2 are kept, of the last two all four: 42 steps and two more, 9.5 s each.
    assert first.table.rows[0][:2] == ("productive", duration(9.5 * 44))


def test_a_run_without_a_timeline_has_no_such_part(tmp_path):
    page = page_of(make_run(tmp_path / "run", [dense(1)]))
    assert "ffective training time" not in page
    assert (tmp_path / "run" / "report.html").exists()


def test_clocks_that_disagree_are_named(tmp_path):
    world = World()
    world.start(tmp_path, step=3).end("failed")
    world.now, world.set_by, world.machine = world.now + 20.0, -300.0, "b"
    world.start(tmp_path, step=3).end("done")
    caption = goodput_section(read_goodput(tmp_path))[0].caption
    assert "Clocks disagree: 1 attempt began before" in caption
    assert "The timeline begins at step 3." in caption


def test_columns_by_hand():
    kinds, lengths = np.array([0, 1, 0]), np.array([2.0, 1.0, 2.0])
    edges, shares = binned(kinds, lengths, 2.0)
    assert edges.tolist() == [0.0, 2.0, 4.0, 5.0]
    assert shares[0].tolist() == pytest.approx([1.0, 0.5, 1.0])
    assert shares[1].tolist() == pytest.approx([0.0, 0.5, 0.0])
    assert shares.shape == (len(KINDS), 3)
    assert shares.sum(axis=0).tolist() == pytest.approx([1.0] * 3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("total", TOTALS)
def test_no_column_is_empty_by_rounding(total: float):
    """The picture's 480 columns: one more by rounding would be of no width, and its shares no numbers."""
    edges, shares = binned(np.array([0, 1]), np.array([total / 2, total / 2]), total / 480)
    assert (np.diff(edges) > total / 1000).all()
    assert edges[-1] == total
    assert shares.sum(axis=0).tolist() == pytest.approx([1.0] * 480)


def test_an_attempt_of_no_length_has_no_column():
    edges, shares = binned(np.array([], dtype=int), np.array([]), 1.0)
    assert edges.tolist() == [0.0]
    assert shares.shape == (len(KINDS), 0)
