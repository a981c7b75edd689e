"""A hop that never comes, comes too late or comes twice: the run ends in time, and goes on as if nothing had been.

What stops ranks from going on is the watch's to find; what arrives with other bytes is told by sums of messages
(``tests/launcher/training/test_messages.py``). ``python -m tests.launcher.test_hops`` prints a row for each kind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.test_accidents import Accident, Place
from tests.launcher.test_hangs import END_SECONDS, TIMEOUT, screen
from tests.launcher.test_hangs import run as run_accident
from tests.launcher.workers import Row, print_rows, rows, run, train

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

KEYS = {
    **{"train.steps": 4, "checkpoint.every_steps": 2, "validation.every_steps": 2, "parallel.expert": 2},
    **{"parallel.context": 2, "parallel.layout": "zigzag", "checkpoint.wait": True},
}
# Two layers, each with three exchanges in both micro-batches of a step, and one in each row of a validation.
IN_STEP_3 = 4 + 12 + 12 + 4 + 3
START = Place("hop", "parallel.transport.exchange", "RingExchange._start", call=IN_STEP_3)
KINDS = {
    "drop a hop": ("the run hangs", "because of rank 1:", "exchanging keys and values with ranks 0"),
    "send a hop twice": ("the run hangs", "exchanging", "hop 1"),
    "sleep": ("the run hangs", "because of rank 0:"),
}
"""What happens to a hop of rank 0, and what the user reads."""


def check_hop(kind: str, shards: Path, folder: Path) -> Row:
    """The run ends within the time-out, and one that goes on has the records of an undisturbed one."""
    outcome = run_accident(Accident(rank=0, place=START, kind=kind, ranks=2), shards, folder, KEYS)
    assert outcome.codes == [1, 1], outcome.text
    assert outcome.seconds < TIMEOUT + END_SECONDS, outcome.text
    for words in KINDS[kind]:
        assert words in "\n".join(screen(outcome.text)), outcome.text
    assert [row["step"] for row in rows(folder / "run") if row["kind"] == "train"] == [1, 2]
    run(train, 2, shards, folder / "quiet", KEYS)
    run(train, 2, shards, folder / "run", {**KEYS, "run.resume": "latest"})
    equal = rows(folder / "run") == rows(folder / "quiet")
    assert equal
    saw = screen(outcome.text)[0]
    return Row(kind="ring", injected=kind, saw=saw, seconds=round(outcome.seconds, 2), steps_lost=0, equal=equal)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hop_that_does_not_come_as_it_should_ends_the_run_in_time(kind, shards, tmp_path):
    check_hop(kind, shards, tmp_path)


if __name__ == "__main__":
    print_rows(check_hop, KINDS)
