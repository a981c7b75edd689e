"""Hosts and the network between them: not there, in use, cut, slow to agree on the time."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from launcher.supervise.progress import last_step
from tests.helpers import REPOSITORY
from tests.launcher import test_accidents
from tests.launcher.cluster.cluster import missing_programs, two_hosts
from tests.launcher.cluster.namespaces import Namespaces, namespaces, why_no_namespaces
from tests.launcher.faults.scene import SHORT, Scene
from tests.launcher.runs import Launch, free_port
from tests.launcher.test_accidents import ACCIDENTS, Accident
from tests.launcher.test_hangs import MEETING

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LIMIT = 200.0


def test_a_host_that_is_not_there(scene: Scene):
    if reason := missing_programs():
        pytest.skip(reason)
    (scene.folder / "cluster").mkdir()
    with two_hosts(scene.folder / "cluster") as (hostfile, environment):
        with hostfile.open("a") as file:
            # Nothing listens there.
            file.write("127.0.0.3 slots=1\n")
        apart = {"parallel.context": 1, "parallel.expert": 1, "train.tokens_per_step": 768}
        launch = Launch(scene.settings({**SHORT, **apart}), hostfile=hostfile, environment=environment)
        began = time.monotonic()
        ended = launch.wait(LIMIT)
        seconds = time.monotonic() - began
    assert ended.code != 0
    assert not ended.orphans
    assert "Traceback" not in ended.text, ended.text
    scene.record(
        "cluster",
        "a host that cannot be reached",
        injected="the third of three in the hostfile, by pdsh; run.meet_seconds = 6",
        seen=scene.seen(ended.text, "rank 2 of 3 did not join at"),
        seconds=seconds,
    )


def test_a_port_that_is_taken(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(test_accidents, "free_port", lambda: taken.getsockname()[1])
        # Rank 0 says whose port it is; rank 1, on another machine, that nobody answers there.
        seen, seconds = scene.refused("Address already in use", 1, SHORT)
    scene.record("cluster", "a port in use", injected="the one where ranks meet", seen=seen, seconds=seconds)


@contextlib.contextmanager
def strangers(port: int) -> Iterator[None]:
    """Connections to a port that say what no rank says, or nothing, for as long as the block lasts."""
    is_over, kept = threading.Event(), []

    def connect() -> None:
        says = itertools.cycle([b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\xff" * 2000, b"{}\n"])
        while not is_over.wait(0.05):
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), timeout=1.0)
                connection.sendall(next(says))
                kept.append(connection)

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for connection in kept:
            connection.close()


def test_strangers_at_the_port(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    port = free_port()
    monkeypatch.setattr(test_accidents, "free_port", lambda: port)
    with strangers(port):
        outcome = scene.strike(Accident(rank=1, place=MEETING, kind="late", ranks=2), SHORT)
    assert outcome.codes == [0, 0], outcome.text
    scene.record(
        "cluster",
        "strangers on the port",
        injected="twenty connections a second, with HTTP, zeros or nothing, at the port where ranks meet",
        seen=scene.seen(outcome.text, "Done: 8 steps"),
        seconds=outcome.seconds,
        recovered=scene.went_on(),
    )


# What counts seconds is right on each host: hosts have one rate and no common zero. Made here: libfaketime bends waits
# too, and fails in one of some hundred.
WRONG_CLOCK = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += atol(getenv("SKEW"));
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
"""


@pytest.mark.parametrize("skew", [3600, -3600])
def test_clocks_that_differ(scene: Scene, tmp_path: Path, skew: int):
    library = tmp_path / "clock.so"
    compiler = ["gcc", "-x", "c", "-shared", "-fPIC", "-o", str(library), "-"]
    subprocess.run(compiler, input=WRONG_CLOCK, text=True, check=True, timeout=60)
    clock = {"LD_PRELOAD": str(library), "SKEW": str(skew)}
    wrong = {"LONGCTX_SKEW": json.dumps({"rank": "1", "environment": clock})}
    launch = Launch(scene.settings(), environment={**wrong, "PYTHONPATH": f"{ACCIDENTS}:{REPOSITORY}"})
    ended = launch.wait(LIMIT)
    assert ended.code == 0, ended.text
    firsts = [time_of_log(scene.run, rank) for rank in range(2)]
    assert 3000 < abs(firsts[1] - firsts[0]) < 4200, "the clock was not set"
    scene.record(
        "cluster",
        f"a clock that is an hour {'ahead' if skew > 0 else 'behind'}",
        injected=f"of rank 1 of 2, by a library before the C library ({skew:+,} s)",
        seen=scene.seen(ended.text, "Done: 8 steps"),
        seconds=ended.seconds,
        recovered=scene.went_on(),
    )


def time_of_log(run: Path, rank: int) -> float:
    """When a rank has written the first line of its log, by its own clock."""
    with (run / "logs" / f"rank_{rank}.log").open() as file:
        return datetime.strptime(file.readline()[:19], "%Y-%m-%d %H:%M:%S").timestamp()


@pytest.fixture
def hosts(scene: Scene) -> Iterator[Namespaces]:
    """Two hosts with networks of their own."""
    if reason := why_no_namespaces():
        pytest.skip(reason)
    folder = scene.folder / "hosts"
    folder.mkdir()
    with namespaces(folder, 2) as spaces:
        yield spaces


def start(scene: Scene, hosts: Namespaces, timeout: float) -> Launch:
    """The command, typed on the first host; returns once three steps are taken."""
    first = hosts.hosts[0]
    words = ["--hostfile", str(hosts.folder / "hostfile"), "--no_ssh_check", "--master_addr", first]
    command = [str(Path(sys.executable).parent / "deepspeed"), *words, "--master_port", str(free_port())]
    settings = scene.settings({"run.timeout_seconds": timeout})
    launch = Launch(settings, starter=hosts.on(first, *command), environment=hosts.environment)
    launch.wait_until(lambda: (last_step(scene.run) or 0) >= 3, timeout=LIMIT)
    return launch


def cut(scene: Scene, hosts: Namespaces) -> None:
    """Cut the network now."""
    (scene.folder / "happened").write_text(str(time.time()))
    hosts.cut(*hosts.hosts)


def test_a_network_that_is_cut(scene: Scene, hosts: Namespaces):
    launch = start(scene, hosts, timeout=6.0)
    cut(scene, hosts)
    log = scene.run / "logs"
    for rank in range(2):
        launch.wait_until(lambda rank=rank: "the run hangs" in (log / f"rank_{rank}.log").read_text(), timeout=LIMIT)
    seen, seconds = scene.logged("the run hangs")
    # ssh cannot say that the other host has ended as long as it hears nothing.
    hosts.mend(*hosts.hosts)
    ended = launch.wait(LIMIT)
    assert not ended.orphans
    assert "Traceback" not in ended.text, ended.text
    assert ended.text.count("the run hangs") >= 1, ended.text
    scene.record(
        "cluster",
        "the network is cut",
        injected="between two hosts, behind step 3; run.timeout_seconds = 6",
        seen=seen,
        seconds=seconds,
    )


def test_a_network_that_comes_back(scene: Scene, hosts: Namespaces):
    """TCP sends again after 0.2, 0.6, 1.4, 3 and 6.2 s: well within L = 10.8 s."""
    launch = start(scene, hosts, timeout=12.0)
    cut(scene, hosts)
    time.sleep(4.0)
    hosts.mend(*hosts.hosts)
    ended = launch.wait(LIMIT)
    assert ended.code == 0, ended.text
    seen, seconds = scene.logged("sent no heartbeat")
    scene.record(
        "cluster",
        "the network is cut for 4 s",
        injected="between two hosts, behind step 3; run.timeout_seconds = 12",
        seen=seen,
        seconds=seconds,
        recovered=scene.went_on(),
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_that_is_alone_on_its_machine(scene: Scene, rank: int):
    """Nobody there but its launcher, which would wait for it for ever, and the command for that."""
    if reason := why_no_namespaces():
        pytest.skip(reason)
    folder = scene.folder / "hosts"
    folder.mkdir()
    with namespaces(folder, 2, named=True) as hosts:
        launch = start(scene, hosts, timeout=6.0)
        victim = next(p for p in launch.family() if is_rank(p, rank))
        (scene.folder / "happened").write_text(str(time.time()))
        victim.send_signal(signal.SIGSTOP)
        ended = launch.wait(LIMIT)
    assert not ended.orphans
    assert "Traceback" not in ended.text, ended.text
    seen, seconds = scene.logged("the run hangs", rank=1 - rank)
    scene.record(
        "cluster",
        f"SIGSTOP of rank {rank}, alone on its host",
        injected="of two hosts with one rank each, behind step 3; run.timeout_seconds = 6",
        seen=seen,
        seconds=seconds,
    )


def is_rank(process: psutil.Process, rank: int) -> bool:
    """Whether this is the process that runs the script as this rank."""
    try:
        return process.name().startswith("python") and process.environ().get("RANK") == str(rank)
    except psutil.Error:
        return False
