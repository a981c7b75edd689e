"""The living line: on a watched terminal alone, below the log, and never in a file."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest

from launcher.metrics.record import read_metrics
from launcher.metrics.writer import Lines, RecordWriter
from launcher.run_folder import LOGS, start_logging
from tests.launcher.metrics.test_metrics import train

LINES = Lines(total_steps=9, first_step=0, last_step=9, every=4)


class Terminal(io.StringIO):
    """What a person watches."""

    def isatty(self) -> bool:
        return True


def record_three_steps(folder: Path, stream: io.StringIO, monkeypatch, *, is_rank_0: bool = True) -> str:
    """What a run of three steps writes to the console; its log is in ``folder``."""
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    (folder / LOGS).mkdir()
    start_logging(folder, 0 if is_rank_0 else 1)
    with RecordWriter(folder, LINES, is_rank_0=is_rank_0) as writer:
        for step in (1, 2, 3):
            writer.write(train(step))
            writer.doing("saving a checkpoint")
    assert sys.stdout is stream, "the terminal is given back"
    logging.getLogger("launcher").info("after")
    return stream.getvalue()


@pytest.mark.usefixtures("_own_handlers")
def test_a_terminal_sees_it_below_the_log_and_no_file_has_it(tmp_path, monkeypatch):
    said = record_three_steps(tmp_path, Terminal(), monkeypatch)
    assert "saving a checkpoint" in said
    assert "step 3/9" in said
    assert said.count("step 1/9  11%  loss 5.1023") == 1, "the line of the log stands above it"
    assert said.rstrip().endswith("after"), "the log goes on where it went before"
    text = (tmp_path / LOGS / "rank_0.log").read_text()
    assert text.count("\n") == 3, "the first step's line, where the time went, and what came after"
    assert "\x1b" not in text
    assert "saving a checkpoint" not in text
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3], "every step, whatever log_every is"


@pytest.mark.usefixtures("_own_handlers")
def test_other_ranks_draw_nothing(tmp_path, monkeypatch):
    assert record_three_steps(tmp_path, Terminal(), monkeypatch, is_rank_0=False) == ""
    assert not (tmp_path / "metrics.jsonl").exists()
