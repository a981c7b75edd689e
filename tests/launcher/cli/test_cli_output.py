"""Tables, sizes and progress of the command line."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.cli import cli_output
from tests.helpers import REPOSITORY
from tests.launcher.cli.calls import hear_interrupts


def test_progress_is_lines_where_nobody_looks(capsys):
    with cli_output.progress("reading", total=200, seconds_between_lines=0.0) as update:
        update(50, note="5 files")
        update(300, note="6 files")  # more than the guess: no share
    assert capsys.readouterr().err == "reading …\nreading: 25% 5 files\nreading: 6 files\n"


def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = ""
    with cli_output.progress("reading", total=200) as update:
        for done, note in ((50, "5 files"), (300, "6 files")):
            update(done, note=note)
            while note not in shown:  # it is drawn now and then
                time.sleep(0.01)
                shown += capsys.readouterr().err
    assert "25%" in shown
    assert "100%" not in shown


@pytest.mark.parametrize(
    ("argv", "orig_argv", "path", "name"),
    [
        (["BIN/longctx", "report"], ["BIN/python", "BIN/longctx", "report"], "BIN", "longctx"),
        (["BIN/longctx", "report"], ["BIN/python", "BIN/longctx", "report"], "/nowhere", "BIN/longctx"),
        (["launcher/__main__.py"], ["bin/python", "-m", "launcher", "report"], "/nowhere", "bin/python -m launcher"),
        (["pytest"], ["python", "pytest"], "/nowhere", "python -m launcher"),
    ],
)
def test_suggested_commands_begin_as_the_one_that_was_typed(argv, orig_argv, path, name, tmp_path, monkeypatch):
    (tmp_path / "longctx").touch(mode=0o755)

    def here(*words: str) -> list[str]:
        return [word.replace("BIN", str(tmp_path)) for word in words]

    monkeypatch.setattr("sys.argv", here(*argv))
    monkeypatch.setattr("sys.orig_argv", here(*orig_argv))
    monkeypatch.setenv("PATH", *here(path))
    assert [cli_output.program()] == here(name)


@pytest.mark.parametrize("outside", [False, True])
def test_an_interrupted_thread_removes_what_it_has_half_written(tmp_path, outside):
    """One that computes outside of Python is left behind, and has nothing half written."""
    script = f"""
import sys, time
from pathlib import Path
from launcher.cli import cli_output
from launcher.cli.cli_output import has_abandoned_work, interruptible
from longctx.files import replaced_file

def write():
    if {outside}:
        print("begun", flush=True)
        time.sleep(60)
    with replaced_file(Path({str(tmp_path)!r}, "file")) as temporary, temporary.open("wb") as out:
        out.write(b"half")
        print("begun", flush=True)
        while True:
            out.write(b"more")
            time.sleep(0.001)

if not {outside}:
    cli_output._CLEANING_SECONDS = 60
try:
    interruptible(write)
except KeyboardInterrupt:
    print("left behind" if has_abandoned_work() else "ended")
"""
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, preexec_fn=hear_interrupts)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=30)
    # The signal may come before the thread has left Python.
    assert told in (["ended\n", "left behind\n"] if outside else ["ended\n"])
    assert list(tmp_path.iterdir()) == []


TITLE = "\x1b]0;owned\x07"
"""What a terminal takes for its title."""


def on_a_terminal(*words: str) -> bytes:
    """What a command writes to a terminal that both its streams are."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", *words],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(theirs)
    said = b""
    # The system says that nobody holds the other end any more by an error.
    while True:
        try:
            data = os.read(ours, 65_536)
        except OSError:
            break
        if not data:
            break
        said += data
    os.close(ours)
    process.wait(60)
    return said


def test_names_and_texts_of_strangers(shards: Path, tmp_path):
    source = tmp_path / f"source{TITLE}"
    source.mkdir()
    (source / f"good{TITLE}.txt").write_text(f"a text {TITLE} " * 50)
    (source / f"bad{TITLE}.jsonl").write_text("no JSON\n")
    tokenizer = next(shards.glob("tokenizer*"))
    built = ["data", "build", "--source", str(source), "--tokenizer", str(tokenizer), "--output", str(tmp_path / "out")]
    commands = {
        "build": [*built, "--validation-fraction", "0"],
        "row": ["data", "inspect", str(tmp_path / "out"), "--row", "0", "--seq-len", "128"],
        "a path that is not there": ["data", "inspect", str(tmp_path / f"none{TITLE}")],
    }
    for name, words in commands.items():
        said = on_a_terminal(*words)
        assert b"\\x1b]0;owned" in said, (name, said)
        assert b"\x1b]0;" not in said, (name, said)
