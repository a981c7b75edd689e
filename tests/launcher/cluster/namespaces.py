"""Hosts on one machine with networks of their own: Linux network namespaces at one switch, each with an ssh server.

Links between them can be cut, as those between real machines are by accident.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.launcher.cluster.cluster import missing_programs, server_program, write_files

_PORT = 2222


def why_no_namespaces() -> str | None:
    """Why no such hosts can be made here; None when they can."""
    if reason := missing_programs():
        return reason
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and ip: apt-get install iproute2"
    name = f"longctx-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    run("ip", "netns", "del", name)
    return None


def run(*words: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)


class Namespaces:
    """Hosts ``10.77.0.1`` and on, each in a namespace with the interface ``eth0``."""

    def __init__(self, folder: Path, count: int) -> None:
        self.hosts = [f"10.77.0.{number + 1}" for number in range(count)]
        self.folder = folder
        self._prefix = f"longctx-{os.getpid()}"
        self.environment = write_files(folder, self.hosts, _PORT)
        """What a command on the first host needs."""

    def on(self, host: str, *words: str) -> list[str]:
        """The words that run a command on a host."""
        return ["ip", "netns", "exec", self._namespace(host), *words]

    def cut(self, first: str, second: str) -> None:
        """Lose every packet between two hosts, as a firewall that drops them: they are sent to nobody's address."""
        for host, other in ((first, second), (second, first)):
            words = ("ip", "neigh", "replace", other, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
            run(*self.on(host, *words))

    def mend(self, first: str, second: str) -> None:
        """Undo ``cut``: they ask for each other's address again."""
        for host, other in ((first, second), (second, first)):
            run(*self.on(host, "ip", "neigh", "del", other, "dev", "eth0"))

    def cut_port(self, source: str, target: str, port: int) -> None:
        """Lose every packet from one host to a port of another, as a firewall that lets other ports pass."""
        nobody, table = "10.77.0.250", "100"
        address = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        run(*self.on(source, "ip", "rule", "add", "to", target, "ipproto", "tcp", "dport", f"{port}", "table", table))
        run(*self.on(source, "ip", "route", "add", target, "via", nobody, "dev", "eth0", "table", table))
        run(*self.on(source, "ip", "neigh", "replace", nobody, *address))

    def make(self) -> None:
        """Make the switch, the hosts and what connects them."""
        switch = self._namespace("switch")
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts):
            space, port = self._namespace(host), f"port{number}"
            run("ip", "netns", "add", space)
            ends = ("type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "-n", switch, "link", "add", "dev", port, *ends)
            run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            run("ip", "-n", space, "addr", "add", f"{host}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Remove all of them; what is connected goes with them."""
        for name in ("switch", *self.hosts):
            # Those that talk across a network that is gone would wait for ever.
            for pid in subprocess.run(
                ["ip", "netns", "pids", self._namespace(name)], capture_output=True, text=True, check=False
            ).stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", self._namespace(name)], capture_output=True, check=False)

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"


@contextmanager
def namespaces(folder: Path, count: int, *, named: bool = False) -> Iterator[Namespaces]:
    """So many hosts with running ssh servers; they are gone after the block.

    With ``named`` each has a host name of its own: ranks take them for different machines.
    """
    spaces = Namespaces(folder, count)
    with ExitStack() as stack:
        stack.callback(spaces.remove)
        spaces.make()
        for host in spaces.hosts:
            words = [str(server_program()), "-D", "-e", "-f", str(folder / "sshd.conf")]
            if named:
                name = host.replace(".", "-")
                words = ["unshare", "--uts", "sh", "-c", f'hostname host-{name}; exec "$@"', "sh", *words]
            words = spaces.on(host, *words)
            server = subprocess.Popen(words, stderr=subprocess.DEVNULL)
            stack.callback(_end, server)
        _wait_for_servers(spaces)
        yield spaces


def _end(server: subprocess.Popen) -> None:
    server.send_signal(signal.SIGTERM)
    server.wait(timeout=10)


def _wait_for_servers(spaces: Namespaces) -> None:
    """Return when the first host can run a command on each of them."""
    deadline = time.monotonic() + 20
    for host in spaces.hosts:
        words = spaces.on(spaces.hosts[0], "ssh", "-F", str(spaces.folder / "ssh_config"), host, "true")
        while subprocess.run(words, capture_output=True, check=False, timeout=20).returncode != 0:
            assert time.monotonic() < deadline, f"no ssh server on {host}"
            time.sleep(0.1)
