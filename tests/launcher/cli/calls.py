"""How the tests call the command line: in this process, or in one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from tests.helpers import REPOSITORY
from tests.launcher.runs import free_port

VOCAB_SIZE = 600


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one verb."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def succeed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Standard output of a verb that does what it is asked."""
    code, out, err = call(capsys, *words)
    assert code == 0, out + err
    return out


def refused(capsys: pytest.CaptureFixture[str], wanted: int, *words: object) -> str:
    """Standard error of a verb that ends with this exit code, says why, and prints nothing else."""
    code, out, err = call(capsys, *words)
    assert (code, out) == (wanted, ""), out + err
    assert "Traceback" not in err
    return err


def start(*words: object, **options) -> subprocess.Popen:
    command, pipe = [sys.executable, "-m", "launcher", *map(str, words)], subprocess.PIPE
    options = {"preexec_fn": hear_interrupts, **options}
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True, **options)


def hear_interrupts() -> None:
    """A shell's background jobs, and so perhaps these tests, ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def deepspeed(script: str, *words: object) -> tuple[list[str], dict[str, Any]]:
    """The command that a user types for two ranks of this machine, and where it runs, for ``subprocess``."""
    folder = Path(sys.executable).parent
    command = [f"{folder}/deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), script, *map(str, words)]
    ours = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": f"{folder}:{os.environ['PATH']}"}
    return command, {"cwd": REPOSITORY, "env": {**os.environ, **ours}}
