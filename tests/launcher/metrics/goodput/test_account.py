"""Effective training time: every second has one kind, whatever ends an attempt and whatever clocks say."""

from __future__ import annotations

import json
import random
from pathlib import Path
from time import sleep

import pytest

from launcher.metrics.goodput.account import KINDS, LEAST, ExpectedStep, Goodput, Median, effective_share, read_goodput
from launcher.metrics.goodput.live import LiveGoodput, RunTime, in_words
from launcher.metrics.goodput.timeline import TIMELINE_FILE, Timeline, TimelineClock, process_age, read_timeline

DAY = 86400.0


class World:
    """Time as a test wants it, on one machine or on several."""

    def __init__(self) -> None:
        self.now, self.set_by, self.began, self.machine = 1000.0, 0.0, 1000.0, "a"

    def clock(self) -> TimelineClock:
        return TimelineClock(
            monotonic=lambda: self.now,
            wall=lambda: 1.7e9 + self.now + self.set_by,
            uptime_seconds=lambda: self.now,
            boot_id=lambda: self.machine,
            age=lambda: self.now - self.began,
        )

    def start(self, folder: Path, *, step: int, starting: float = 5.0) -> Timeline:
        """An attempt that has been starting for so long."""
        self.began = self.now
        self.now += starting
        return Timeline(folder, step=step, clock=self.clock(), heartbeat_seconds=DAY)

    def steps(self, timeline: Timeline, *numbers: int, seconds: float = 10.0, between: float = 0.5, **more) -> None:
        for number in numbers:
            self.now += between + seconds
            timeline.step(number, seconds, **more)

    def spend(self, timeline: Timeline, doing, seconds: float) -> None:
        timeline.begin(doing)
        self.now += seconds
        timeline.did()


@pytest.fixture
def world() -> World:
    return World()


def check(goodput: Goodput, **expected: float) -> None:
    """These seconds and no others, and their sum is the wall time."""
    found = goodput.seconds()
    assert sum(found.values()) == pytest.approx(goodput.wall, abs=1e-6), "it adds up"
    assert all(seconds >= 0 for seconds in found.values())
    assert {kind: seconds for kind, seconds in found.items() if seconds > 1e-6} == pytest.approx(expected, abs=2e-3)


def test_an_undisturbed_run(world, tmp_path):
    timeline = world.start(tmp_path, step=0)
    world.steps(timeline, 1, 2, 3)
    world.spend(timeline, "validating", 4.0)
    world.spend(timeline, "saving", 2.0)
    world.steps(timeline, 4, wait=1.0)
    timeline.end("done")
    goodput = read_goodput(tmp_path)
    check(goodput, starting=5.0, productive=39.0, data=1.0, validation=4.0, saving=2.0, other=2.0)
    assert effective_share(goodput.seconds()) == pytest.approx(39 / 53)


def test_a_save_lasts_until_the_next_step_begins(world, tmp_path):
    """Nobody says that it has ended."""
    timeline = world.start(tmp_path, step=0, starting=0)
    timeline.begin("saving")
    world.now += 4.0
    world.steps(timeline, 1, between=0)
    timeline.begin("validating")
    world.now += 2.0
    timeline.begin("saving")
    world.now += 3.0
    timeline.end("done")
    check(read_goodput(tmp_path), saving=7.0, validation=2.0, productive=10.0)


def test_steps_behind_the_checkpoint_of_a_killed_attempt_are_lost_and_the_time_until_the_next_is_stopped(
    world, tmp_path
):
    timeline = world.start(tmp_path, step=0)
    world.steps(timeline, 1, 2, 3, 4, between=0)
    # Killed without a word; somebody starts it again.
    world.now += 60.0
    timeline = world.start(tmp_path, step=2)
    world.steps(timeline, 3, 4, 5, between=0)
    timeline.end("done")
    goodput = read_goodput(tmp_path)
    check(goodput, starting=10.0, productive=50.0, lost=20.0, stopped=60.0)
    assert [attempt.how for attempt in goodput.attempts] == [None, "done"]


def test_a_third_attempt_may_go_on_from_before_the_second(world, tmp_path):
    """The second one's checkpoint was damaged, and the first one's is taken."""
    for step, numbers in ((0, (1, 2, 3, 4)), (4, (5, 6)), (2, (3, 4, 5, 6, 7))):
        timeline = world.start(tmp_path, step=step, starting=0)
        world.steps(timeline, *numbers, between=0)
        timeline.end("failed")
    check(read_goodput(tmp_path), productive=70.0, lost=40.0)


def test_a_stop_and_a_resume_a_day_later_is_a_pause(world, tmp_path):
    timeline = world.start(tmp_path, step=0)
    world.steps(timeline, 1, 2, between=0)
    timeline.end("stopped")
    world.now += DAY
    timeline = world.start(tmp_path, step=2)
    world.steps(timeline, 3, between=0)
    timeline.end("done")
    goodput = read_goodput(tmp_path)
    check(goodput, starting=10.0, productive=30.0, paused=DAY)
    assert effective_share(goodput.seconds()) == pytest.approx(30 / 40), "a pause is shown, and not counted"


@pytest.mark.parametrize("how", ["launcher", "failed"])
def test_what_nobody_asked_for_is_no_pause(world, tmp_path, how):
    timeline = world.start(tmp_path, step=0, starting=0)
    world.steps(timeline, 1, between=0)
    timeline.end(how)
    world.now += 30.0
    world.start(tmp_path, step=1, starting=1).end("done")
    check(read_goodput(tmp_path), productive=10.0, stopped=30.0, starting=1.0)


@pytest.mark.parametrize("set_by", [-3600.0, 3600.0])
def test_a_clock_that_is_set_in_mid_run_changes_nothing(world, tmp_path, set_by):
    timeline = world.start(tmp_path, step=0)
    world.steps(timeline, 1, between=0)
    world.set_by, world.machine = set_by, "b"
    world.steps(timeline, 2, between=0)
    timeline.end("failed")
    # Another machine, whose clock was right all the time: between attempts times of day are all that there is.
    world.now, world.set_by, world.machine = world.now + 20.0, set_by, "c"
    world.start(tmp_path, step=2).end("done")
    check(read_goodput(tmp_path), productive=20.0, starting=10.0, stopped=20.0)


@pytest.mark.parametrize("set_by", [-3600.0, 3600.0])
def test_on_one_machine_a_clock_that_is_set_between_attempts_changes_nothing(world, tmp_path, set_by):
    timeline = world.start(tmp_path, step=0)
    timeline.end("failed")
    world.now, world.set_by = world.now + 20.0, set_by
    world.start(tmp_path, step=0).end("done")
    check(read_goodput(tmp_path), starting=10.0, stopped=20.0)


def test_a_host_whose_clock_is_behind_makes_no_negative_seconds(world, tmp_path):
    world.start(tmp_path, step=0).end("failed")
    world.now, world.set_by, world.machine = world.now + 20.0, -300.0, "b"
    world.start(tmp_path, step=0).end("done")
    goodput = read_goodput(tmp_path)
    check(goodput, starting=10.0)
    assert goodput.skewed == 1, "and the report says so"


def test_first_steps_compile_and_stalls_are_no_training(world, tmp_path):
    timeline = world.start(tmp_path, step=0, starting=0)
    world.steps(timeline, 1, seconds=100.0, between=0)
    world.steps(timeline, *range(2, 3 + LEAST), between=0)
    world.steps(timeline, 30, seconds=70.0, between=0)
    timeline.end("done")
    goodput = read_goodput(tmp_path)
    check(goodput, warm_up=90.0, stalled=60.0, productive=10.0 * (3 + LEAST))
    assert goodput.stalls == 1


def test_a_step_with_more_work_is_no_stall():
    usual = ExpectedStep()
    for _ in range(20):
        assert usual.see(10.0, 100.0) == 0.0
    assert usual.see(70.0, 700.0) == 0.0, "it is as fast as the others"
    assert usual.see(70.0, 200.0) == pytest.approx(50.0)
    assert usual.see(70.0, 0.0) == pytest.approx(60.0), "nobody knows its work"
    assert usual.see(19.0, 100.0) == 0.0, "less than twice"
    # Short steps of a busy machine.
    usual = ExpectedStep()
    assert [usual.see(seconds, 1.0) for seconds in [0.1] * 20 + [0.9]] == [0.0] * 21


def test_the_median_is_that_of_the_last_values():
    draw = random.Random(3)
    median, values = Median(10), []
    assert median.value == 0.0
    for _ in range(50):
        values.append(draw.choice([1.0, 2.0, 2.0, 5.0]))
        median.add(values[-1])
        last = sorted(values[-10:])
        assert median.value == (last[(len(last) - 1) // 2] + last[len(last) // 2]) / 2


def test_a_signs_of_life_say_how_long_a_killed_attempt_lived(world, tmp_path):
    timeline = world.start(tmp_path, step=0, starting=1.0)
    world.steps(timeline, 1, between=0)
    # 40 s into the second step it was alive; 20 s later it is started again.
    beat = {"event": "alive", "in": "step", "until": 51.0}
    with (tmp_path / TIMELINE_FILE).open("a") as file:
        file.write(json.dumps(beat) + "\n")
    world.now += 60.0
    world.start(tmp_path, step=1, starting=1.0).end("done")
    check(read_goodput(tmp_path), starting=2.0, productive=10.0, lost=40.0, stopped=20.0)


def test_a_thread_gives_signs_of_life_and_ends(tmp_path):
    timeline = Timeline(tmp_path, step=0, heartbeat_seconds=0.02)
    while not any(line.get("event") == "alive" for line in read_timeline(tmp_path)):
        pass
    timeline.end("done")
    timeline.end("failed")
    *_, last = read_timeline(tmp_path)
    assert last["how"] == "done"
    assert last["until"] < 3600, "since the process began"
    assert process_age() > 0


def test_a_step_that_fails_is_lost_and_a_skipped_one_has_trained_nothing(world, tmp_path):
    timeline = world.start(tmp_path, step=0, starting=0)
    world.steps(timeline, 1, between=0)
    world.steps(timeline, 2, between=0, skipped=True)
    world.now += 7.0
    timeline.end("failed")
    check(read_goodput(tmp_path), productive=10.0, skipped=10.0, lost=7.0)


def test_half_lines_and_lines_of_nonsense_are_passed_over(world, tmp_path):
    timeline = world.start(tmp_path, step=0)
    world.steps(timeline, 1, between=0)
    path = tmp_path / TIMELINE_FILE
    with path.open("a") as file:
        file.write('{"in": "step", "seconds": 1, "until": "x"}\n[1]\n{"event": "what"}\n{"in": "step", "sec')
    world.start(tmp_path, step=1).end("done")
    assert path.read_text().count("\n") == len(path.read_text().splitlines())
    check(read_goodput(tmp_path), starting=10.0, productive=10.0)


def test_a_file_that_cannot_be_written_ends_nothing(world, tmp_path, caplog):
    (tmp_path / TIMELINE_FILE).mkdir()
    timeline = world.start(tmp_path, step=0)
    world.steps(timeline, 1, 2)
    timeline.end("done")
    assert caplog.text.count("cannot be written") == 1
    goodput = read_goodput(tmp_path)
    assert not goodput.attempts
    assert effective_share(goodput.seconds()) is None


def test_whatever_happens_it_adds_up(world, tmp_path):
    """Random runs: the account while they go on is that of the file, and both are the world's time."""
    draw = random.Random(11)
    began, step = world.now, 0
    for _ in range(12):
        timeline = world.start(tmp_path, step=step, starting=draw.uniform(0, 20))
        live = LiveGoodput(read_goodput(tmp_path))
        at = step
        for _ in range(draw.randrange(30)):
            seconds = draw.choice([1.0, 1.0, 1.0, 1.1, 9.0])
            world.now += seconds + draw.uniform(0, 0.2)
            at += 1
            more = {"wait": draw.uniform(0, seconds), "work": draw.uniform(0, 2), "skipped": draw.random() < 0.1}
            for line in timeline.step(at, seconds, **more):
                live.add(line)
            if draw.random() < 0.3:
                timeline.begin(draw.choice(["saving", "validating"]))
                world.now += draw.uniform(0, 5)
                live.add(timeline.did())
        assert live.seconds() == pytest.approx(read_goodput(tmp_path).seconds(), abs=0.01)
        assert sum(live.seconds().values()) == pytest.approx(world.now - began, abs=0.3), "and a half step"
        if draw.random() < 0.5:
            timeline.end(draw.choice(["done", "stopped", "launcher", "failed"]))
        world.now += draw.uniform(0, 100)
        step = draw.randint(0, at)
    goodput = read_goodput(tmp_path)
    assert sum(goodput.seconds().values()) == pytest.approx(goodput.wall, abs=1e-6)
    assert set(goodput.seconds()) == set(KINDS)


def test_in_words():
    seconds = {"productive": 90.0, "lost": 6.0, "starting": 3.9, "other": 0.1, "paused": DAY}
    assert in_words(dict.fromkeys(KINDS, 0.0) | seconds, 2) == (
        "Effective training time: 90.0% of 2 min, 2 restarts (lost 6.0%, starting 3.9%, other 0.1%). Paused for "
        "1 d 0 h, not counted."
    )
    assert in_words(dict.fromkeys(KINDS, 0.0), 0) == ""


def test_the_last_words_of_a_run_are_those_of_its_file(tmp_path):
    """Its last save has no step behind it."""
    time = RunTime(tmp_path, step=0)
    time.see({"kind": "train", "step": 1, "step_seconds": 0.001})
    time.begin("saving")
    sleep(0.2)
    told = time.end(failed=False)
    seconds = read_goodput(tmp_path).seconds()
    assert 0.2 <= seconds["saving"] < 60
    assert told == in_words(seconds, 0)
