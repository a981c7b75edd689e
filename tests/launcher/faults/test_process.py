"""Processes: a rank is killed or stopped at any place, comes late or not at all, or is of another version."""

from __future__ import annotations

import pytest

from tests.launcher.faults.scene import SHORT, Scene
from tests.launcher.test_accidents import Accident, Place, check
from tests.launcher.test_hangs import HOP, MEETING
from tests.launcher.test_hangs import check as check_hang

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PLACES = {
    "forward": Place("forward", "longctx.model.block", "Block.forward", call=2),
    "a hop": Place("hop", "parallel.transport.point_to_point", "PointToPoint._block", call=2),
    "an all-to-all": Place("all-to-all", "parallel.experts.dispatcher", "AllToAllDispatcher.plan", call=2),
    "backward": Place("backward", "parallel.transport.point_to_point", "PointToPoint.backward"),
    "the optimizer step": Place("optimizer step", "parallel.zero.zero_engine", "ZeroEngine._nonfinite_gradients"),
}
STEP = 6
"""Five steps are recorded then, and a checkpoint is behind."""


def strike(scene: Scene, accident: Accident, kind: str, *, injected: str, seen: str = "died without a message") -> None:
    """All ranks end and hear why, and a run that goes on has the metrics of an undisturbed one: a row of the suite."""
    outcome = scene.strike(accident)
    check(accident, outcome)
    scene.record("process", kind, injected=injected, seen=scene.seen(outcome.text, seen), seconds=outcome.seconds)


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_is_killed(scene: Scene, place: str):
    accident = Accident(rank=1, place=PLACES[place], kind="SIGKILL", ranks=2, step=STEP)
    strike(scene, accident, f"SIGKILL in {place}", injected=f"rank 1 of 2 is killed in {place} of step {STEP}")


def test_rank_0_is_killed(scene: Scene):
    """The hub is its thread: the others must tell by themselves."""
    accident = Accident(rank=0, place=PLACES["a hop"], kind="SIGKILL", ranks=2, step=STEP)
    injected = f"rank 0, which watches over all, is killed in a hop of step {STEP}"
    strike(scene, accident, "SIGKILL of rank 0", injected=injected)


def test_a_rank_is_killed_while_it_validates(scene: Scene):
    place = Place("validation", "launcher.training.trainer", "validate")
    accident = Accident(rank=1, place=place, kind="SIGKILL", ranks=2)
    injected = "rank 1 of 2 is killed in the validation behind step 4"
    strike(scene, accident, "SIGKILL in validation", injected=injected)


@pytest.mark.parametrize(("kind", "said"), [("MemoryError", "MemoryError"), ("exit", "died without a message")])
def test_a_rank_ends_by_itself(scene: Scene, kind: str, said: str):
    accident = Accident(rank=1, place=PLACES["forward"], kind=kind, ranks=2, step=STEP)
    what = {"MemoryError": "an exception", "exit": "an exit without a word"}[kind]
    injected = f"rank 1 of 2 meets {what} in forward of step {STEP}"
    strike(scene, accident, f"{what} of one rank", injected=injected, seen=said)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_stopped_for_ever(scene: Scene, rank: int):
    accident = Accident(rank=rank, place=HOP, kind="stop", ranks=2, step=STEP)
    outcome = scene.strike(accident, SHORT)
    check_hang(accident, outcome, scene.folder)
    scene.record(
        "process",
        f"SIGSTOP of rank {rank}, for ever",
        injected=f"rank {rank} of 2 is stopped in a hop of step {STEP}; run.timeout_seconds = 6",
        seen=scene.seen(outcome.text, "the run hangs"),
        seconds=outcome.seconds,
    )


def test_a_rank_is_stopped_for_half_a_minute(scene: Scene):
    accident = Accident(rank=1, place=HOP, kind="pause", ranks=2, step=STEP, seconds=30.0)
    outcome = scene.strike(accident)
    assert outcome.codes == [0, 0], outcome.text
    # From a quarter of the time-out on it says so, again after twice as long.
    seen, seconds = scene.logged("sent no heartbeat for")
    scene.record(
        "process",
        "SIGSTOP of a rank, for 30 s",
        injected=f"rank 1 of 2 is stopped for 30 s in a hop of step {STEP}; run.timeout_seconds = 40",
        seen=seen,
        seconds=seconds,
        recovered=scene.went_on(),
    )


def test_a_rank_hangs_in_a_library(scene: Scene):
    accident = Accident(rank=1, place=HOP, kind="hold", ranks=2, step=STEP)
    outcome = scene.strike(accident, SHORT)
    check_hang(accident, outcome, scene.folder)
    scene.record(
        "process",
        "a rank hangs in a library",
        injected=f"rank 1 of 2 waits in C for ever, with Python's lock in hand, in a hop of step {STEP}",
        seen=scene.seen(outcome.text, "the run hangs"),
        seconds=outcome.seconds,
    )


def test_a_rank_is_late(scene: Scene):
    """Longer than the time-out, where others are patient: as rank 0 does that hashes a large file."""
    place = Place("save", "launcher.training.trainer", "Trainer._save", rank=1)
    accident = Accident(rank=1, place=place, kind="late", ranks=2)
    outcome = scene.strike(accident, {"run.timeout_seconds": 3.0})
    assert outcome.codes == [0, 0], outcome.text
    seen, seconds = scene.logged("rank 1 on")
    assert "kept others waiting" in seen
    scene.record(
        "process",
        "a rank is late",
        injected="rank 1 of 2 comes 4 s late to a save; run.timeout_seconds = 3",
        seen=seen,
        seconds=seconds,
        recovered=scene.went_on(),
    )


@pytest.mark.parametrize(
    ("kind", "what", "said"),
    [
        ("exit", "is absent", "rank 1 of 2 did not join at"),
        ("other port", "looks for the others at another port", "rank 1 of 2 did not join at"),
        ("other code", "is of another version", "the ranks run different code"),
    ],
)
def test_a_rank_does_not_come(scene: Scene, kind: str, what: str, said: str):
    outcome = scene.strike(Accident(rank=1, place=MEETING, kind=kind, ranks=2), SHORT)
    assert outcome.codes[0] == 1, outcome.text
    assert "Traceback" not in outcome.text, outcome.text
    scene.record(
        "process",
        f"a rank {what}",
        injected=f"rank 1 of 2 {what} when they meet; run.meet_seconds = 6",
        seen=scene.seen(outcome.text, said),
        seconds=outcome.seconds,
    )
