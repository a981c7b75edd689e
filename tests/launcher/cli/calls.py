"""How the tests call the command line: in this process, or in one of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import main
from tests.helpers import REPOSITORY

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


def start(*words: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "launcher", *map(str, words)]
    pipe = subprocess.PIPE

    def hear_interrupts() -> None:  # a shell's background jobs, and so perhaps these tests, ignore them
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    options = {"preexec_fn": hear_interrupts, **options}
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True, **options)
