"""The folder, its probe, and shared memory."""

from __future__ import annotations

import shutil
from collections import namedtuple
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.doctor.packages import hash_folders
from launcher.doctor.storage import check_folder, check_shared_memory, existing_part, probe_in, read_probe
from longctx.errors import ConfigError

Usage = namedtuple("Usage", "total used free")
GIB = 2**30


def test_a_folder_is_written_to_and_left_as_it_was(tmp_path):
    assert existing_part(tmp_path / "runs" / "first") == tmp_path
    space, speed = check_folder(tmp_path)
    assert "GiB free" in space.value
    assert speed.check == "write speed"
    assert "MiB/s" in speed.value
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1000 * GIB, 0, 100 * GIB))
    (finding,) = check_folder(Path("/sys/kernel"))  # root may not write there either
    assert finding.verdict == "fail"
    assert finding.value.startswith("/sys/kernel cannot be written: ")


@pytest.mark.parametrize(("free", "verdict"), [(GIB // 8, "fail"), (2 * GIB, "warn"), (100 * GIB, "ok")])
def test_little_free_space_and_a_slow_folder(monkeypatch, tmp_path, free, verdict):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1000 * GIB, 0, free))
    monkeypatch.setattr("launcher.doctor.storage.write_speed", lambda folder: 10.0 * 2**20)
    space, *speed = check_folder(tmp_path)
    assert space.verdict == verdict
    slow = [("warn", "10 MiB/s from one process, synced to disk")]
    assert [(finding.verdict, finding.value) for finding in speed] == slow * (verdict != "fail")


def test_shared_memory_matters_where_gpus_share_a_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(GIB // 16, 0, GIB // 16))
    assert [check_shared_memory(gpus, tmp_path).verdict for gpus in (0, 1, 2)] == ["ok", "ok", "warn"]
    monkeypatch.undo()
    assert check_shared_memory(8, tmp_path / "missing").verdict == "warn"


def test_a_probe_is_read_while_it_is_there(tmp_path):
    with suppress(KeyboardInterrupt), probe_in(tmp_path) as probe:
        assert read_probe(tmp_path, probe.name) == probe.content
        (tmp_path / probe.name).write_text("x" * 1000)
        assert read_probe(tmp_path, probe.name) == "x" * 64
        raise KeyboardInterrupt
    assert read_probe(tmp_path, probe.name) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret", "secret", ".longctx-doctor-" + "0" * 32 + "/x"])
def test_no_other_file_is_read_for_anybody(tmp_path, name):
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(ConfigError, match="not a doctor probe file"):
        read_probe(tmp_path, name)


def test_contents_and_names_of_sources_count_and_their_place_does_not(tmp_path):
    def hash_of(place: str, name: str, text: str) -> str:
        file = tmp_path / place / "package" / "part" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
        file.with_suffix(".pyc").write_text(place)
        return hash_folders([tmp_path / place / "package"])

    here = hash_of("here", "a.py", "x = 1\n")
    assert hash_of("there", "a.py", "x = 1\n") == here
    assert len({here, hash_of("changed", "a.py", "x = 2\n"), hash_of("renamed", "b.py", "x = 1\n")}) == 3
