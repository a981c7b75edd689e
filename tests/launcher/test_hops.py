"""A hop that never comes, comes too late or comes twice: the run ends in time, and goes on as if nothing had been.

What stops ranks from going on is the watch's to find; what arrives with other bytes is told by sums of messages
(``tests/launcher/training/test_messages.py``).
"""

from __future__ import annotations

import pytest

from tests.faults import FaultRow, verdict
from tests.launcher.test_accidents import Accident, Place
from tests.launcher.test_hangs import END_SECONDS, TIMEOUT, screen
from tests.launcher.test_hangs import run as run_accident
from tests.launcher.workers import rows, run, train

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

KEYS = {
    **{"train.steps": 4, "checkpoint.every_steps": 2, "validation.every_steps": 2, "parallel.expert": 2},
    **{"parallel.context": 2, "parallel.layout": "zigzag", "checkpoint.wait": True},
}
# Two layers, each with three exchanges in both micro-batches of a step, and one in each row of a validation.
IN_STEP_3 = 4 + 12 + 12 + 4 + 3
START = Place("hop", "parallel.transport.exchange", "RingExchange._start", call=IN_STEP_3)
KINDS = {
    "drop a hop": ("a hop that never comes", ("the run hangs", "because of rank 1:", "with ranks 0")),
    "send a hop twice": ("a hop that is sent twice", ("the run hangs", "exchanging", "hop 1")),
    "sleep": ("a hop later than the time-out", ("the run hangs", "because of rank 0:")),
}
"""What happens to a hop of rank 0: its name, and what the user reads."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_hop_that_does_not_come_as_it_should_ends_the_run_in_time(kind, shards, tmp_path, fault_rows):
    outcome = run_accident(Accident(rank=0, place=START, kind=kind, ranks=2), shards, tmp_path, KEYS)
    assert outcome.codes == [1, 1], outcome.text
    assert outcome.seconds < TIMEOUT + END_SECONDS, outcome.text
    name, expected = KINDS[kind]
    for words in expected:
        assert words in "\n".join(screen(outcome.text)), outcome.text
    assert [row["step"] for row in rows(tmp_path / "run") if row["kind"] == "train"] == [1, 2]
    run(train, 2, shards, tmp_path / "quiet", KEYS)
    run(train, 2, shards, tmp_path / "run", {**KEYS, "run.resume": "latest"})
    fault_rows.add(
        FaultRow(
            group="ring",
            kind=name,
            injected=f"by rank 0 of 2, in step 3; run.timeout_seconds = {TIMEOUT:g}",
            seen=verdict("\n".join(screen(outcome.text)), expected[0]),
            seconds=outcome.seconds,
            steps_lost=0,
            beyond_checkpoint=0,
            equal=rows(tmp_path / "run") == rows(tmp_path / "quiet"),
        )
    )
