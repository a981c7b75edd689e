"""A rank that hangs anywhere, or never comes, is named within the time-out, and every rank ends.

So it is where a hop never comes, comes too late or comes twice; a run that goes on is as if nothing had been. What
arrives with other bytes is told by sums of messages (``tests/launcher/training/test_messages.py``).

``python -m tests.launcher.test_hangs`` runs the drill by itself and prints the table of ``docs/measured.md``.
"""

from __future__ import annotations

import itertools
import re
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults import FaultRow, verdict
from tests.launcher import workers
from tests.launcher.runs import SCREEN, flags
from tests.launcher.test_accidents import Accident, Outcome, Place, start
from tests.launcher.workers import rows, train

pytestmark = [pytest.mark.timeout(1700), pytest.mark.slow]

TIMEOUT, MEET = 6.0, 6.0
"""run.timeout_seconds and run.meet_seconds of these runs."""
END_SECONDS = 8.0
"""From the time-out to the end of the last rank: it takes two, or four where a rank must be killed."""

HOP = Place("hop", "parallel.transport.point_to_point", "PointToPoint._block", call=3)
PLACES = [
    Place("data", "launcher.training.step_prefetch", "StepPrefetcher.next_step", call=2),
    Place("forward", "longctx.model.block", "Block.forward", call=3),
    HOP,
    Place("backward", "parallel.transport.point_to_point", "PointToPoint.backward", call=3),
    Place("all-to-all", "parallel.experts.dispatcher", "AllToAllDispatcher.plan", call=3),
    Place("optimizer step", "parallel.zero.zero_engine", "ZeroEngine._nonfinite_gradients", call=2),
    Place("save", "launcher.checkpoint.background_saver", "HostCopy.fill"),
    Place("validation", "launcher.training.trainer", "validate"),
    Place("start", "launcher.training.setup", "open_data"),
]
MEETING = Place("meeting", "parallel.comm.process", "rendezvous_store")


def run(accident: Accident, shards: Path, folder: Path, changed: dict[str, Any] | None = None) -> Outcome:
    """A tiny run that meets the accident."""
    keys = {
        **{"train.steps": 4, "checkpoint.every_steps": 2, "validation.every_steps": 2, "run.hostfile": "none"},
        **{"parallel.context": accident.ranks, "parallel.expert": 2},
        **{"run.timeout_seconds": TIMEOUT, "run.meet_seconds": MEET, **(changed or {})},
    }
    folder.mkdir(exist_ok=True)
    return start(accident, flags(shards, folder / "run", keys), folder, limit=60.0)


def screen(text: str) -> list[str]:
    """The message that ends the run."""
    found = re.search(r"^ClusterError: .*", text, flags=re.MULTILINE | re.DOTALL)
    assert found, text
    return found[0].strip().splitlines()


def check(accident: Accident, outcome: Outcome, folder: Path) -> None:
    """All ranks ended in time, and one screen says which rank it was and where each one was."""
    text = outcome.text
    assert outcome.seconds < TIMEOUT + END_SECONDS, f"{accident}: {outcome.seconds:.1f} s, {outcome.codes}\n{text}"
    expected = [1] * accident.ranks
    if accident.kind == "hold":
        # Nothing but SIGKILL reaches it.
        expected[accident.rank] = -9
    assert outcome.codes == expected, f"{accident}: {outcome.codes}\n{text}"
    assert text.count("the run hangs") == 1, f"{accident}\n{text}"
    assert f"because of rank {accident.rank}:" in text, f"{accident}\n{text}"
    assert len(screen(text)) < SCREEN, text
    assert "Traceback" not in text, f"{accident}\n{text}"
    assert "lost contact" not in text, f"{accident}\n{text}"
    if accident.kind == "stop":
        assert "is stopped" in text, f"{accident}\n{text}"
    for rank in range(accident.ranks):
        path = folder / "run" / "logs" / f"stacks_rank_{rank}.txt"
        # A rank that answers nothing has none.
        if accident.kind != "hold" or rank != accident.rank:
            assert "innermost call last" in path.read_text(), f"{accident}: no stack of rank {rank}"


def drill(shards: Path, accidents: list[Accident], folder: Path) -> list[float]:
    """Run all accidents one after the other; returns the seconds that each took to end."""
    seconds = []
    for number, accident in enumerate(accidents):
        place = folder / str(number)
        outcome = run(accident, shards, place)
        sys.stderr.write(f"{number + 1:2d}/{len(accidents)} {outcome.seconds:5.2f} s  {accident}\n")
        check(accident, outcome, place)
        seconds.append(outcome.seconds)
    return seconds


def everywhere(kinds: tuple[str, ...]) -> list[Accident]:
    """Each place in turn, with the kinds, ranks and numbers of ranks in turn."""
    found = []
    for place, kind, (ranks, rank) in zip(
        PLACES, itertools.cycle(kinds), itertools.cycle([(2, 1), (2, 0), (4, 3), (4, 0), (4, 1)]), strict=False
    ):
        found.append(Accident(rank=rank, place=place, kind=kind, ranks=ranks))
    return found


def test_a_stopped_rank_is_named_wherever_it_stands(shards, tmp_path):
    drill(shards, everywhere(("stop",)), tmp_path)


@pytest.mark.parametrize("kind", ["sleep", "block", "spin", "hold"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_main_thread_that_hangs_is_named(kind, rank, shards, tmp_path):
    drill(shards, [Accident(rank=rank, place=HOP, kind=kind, ranks=2)], tmp_path)


@pytest.mark.parametrize("place", [PLACES[0], PLACES[5], PLACES[7]], ids=lambda place: place.part)
def test_a_main_thread_that_waits_for_ever_is_named_outside_of_attention(place, shards, tmp_path):
    drill(shards, [Accident(rank=1, place=place, kind="block", ranks=2)], tmp_path)


@pytest.mark.parametrize(
    ("kind", "rank", "words"),
    [
        ("exit", 1, "rank 1 of 3 did not join at"),
        ("stop", 2, "rank 2 of 3 did not join at"),
    ],
)
def test_a_rank_that_does_not_come_is_named(kind, rank, words, shards, tmp_path):
    # Under a launcher: what is stopped before it has come is known by its parent alone.
    launcher = "none"
    if kind == "stop":
        launcher = "deepspeed"
    accident = Accident(rank=rank, place=MEETING, kind=kind, ranks=3, launcher=launcher)
    outcome = start(
        accident,
        flags(
            shards,
            tmp_path / "run",
            {"run.hostfile": "none", "run.meet_seconds": MEET, "parallel.context": 1, "train.tokens_per_step": 768},
        ),
        tmp_path,
        limit=MEET + 25.0,
    )
    others = [code for number, code in enumerate(outcome.codes) if number != rank]
    assert launcher == "deepspeed" or others == [1, 1], outcome.text
    assert outcome.seconds < MEET + 2 * END_SECONDS, outcome.text
    assert outcome.text.count(words) == 1, outcome.text
    assert f"from {socket.gethostname()}" in outcome.text
    assert "Traceback" not in outcome.text, outcome.text
    assert len(screen(outcome.text)) < SCREEN


KEYS = {
    **{"train.steps": 4, "checkpoint.every_steps": 2, "validation.every_steps": 2, "parallel.expert": 2},
    **{"parallel.context": 2, "parallel.layout": "zigzag", "checkpoint.wait": True},
}
# Two layers, each with three exchanges in both micro-batches of a step, and one in each row of a validation.
IN_STEP_3 = 4 + 12 + 12 + 4 + 3
START = Place("hop", "parallel.transport.ring_exchange", "RingExchange._start", call=IN_STEP_3)
KINDS = {
    "drop a hop": ("a hop that never comes", ("the run hangs", "because of rank 1:", "with ranks 0")),
    "send a hop twice": ("a hop that is sent twice", ("the run hangs", "exchanging", "hop 1")),
    "sleep": ("a hop later than the time-out", ("the run hangs", "because of rank 0:")),
}
"""What happens to a hop of rank 0: its name, and what the user reads."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_hop_that_does_not_come_as_it_should_ends_the_run_in_time(kind, shards, tmp_path, fault_rows):
    outcome = run(Accident(rank=0, place=START, kind=kind, ranks=2), shards, tmp_path, KEYS)
    assert outcome.codes == [1, 1], outcome.text
    assert outcome.seconds < TIMEOUT + END_SECONDS, outcome.text
    name, expected = KINDS[kind]
    for words in expected:
        assert words in "\n".join(screen(outcome.text)), outcome.text
    assert [row["step"] for row in rows(tmp_path / "run") if row["kind"] == "train"] == [1, 2]
    workers.run(train, 2, shards, tmp_path / "quiet", KEYS)
    workers.run(train, 2, shards, tmp_path / "run", {**KEYS, "run.resume": "latest"})
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


def main() -> None:
    """Make a corpus, run the drill, print the table."""
    from tests.launcher.conftest import build_tiny_shards

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = build_tiny_shards(folder)
        accidents = everywhere(("stop",))
        accidents += [
            Accident(rank=rank, place=HOP, kind=kind, ranks=2)
            for kind in ("sleep", "block", "spin", "hold")
            for rank in (0, 1)
        ]
        seconds = drill(shards, accidents, folder)
    lines = [f"| what ({TIMEOUT:g} s of time-out) | runs | median | worst |", "|---|---|---|---|"]
    for kind in dict.fromkeys(accident.kind for accident in accidents):
        of_kind = [s for s, accident in zip(seconds, accidents, strict=True) if accident.kind == kind]
        lines.append(f"| {kind} | {len(of_kind)} | {statistics.median(of_kind):.1f} s | {max(of_kind):.1f} s |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    started = time.monotonic()
    main()
    sys.stderr.write(f"{time.monotonic() - started:.0f} s\n")
