"""Two hosts on one machine: 127.0.0.1 and 127.0.0.2 behind a throw-away ssh server, for deepspeed's real pdsh path."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.launcher.runs import free_port

HOSTS = ("127.0.0.1", "127.0.0.2")
INSTALL = "apt-get update && apt-get install -y openssh-server pdsh"

SERVER = """\
Port {port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
"""
"""The ssh server of tests; it listens everywhere unless lines before say where."""
CLIENT = """\
Host *
  Port {port}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def missing_programs() -> str | None:
    """Why no such cluster can be made here, with the line that mends it; None when it can."""
    missing = [name for name in ("ssh", "ssh-keygen", "pdsh") if shutil.which(name) is None]
    if server_program() is None:
        missing.append("sshd")
    return f"needs {', '.join(missing)}: {INSTALL}" if missing else None


@contextmanager
def two_hosts(folder: Path, *, slots: int = 1) -> Iterator[tuple[Path, dict[str, str]]]:
    """A running ssh server; yields the hostfile and the environment that a deepspeed command needs."""
    port = free_port()
    addresses = "".join(f"ListenAddress {host}\n" for host in HOSTS)
    environment = write_files(folder, HOSTS, port, slots=slots, server=addresses, GLOO_SOCKET_IFNAME="lo")
    server = subprocess.Popen(
        [str(server_program()), "-D", "-e", "-f", str(folder / "sshd.conf")], stderr=subprocess.PIPE
    )
    try:
        _wait_for(server, port)
        yield folder / "hostfile", environment
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=10)


def write_files(
    folder: Path, hosts: Sequence[str], port: int, *, slots: int = 1, server: str = "", **remote: str
) -> dict[str, str]:
    """Write keys, ``sshd.conf``, ``ssh_config``, ``hostfile`` and deepspeed's environment file of such hosts.

    ``server`` are more lines for the server. Returns the environment that a deepspeed command needs.
    """
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "sshd.conf").write_text(server + SERVER.format(port=port, folder=folder))
    (folder / "ssh_config").write_text(CLIENT.format(port=port, folder=folder))
    (folder / "hostfile").write_text("".join(f"{host} slots={slots}\n" for host in hosts))
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    # pdsh hands over no environment; deepspeed sets these on each host.
    remote = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": path, **remote}
    (folder / "environment").write_text("".join(f"{key}={value}\n" for key, value in remote.items()))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where a server started by root separates its privileges
    return {"DS_ENV_FILE": str(folder / "environment"), "PDSH_SSH_ARGS_APPEND": f"-F {folder / 'ssh_config'}"}


def server_program() -> str | None:
    """Path of the ssh server; None where there is none."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _wait_for(server: subprocess.Popen, port: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(OSError), socket.create_connection((HOSTS[1], port), timeout=1):
            return
        time.sleep(0.05)
    server.kill()
    assert server.stderr is not None
    raise AssertionError(f"the ssh server did not come up: {server.stderr.read().decode()}")
