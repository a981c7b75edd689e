"""A Slurm cluster of two nodes on this machine, with a controller, an authentication service and ports of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.launcher.runs import free_port

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
# The first node has this machine's own name, which everybody can find: ranks meet there,
# on the first by the alphabet.
_CONFIG = """\
ClusterName=longctx
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=60
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=zz-second NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=all Nodes={host},zz-second Default=YES State=UP
"""


def why_no_slurm() -> str | None:
    """Why there can be no such cluster here; None when there can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        return f"needs root and {', '.join(_PROGRAMS)}: apt-get install slurm-wlm munge"
    return None


@dataclass(frozen=True)
class Slurm:
    """A cluster that runs."""

    environment: dict[str, str]
    stack: ExitStack
    """What ends its programs."""

    def start(self, *words: str) -> None:
        """Start one of its programs, until the cluster ends."""
        process = subprocess.Popen(
            words, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.stack.callback(process.wait, 20)
        self.stack.callback(process.terminate)
        # The others ask the one before.
        time.sleep(1.0)

    def lose(self, node: str) -> None:
        """Kill whatever runs on a node, its daemon first, as a power cut does; the controller is told so."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.cmdline()[:1] == ["slurmd"] and node in process.cmdline():
                    process.kill()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                there = process.environ()
                own = there.get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if own and there.get("SLURMD_NODENAME") == node:
                    process.kill()
        # It would find out by itself after SlurmdTimeout, five minutes.
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def run(self, *words: str) -> str:
        """What one of its programs prints."""
        ended = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60, check=False, cwd=self.folder
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return Path(self.environment["SLURM_CONF"]).parent

    def wait(self, job: str, seconds: float) -> None:
        """Return when a job has ended; what it said where that takes too long."""
        deadline = time.monotonic() + seconds
        while self.run("squeue", "--noheader", "--jobs", job).strip():
            assert time.monotonic() < deadline, self.run("scontrol", "show", "job", job)
            time.sleep(0.5)

    def end_jobs(self) -> None:
        """End what still runs."""
        self.run("scancel", "--user", "root", "--full", "--signal", "KILL")
        self.run("scancel", "--user", "root")
        while self.run("squeue", "--noheader").strip():
            time.sleep(0.5)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start one in ``folder``, and end every process of it."""
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    ports = {name: free_port() for name in ("controller", "first", "second")}
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(host=host, folder=folder, **ports))
    environment = {**os.environ, "SLURM_CONF": str(config)}
    programs = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
        + [f"--{name}-file={folder}/munge.{name}" for name in ("log", "pid", "seed")],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
        ["slurmd", "-D", "-N", "zz-second"],
    ]
    with ExitStack() as stack:
        cluster = Slurm(environment, stack)
        for words in programs:
            cluster.start(*words)
        # Before the programs end: what jobs have started would go on.
        stack.callback(cluster.end_jobs)
        yield cluster
