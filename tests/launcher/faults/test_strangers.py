"""Strangers at the ports of a run: nothing that they say or hold changes it, and no other machine reaches them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psutil
import pytest

from launcher.supervise.progress import last_step
from tests.launcher.cluster.namespaces import Namespaces, namespaces, why_no_namespaces
from tests.launcher.faults.scene import RUN, Recovered, Scene, equal
from tests.launcher.runs import Launch, free_port
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
LIMIT = 300.0
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
    ended = launch.wait(LIMIT)
    assert (ended.code, ended.orphans) == (0, []), ended.text
    scene.record(
        "cluster",
        "strangers at every port",
        injected="thousands of random lines and some of the worst at all ports that the run listens at, from its start",
        seen=scene.seen(ended.text, "Done: 60 steps"),
        seconds=time.monotonic() - began,
        recovered=Recovered(0, 0, equal(scene.run, undisturbed)),
    )


def test_two_hosts_listen_at_the_interface_of_the_meeting_alone(scene: Scene):
    """Each has a second network, as a login network beside the fast one: nobody there reaches a port of the run."""
    if reason := why_no_namespaces():
        pytest.skip(reason)
    folder = scene.folder / "hosts"
    folder.mkdir()
    with namespaces(folder, 2, named=True) as hosts:
        for number, host in enumerate(hosts.hosts, start=1):
            for words in (
                ("ip", "link", "add", "other", "type", "bridge"),
                ("ip", "addr", "add", f"10.78.0.{number}/24", "dev", "other"),
                ("ip", "link", "set", "other", "up"),
            ):
                command(*hosts.on(host, *words))
        words = ["--hostfile", str(folder / "hostfile"), "--no_ssh_check", "--master_addr", hosts.hosts[0]]
        started = [str(Path(sys.executable).parent / "deepspeed"), *words, "--master_port", str(free_port())]
        settings = scene.settings({"train.steps": 40, "checkpoint.every_steps": 0})
        launch = Launch(settings, starter=hosts.on(hosts.hosts[0], *started), environment=hosts.environment)
        seen: dict[str, set[str]] = {host: set() for host in hosts.hosts}
        # From the first port that opens, while ranks come to one another too.
        while launch.is_running() and (last_step(scene.run) or 0) < 30:
            for host, found in seen.items():
                found |= listening_on(hosts, host)
        ended = launch.wait(LIMIT)
    assert ended.code == 0, ended.text
    for host, found in seen.items():
        assert found, f"nothing of the run was seen to listen on {host}"
        assert found == {host}, found


def listening_on(hosts: Namespaces, host: str) -> set[str]:
    """The addresses at which processes of Python listen there."""
    listed = command(*hosts.on(host, "ss", "--no-header", "--listening", "--tcp", "--numeric", "--processes"))
    lines = [line.split() for line in listed.splitlines() if "python" in line]
    return {words[3].rpartition(":")[0].partition("%")[0].strip("[]") for words in lines}


def command(*words: str) -> str:
    """What a command prints that must succeed."""
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout


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
