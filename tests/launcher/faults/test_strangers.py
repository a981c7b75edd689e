"""Strangers at the ports of a run: nothing that they say or hold changes it, and no other machine reaches them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterator
from random import Random

import psutil
import pytest

from launcher.supervise.progress import last_step
from tests.launcher.faults.scene import RUN, Recovered, Scene, equal
from tests.launcher.runs import Launch
from tests.launcher.workers import run, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CRAFTED = (
    b"[" * 60_000 + b"\n",
    b'{"kind": "hello", "token": "x", "process": {"rank": Infinity}}\n',
    b'{"kind": "failed", "rank": 1, "code": 1, "text": "no"}\n',
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    bytes(4096),
    b"\xff" * 4096,
    b"\n" * 1000,
    b"",
)
LINES = 10_000
"""To all ports together, unless the run ends before; one in fifty is crafted."""


def test_strangers_at_every_port(scene: Scene):
    longer = {"train.steps": 60, "checkpoint.every_steps": 20}
    undisturbed = scene.folder / "undisturbed"
    run(train, 2, scene.shards, undisturbed, {**RUN, **longer})
    launch, random, said, met = Launch(scene.settings(longer)), Random(0), 0, set[int]()
    # While the ranks come to one another: at the store and the hub.
    launch.wait_until(lambda: bool(ports(launch)))
    while launch.is_running() and not last_step(scene.run):
        for port in ports(launch):
            met.add(port)
            say(port, CRAFTED[random.randrange(len(CRAFTED))])
    listening, threads, began = ports(launch), count_threads(launch), time.monotonic()
    assert {ipaddress.ip_address(address).is_loopback for address in listening.values()} == {True}, listening
    for data in lines(random, LINES // len(listening)):
        if (last_step(scene.run) or 0) > 50:
            break
        assert count_threads(launch) >= threads
        for port in listening:
            say(port, data)
            said += 1
    # The hub listens no more once all have come, so its port is among the first alone.
    assert met - listening.keys()
    assert said > LINES // 10
    ended = launch.wait(300)
    assert (ended.code, ended.orphans) == (0, []), ended.text
    scene.record(
        "cluster",
        "strangers at every port",
        injected="thousands of random lines and some of the worst at all ports that the run listens at, from its start",
        seen=scene.seen(ended.text, "Done: 60 steps"),
        seconds=time.monotonic() - began,
        recovered=Recovered(0, 0, equal(scene.run, undisturbed)),
    )


def ports(launch: Launch) -> dict[int, str]:
    """Every port at which a process of the run listens, and its address."""
    found: dict[int, str] = {}
    with contextlib.suppress(psutil.Error):
        for process in launch.ranks().values():
            for line in process.net_connections("inet"):
                if line.status == psutil.CONN_LISTEN:
                    found[line.laddr.port] = line.laddr.ip
    return found


def count_threads(launch: Launch) -> int:
    """Threads of all ranks."""
    return sum(process.num_threads() for process in launch.ranks().values())


def lines(random: Random, count: int) -> Iterator[bytes]:
    """Random lines, and among them crafted ones."""
    for number in range(count):
        if number % 50 == 0:
            yield CRAFTED[number // 50 % len(CRAFTED)]
        yield random.randbytes(random.randint(1, 300)) + b"\n"


def say(port: int, data: bytes) -> None:
    """Connect, say it and leave, if somebody listens."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0) as line:
        line.sendall(data)
