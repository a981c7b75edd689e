"""A run that goes on no more: who is named, by which rule, and that every rank ends, the stopped one too."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from parallel.runtime.activity import Activity
from parallel.runtime.launched import code_version
from parallel.runtime.watch.activity_sampler import ActivitySampler, AwakeClock
from parallel.runtime.watch.processes import RankProcess
from parallel.runtime.watch.rendezvous_status import RendezvousStatus
from parallel.runtime.watch.stall_detection import DISK, PATIENT, TIMED, WORKS, RankState, detect_stall, slow_ranks
from parallel.runtime.watch.stall_report import Report, stall_message
from tests.parallel.runtime.watched import STARTED, Ranks

pytestmark = pytest.mark.timeout(200)

LIMIT = 10.0
WORKING = RankState(activity="forward", step=3, count=100, kind=WORKS, held=1.0, waited=0.0, quiet=1.0)
WAITING = dataclasses.replace(WORKING, kind=TIMED, waited=1.0)
PATIENTLY = dataclasses.replace(WORKING, kind=PATIENT, waited=5 * LIMIT, quiet=5 * LIMIT)


@pytest.fixture(autouse=True)
def _leave_none_behind():
    yield
    while STARTED:
        STARTED.pop().kill()


def changed(state: RankState, **fields) -> RankState:
    return dataclasses.replace(state, **fields)


@pytest.mark.parametrize(
    ("states", "ranks"),
    [
        ([WORKING, WAITING], None),
        # Silence, and it is named though another one works on.
        ([WORKING, changed(WORKING, silence=LIMIT)], (1,)),
        ([changed(WAITING, waited=LIMIT), changed(WORKING, silence=LIMIT)], (1,)),
        # A wait that a library would end soon: for whom does not wait, busy or not.
        ([changed(WAITING, waited=LIMIT), WORKING, WAITING], (1,)),
        ([changed(WAITING, waited=LIMIT), WORKING, changed(WORKING, quiet=9.0)], (2,)),
        # All wait: for the one that is behind.
        ([changed(WAITING, waited=LIMIT), changed(WAITING, count=99)], (1,)),
        ([changed(WAITING, waited=LIMIT, step=2, count=200), WAITING], (0,)),
        ([changed(WAITING, waited=LIMIT), WAITING], (0, 1)),
        # Patience ends when nobody makes progress, and no sooner.
        ([PATIENTLY, WORKING], None),
        ([PATIENTLY, changed(WORKING, held=5 * LIMIT)], None),
        ([PATIENTLY, changed(WORKING, quiet=LIMIT)], (1,)),
        ([PATIENTLY, PATIENTLY, changed(PATIENTLY, count=99)], (2,)),
        # A call to a file system may take longer than that.
        ([PATIENTLY, changed(WORKING, quiet=LIMIT, disk=True)], None),
        ([PATIENTLY, changed(WORKING, quiet=DISK * LIMIT, disk=True)], (1,)),
        ([changed(WORKING, quiet=LIMIT), changed(WORKING, quiet=LIMIT)], (0, 1)),
        ([], None),
    ],
)
def test_who_is_named(states, ranks):
    hang = detect_stall(dict(enumerate(states)), LIMIT)
    assert (hang.ranks if hang else None) == ranks


def test_a_slow_rank_is_named_while_the_run_goes_on():
    assert slow_ranks({0: WORKING, 1: WAITING}, 3.0) == ()
    assert slow_ranks({0: changed(WORKING, held=4.0), 1: changed(WAITING, waited=4.0)}, 3.0) == (0,)
    assert slow_ranks({0: changed(WORKING, silence=4.0), 1: WAITING}, 3.0) == (0,)
    half = dict.fromkeys(range(16), WORKING) | dict.fromkeys(range(16, 32), changed(WAITING, waited=9.0))
    assert slow_ranks(half, 3.0) == ()


def test_time_in_which_a_process_was_stopped_does_not_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = AwakeClock(0.2)
    now = 100.0625
    assert clock.tick() == 0.0625
    now = 100.5
    assert clock.tick() == 0.0625 == clock.woke


def test_work_is_seen_from_outside_and_waiting_is_not():
    doing, over, seen = Activity(), threading.Event(), []

    def look() -> None:
        sampler, started = ActivitySampler(doing, spins=False), time.monotonic()
        for _ in range(5):
            seen.append(sampler.sample(time.monotonic() - started))
            over.wait(0.1)

    def looked(action) -> RankState:
        seen.clear()
        thread = threading.Thread(target=look)
        thread.start()
        while thread.is_alive():
            action()
        return seen[-1]

    assert looked(lambda: sum(range(1000))).quiet < 0.3, "code that moves on"
    doing.wait = "rank 1"
    state = looked(lambda: sum(range(1000)))
    assert state.kind == TIMED
    assert state.quiet >= 0.4
    doing.patient = True
    assert looked(lambda: None).kind == PATIENT


class CompilersOf(ActivitySampler):
    """Looks for compilers as on a machine with thousands of processes; those it has started have used ten seconds.

    Its process is the thread that looks: a worker of the test run has threads of tests before this one.
    """

    compile_seconds = 0.0
    """What they use from one look to the next."""
    looks = 0
    file = -1

    def _used_by_children(self) -> float:
        self.looks += 1
        os.pread(self.file, 1 << 16, 0)
        began = time.thread_time()
        while time.thread_time() - began < 0.03:
            pass
        return 10.0 + self.looks * self.compile_seconds

    def _seconds_used(self) -> float:
        return time.thread_time()

    def _bytes_moved(self) -> int:
        read, written = Path("/proc/thread-self/io").read_text().splitlines()[:2]
        return int(read.split()[1]) + int(written.split()[1])


@pytest.mark.parametrize(("compile_seconds", "is_quiet"), [(0.0, True), (0.5, False)])
def test_looking_for_compilers_is_no_work_and_what_they_do_is(compile_seconds, is_quiet, tmp_path):
    (tmp_path / "processes").write_bytes(bytes(1 << 16))
    seen: list[RankState] = []

    def look() -> None:
        sampler = CompilersOf(Activity(), spins=False)
        sampler.compile_seconds = compile_seconds
        with (tmp_path / "processes").open("rb") as file:
            sampler.file = file.fileno()
            seen.extend(sampler.sample(float(second)) for second in range(20))

    thread = threading.Thread(target=look)
    thread.start()
    # The main thread is in one call all the time, as where a library hangs.
    thread.join()
    assert (max(state.quiet for state in seen) > 12) == is_quiet, [state.quiet for state in seen]


def arrival(rank: int, *, version: str = "1", host: str = "a") -> RankProcess:
    return dataclasses.replace(RankProcess.own(rank, version), host=host)


def test_the_roll_call_says_who_came_from_where_and_who_did_not():
    roll = RendezvousStatus(4, "1")
    assert roll.add(arrival(0)) == roll.add(arrival(2, host="b")) == ""
    assert "two processes are rank 2" in roll.add(arrival(2))
    assert "rank 7 on a joined a run with 4 ranks" in roll.add(arrival(7))
    assert not roll.is_complete
    text = roll.missing(45.0, "a:29500")
    assert "ranks 1, 3 of 4 did not join at a:29500 within 45 s" in text
    assert "rank 0 from a\n  rank 2 from b" in text
    assert roll.code_mismatch() == ""
    assert roll.add(arrival(1, version="2", host="c")) == roll.add(arrival(3)) == ""
    assert roll.is_complete
    assert "rank 1 on c: 2" in roll.code_mismatch()


def test_the_verdict_of_a_thousand_ranks_is_one_screen():
    states = {rank: changed(WAITING, activity=f"forward, layer {rank % 20}", waited=LIMIT) for rank in range(1000)}
    states[700] = changed(WORKING, activity="waiting for data", held=LIMIT)
    hang = detect_stall(states, LIMIT)
    assert hang is not None
    reports = {rank: Report(where=f"parallel/x.py:{rank} in wait") for rank in states}
    text = stall_message(hang, states, reports, {}, timeout=11.0, folder=None)
    lines = text.splitlines()
    assert "because of rank 700: others have waited 10.0 s for rank 700" in lines[0]
    assert lines[2].startswith("  rank 700: waiting for data (10.0 s)")
    assert len(lines) < 18
    assert max(map(len, lines)) < 250


def test_the_version_is_that_of_the_sources():
    assert code_version() == code_version()
    assert ", sources " in code_version()


STOP = "os.kill(os.getpid(), signal.SIGSTOP); block()"
SOON = {"TIMEOUT": "2"}


def said_by_all(runs: dict[str, Ranks]) -> dict[str, list[str]]:
    """What each rank wrote; all have ended with exit code 1, and one of each run has said why."""
    ended = {name: ranks.wait() for name, ranks in runs.items()}
    assert all(set(one.codes) == {1} for one in ended.values()), ended
    assert all("".join(one.said).count("ClusterError") == 1 for one in ended.values()), ended
    return {name: one.said for name, one in ended.items()}


def test_a_stopped_rank_and_one_that_never_comes_end_all(tmp_path):
    # At once, for both wait.
    said = said_by_all(
        {
            "stopped": Ranks(tmp_path / "stopped", ["block()", STOP], SOON),
            "absent": Ranks(tmp_path / "absent", ["block()", None], {"MEET": "2"}),
        }
    )
    assert "because of rank 1: no heartbeat for" in said["stopped"][0]
    assert f"on {socket.gethostname()}): its process is stopped" in said["stopped"][0]
    assert "rank 1 of 2 did not join" in said["absent"][0]


@pytest.mark.slow
def test_two_processes_that_are_one_rank(tmp_path):
    """The second one hears it; the run that the first one belongs to goes on."""
    ranks = Ranks(tmp_path, ["time.sleep(4.0)", "time.sleep(4.0)"])
    ranks.wait_until_met()
    # Another run's process finds this run's port.
    second = Ranks(tmp_path, [None, "pass"])
    ended = second.wait()
    assert ended.codes == [1]
    assert "already has all its ranks; another run uses this port" in ended.said[0]
    assert ranks.wait().codes == [0, 0]
