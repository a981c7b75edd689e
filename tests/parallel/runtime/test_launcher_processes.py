"""Who started a rank, how it learns that they are gone, and that it speaks after they have."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from parallel.runtime import launcher_processes
from parallel.runtime.launcher_processes import find_launcher_chain, launcher_above, was_orphaned
from tests.helpers import REPOSITORY

SECONDS = 60.0
_RUNNER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], "deepspeed.launcher.launch", *sys.argv[2:]])
"""
_LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[2:]])
print("the launcher's words", file=sys.stderr, flush=True)
"""
_COMMAND = """
import os, subprocess, sys
own = {"LONGCTX_STARTER": str(os.getpid()), "RANK": "0"}
subprocess.run([sys.executable, "-c", *sys.argv[1:]], env=os.environ | own)
"""
_RANK = """
import sys, threading
from pathlib import Path
{start}
from parallel.runtime.launcher_processes import find_launcher_chain, watch_launcher_processes
here = Path(sys.argv[1])
found, gone = find_launcher_chain(), threading.Event()
def tell(launcher):
    (here / "gone").write_text(launcher.label)
    gone.set()
watch_launcher_processes(found, tell)
(here / "partial").write_text("\\n".join(str(launcher.process.pid) for launcher in found))
(here / "partial").rename(here / "found")
gone.wait(100.0)
"""
_SAYING = "from parallel.runtime.watch.last_message import print_last_message; print_last_message('a last word')"


def tree(folder: Path, rank: str) -> subprocess.Popen:
    """A process that passes for DeepSpeed's runner, with a launcher and a rank below it."""
    (folder / "deepspeed").write_text(_RUNNER)
    return subprocess.Popen(
        [sys.executable, str(folder / "deepspeed"), _LAUNCHER, rank, str(folder)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + SECONDS
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text()


@pytest.mark.parametrize(
    ("victim", "said", "start"),
    [
        (0, "deepspeed's launcher", ""),
        (1, "deepspeed's runner", ""),
        # A system that has no process handles.
        (1, "deepspeed's runner", "import os; del os.pidfd_open"),
    ],
)
def test_a_rank_learns_who_is_gone(tmp_path, victim, said, start):
    runner = tree(tmp_path, _RANK.format(start=start))
    family = []
    try:
        pids = [int(line) for line in wait_for(tmp_path / "found").splitlines()]
        family = [psutil.Process(runner.pid), *psutil.Process(runner.pid).children(recursive=True)]
        assert pids == [family[1].pid, runner.pid]
        began = time.monotonic()
        psutil.Process(pids[victim]).kill()
        assert wait_for(tmp_path / "gone") == said
        assert time.monotonic() - began < SECONDS / 2
    finally:
        for process in family:
            if process.is_running():
                process.kill()
        runner.communicate()


def test_a_rank_learns_that_the_longctx_command_that_started_it_is_gone(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, "-c", _COMMAND, _RANK.format(start=""), str(tmp_path)]
    starter, ranks = subprocess.Popen(words, env=environment), []
    try:
        assert wait_for(tmp_path / "found") == str(starter.pid)
        ranks = psutil.Process(starter.pid).children()
        starter.kill()
        assert wait_for(tmp_path / "gone") == "longctx"
    finally:
        starter.kill()
        starter.wait()
        for rank in ranks:
            if rank.is_running():
                rank.kill()


def test_last_words_come_after_the_launchers(tmp_path):
    text = tree(tmp_path, _SAYING).communicate(timeout=SECONDS)[1]
    assert text == "the launcher's words\n\na last word\n\n"


@pytest.mark.parametrize("shell", [(), ("sh", "-c", '"$@"; exit $?', "sh")])
def test_last_words_are_said_in_a_container(tmp_path, shell):
    """Process 1 is the launcher, or a shell that runs it: the system kills whoever would speak after it."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs process numbers of its own: unshare --pid is refused here")
    (tmp_path / "torchrun").write_text(_LAUNCHER.replace('"-c", *sys.argv[2:]', "sys.argv[1]"))
    (tmp_path / "rank.py").write_text(_SAYING)
    ended = subprocess.run(
        [*apart, *shell, sys.executable, str(tmp_path / "torchrun"), str(tmp_path / "rank.py")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    assert ended.stderr == "\na last word\n\nthe launcher's words\n"


def test_a_user_is_no_launcher(monkeypatch):
    assert launcher_above() is None
    assert find_launcher_chain() == []
    assert not was_orphaned(os.getppid())
    # Nor is one whose environment a user has set up by hand.
    monkeypatch.setenv("RANK", "0")
    assert not was_orphaned(-1)
    monkeypatch.setenv("CROSS_SIZE", "1")
    assert not was_orphaned(os.getppid())
    assert was_orphaned(-1), "its parent is not the one that it began with"


class Seen:
    """A process as psutil shows it."""

    def __init__(self, name: str, line: str) -> None:
        self._name, self._words = name, line.split()

    def name(self) -> str:
        return self._name

    def cmdline(self) -> list[str]:
        return self._words


LAUNCH = "python -u -m deepspeed.launcher.launch"


@pytest.mark.parametrize(
    ("chain", "what"),
    [
        ([("deepspeed", "python /bin/deepspeed --num_gpus 2 x.py"), ("bash", "-bash")], "deepspeed's runner"),
        ([("sh", f"sh -c {LAUNCH}"), ("sshd-session", "sshd-session: me@notty")], "the deepspeed launcher"),
        ([("sshd", "sshd: me@notty")], "the deepspeed launcher"),
        # Somebody has typed it: his connection may end.
        ([("bash", "-bash"), ("sshd", "sshd: me@pts/0")], None),
        ([("bash", "bash -c nohup-me"), ("sshd", "sshd: me@notty")], None),
        ([("systemd", "/sbin/init")], None),
        ([], None),
    ],
)
def test_what_runs_a_launcher(chain, what):
    found = launcher_processes._above([Seen(*seen) for seen in chain])  # type: ignore[arg-type]
    if what is None:
        assert found is None
    else:
        assert found is not None
        assert found.label.startswith(what)
