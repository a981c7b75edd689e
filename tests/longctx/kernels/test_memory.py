"""Memory that is left: the machine's, or that of a control group of either version."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from longctx.kernels.memory import available_bytes, pluggable_bytes, trim_heap
from tests.helpers import REPOSITORY

FREE = 10_000_000


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Machine:
        available = FREE

    monkeypatch.setattr(psutil, "virtual_memory", Machine)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def left(tmp_path: Path, cgroup: str = "0::/\n") -> int:
    write(tmp_path / "proc" / "self", cgroup=cgroup)
    return available_bytes(tmp_path / "proc", tmp_path / "sys")


def test_without_groups_it_is_the_machines(tmp_path):
    assert available_bytes(tmp_path / "proc", tmp_path / "sys") == FREE
    write(tmp_path / "sys", memory__max="max\n", memory__current="5", memory__stat="inactive_file 3\n")
    assert left(tmp_path) == FREE


def test_cached_files_of_a_group_are_not_used_up(tmp_path):
    write(tmp_path / "sys", memory__max="4000\n", memory__current="3000\n", memory__stat="anon 1\ninactive_file 500\n")
    assert left(tmp_path) == 1500


def test_the_tightest_of_the_groups_around_a_process_counts(tmp_path):
    write(tmp_path / "sys/a/b", memory__max="9000", memory__current="0", memory__stat="")
    write(tmp_path / "sys/a", memory__max="700", memory__current="100", memory__stat="")
    assert left(tmp_path, "0::/a/b\n") == 600


def test_groups_of_the_first_version(tmp_path):
    files = {"memory__limit_in_bytes": "800", "memory__usage_in_bytes": "300", "memory__stat": "total_inactive_file 50"}
    write(tmp_path / "sys/memory/job", **files)
    assert left(tmp_path, "4:memory:/job\n1:name=systemd:/\n") == 550


def test_what_a_balloon_holds_may_come_back(tmp_path):
    proc, system = tmp_path / "proc", tmp_path / "devices"
    assert pluggable_bytes(proc, system) == 0
    write(proc, vmstat="nr_free_pages 5\nballoon_inflate 900\nballoon_deflate 100\n")
    assert pluggable_bytes(proc, system) == 800 * resource.getpagesize()
    grown = available_bytes(proc, tmp_path / "sys", with_growth=True, system=system)
    assert grown == FREE + 800 * resource.getpagesize()
    assert available_bytes(proc, tmp_path / "sys") == FREE
    # A control group's limit stays.
    write(tmp_path / "sys", memory__max="4000", memory__current="0", memory__stat="")
    assert available_bytes(proc, tmp_path / "sys", with_growth=True, system=system) == 4000


@pytest.mark.parametrize("device", ["virtio/drivers/virtio_mem/virtio3", "vmbus/drivers/hv_balloon/1eccfd72-4b41"])
def test_memory_that_is_plugged_in_has_no_limit_that_is_known(tmp_path, device):
    (tmp_path / "bus" / device).mkdir(parents=True)
    assert pluggable_bytes(tmp_path, tmp_path) > 1e15
    # A driver without a device plugs nothing in.
    (tmp_path / "bus" / device).rmdir()
    write((tmp_path / "bus" / device).parent, bind="")
    assert pluggable_bytes(tmp_path, tmp_path) == 0


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    write(tmp_path / "sys", memory__max="100", memory__current="200", memory__stat="")
    assert left(tmp_path) == 0


@pytest.mark.slow
def test_gaps_of_the_heap_are_given_back():
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library has no malloc_trim")
    # In a process of its own: in this one's heap earlier tests have left gaps, which these blocks would fill first.
    command = [sys.executable, "-c", f"from {__name__} import give_gaps_back; give_gaps_back()"]
    subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, check=True, timeout=100)


def give_gaps_back() -> None:
    # Below what the C library takes pages of its own for, each with a small piece in use behind it.
    blocks = [(bytearray(100_000), bytearray(1_000)) for _ in range(1_000)]
    kept = [small for _, small in blocks]
    del blocks
    own = psutil.Process()
    before = own.memory_info().rss
    trim_heap()
    assert before - own.memory_info().rss > 60_000_000
    assert len(kept) == 1_000
