"""Builds in processes of their own that are killed: the next one goes on and gives the bytes of an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.parts import source_parts
from data_pipeline.prepare.parts.part_record import RECORD_FILE
from data_pipeline.prepare.parts.staging import staging_folder
from data_pipeline.prepare.sources import open_source
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.prepare.parts.conftest import content
from tests.helpers import REPOSITORY

PART_BYTES = 200_000
PARTS = 12

# The command itself, with parts that a test has time for.
SCRIPT = f"""
import sys
from data_pipeline.prepare.parts import source_parts
source_parts.PART_BYTES = {PART_BYTES}
from launcher.cli import main
sys.exit(main(sys.argv[1:]))
"""


def hears_interrupts() -> None:
    """Let a process about to start end by Ctrl-C, as Python makes of it, whatever started the suite."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="module")
def large(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that take some tenths of a second each, a part a file."""
    folder = tmp_path_factory.mktemp("large")
    write_parts(corpus, folder)
    return folder


def write_parts(corpus: Path, folder: Path) -> None:
    text = "".join(path.read_text() for path in sorted(corpus.glob("*.py")))
    for number in range(PARTS):
        begin = 5_000 * number
        (folder / f"{number:02d}.txt").write_text((text[begin:] + text)[: PART_BYTES // 2 + begin])


@pytest.fixture(scope="module")
def undisturbed(large: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_parts, "PART_BYTES", PART_BYTES)
        build_shards(open_source(large), tokenizer, output, workers=1, shard_tokens=20_000, validation_fraction=0.3)
    return content(output)


Start = Callable[..., subprocess.Popen[str]]


def start_build(source: Path, tokenizer: Tokenizer, output: Path, *more: object) -> subprocess.Popen[str]:
    """Start ``data build``, in a group of processes of its own."""
    words = ["data", "build", "--source", source, "--tokenizer", tokenizer.path, "--output", output]
    words += ["--validation-fraction", 0.3, "--shard-tokens", 20_000, *more]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *map(str, words)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A suite that was started in the background ignores Ctrl-C, and its children would, too.
        preexec_fn=hears_interrupts,
    )


@pytest.fixture
def start(large: Path, tokenizer: Tokenizer, tmp_path: Path) -> Start:
    """Starts ``data build`` of the large files into ``out`` with two workers."""
    return lambda: start_build(large, tokenizer, tmp_path / "out", "--workers", 2)


def finished_parts(output: Path) -> set[str]:
    return {path.parent.name for path in staging_folder(output).glob(f"parts/*/{RECORD_FILE}")}


def wait_for_parts(process: subprocess.Popen[str], output: Path, count: int) -> None:
    """Wait until so many parts are finished."""
    until = time.monotonic() + 60
    while len(finished_parts(output)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


def wait_for_worker(process: subprocess.Popen[str]) -> psutil.Process:
    """Wait until there is one, which takes longer to start than a part takes."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for child in psutil.Process(process.pid).children():
            # It may have ended, or not have begun with its own program.
            with contextlib.suppress(psutil.Error):
                if any("parts.worker" in word for word in child.cmdline()):
                    return child
        time.sleep(0.005)
    raise AssertionError("no worker within a minute")


def wait_for_ends(processes: list[psutil.Process], seconds: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    # In a container whose first process buries nobody, the dead stay listed.
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.rglob("*.arrow")}


def finish(start: Start, output: Path, undisturbed: dict[str, bytes]) -> None:
    """Build to the end; what was finished is the same files still, and the whole is right."""
    before = finished_parts(output)
    parts = staging_folder(output) / "parts"
    kept = {inode for name in before for inode in inodes(parts / name)}
    out, err = (process := start()).communicate(timeout=100)
    assert process.returncode == 0, err
    assert "was made in" in out
    if before:
        assert f"resuming: {len(before)} of {PARTS} parts are finished" in err
    assert kept <= inodes(output)
    assert content(output) == undisturbed
    assert [path.name for path in output.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("count", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, PARTS - 1))])
def test_a_killed_build_goes_on(start: Start, undisturbed: dict[str, bytes], tmp_path: Path, count: int):
    process = start()
    wait_for_parts(process, tmp_path / "out", count)
    # Before the first part is finished, workers may not have started.
    if not count:
        while not staging_folder(tmp_path / "out").exists() and process.poll() is None:
            time.sleep(0.01)
    time.sleep(random.uniform(0, 0.2))
    workers = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    if (tmp_path / "out").exists():
        # The last part took less time than we did.
        assert content(tmp_path / "out") == undisturbed
        return
    # At once: the next build need not wait for what it hears of them.
    finish(start, tmp_path / "out", undisturbed)
    wait_for_ends(workers, 0)


def test_a_killed_worker_names_its_part_and_all_end(start: Start, undisturbed: dict[str, bytes], tmp_path: Path):
    process = start()
    wait_for_parts(process, tmp_path / "out", 2)
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    workers[0].kill()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert re.search(r"ClusterError: the worker that encoded part \d+ \(\d\d.txt\) was killed by SIGKILL", err), err
    assert "Traceback" not in err
    assert "Try fewer --workers" in err
    wait_for_ends(workers, 0)
    finish(start, tmp_path / "out", undisturbed)


def held_at_the_first_part(start: Start, output: Path) -> subprocess.Popen[str]:
    """A build that stands still: on a busy machine it may else come to its end before the test does anything."""
    while True:
        process = start()
        wait_for_parts(process, output, 1)
        process.send_signal(signal.SIGSTOP)
        if process.poll() is None and not output.exists():
            return process
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=60)
        shutil.rmtree(output)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_at_once(
    start: Start, undisturbed: dict[str, bytes], tmp_path: Path, sent: signal.Signals
):
    process = held_at_the_first_part(start, tmp_path / "out")
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    # Ctrl-C reaches every process of a terminal's group; `kill` the one that it names.
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)
    else:
        process.send_signal(sent)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=10)
    assert process.returncode in (130, -sent)
    assert "Traceback" not in err
    wait_for_ends(workers, 3)
    finish(start, tmp_path / "out", undisturbed)


@pytest.mark.slow
def test_a_build_waits_for_the_last_worker_of_a_killed_one(start: Start, undisturbed: dict[str, bytes], tmp_path: Path):
    first = start()
    # Before it has done anything: on a fast machine the build would soon be done.
    worker = wait_for_worker(first)
    # It cannot hear that its parent is gone, and could write once more.
    worker.suspend()
    first.kill()
    # Not communicate(): the worker holds the other end of standard error.
    first.wait()
    second = start()
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(timeout=4)
    worker.resume()
    _, err = second.communicate(timeout=100)
    assert second.returncode == 0, err
    assert content(tmp_path / "out") == undisturbed
