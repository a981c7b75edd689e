"""The folder, its probe, and shared memory."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from launcher.doctor.packages import hash_folders
from launcher.doctor.storage import check_folder, check_shared_memory, existing_part, probe_in, read_probe
from longctx.errors import ConfigError

Usage = namedtuple("Usage", "total used free")
GIB = 2**30


def test_looking_makes_no_folder(tmp_path):
    assert existing_part(tmp_path / "runs" / "first") == tmp_path
    assert not list(tmp_path.iterdir())


def test_a_folder_is_written_to_and_left_as_it_was(tmp_path):
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
def test_little_free_space(monkeypatch, tmp_path, free, verdict):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1000 * GIB, 0, free))
    assert check_folder(tmp_path)[0].verdict == verdict


def test_a_slow_folder_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr("launcher.doctor.storage.write_speed", lambda folder: 10.0 * 2**20)
    finding = check_folder(tmp_path)[1]
    assert (finding.verdict, finding.value) == ("warn", "10 MiB/s of one process, to the disk")


def test_shared_memory_matters_where_gpus_share_a_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(GIB // 16, 0, GIB // 16))
    assert [check_shared_memory(gpus, tmp_path).verdict for gpus in (0, 1, 2)] == ["ok", "ok", "warn"]
    monkeypatch.undo()
    assert check_shared_memory(8, tmp_path / "missing").verdict == "warn"


class TestProbe:
    def test_it_is_read_while_it_is_there(self, tmp_path):
        with probe_in(tmp_path) as probe:
            assert read_probe(tmp_path, probe.name) == probe.content
            (tmp_path / probe.name).write_text("x" * 1000)
            assert read_probe(tmp_path, probe.name) == "x" * 64
        assert read_probe(tmp_path, probe.name) is None
        assert not list(tmp_path.iterdir())

    def test_it_goes_when_the_check_fails(self, tmp_path):
        with pytest.raises(KeyboardInterrupt), probe_in(tmp_path):
            raise KeyboardInterrupt
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("name", ["/etc/passwd", "../secret", "secret", ".longctx-doctor-" + "0" * 32 + "/x"])
    def test_no_other_file_is_read_for_anybody(self, tmp_path, name):
        (tmp_path / "secret").write_text("secret")
        with pytest.raises(ConfigError, match="not a file that doctor writes"):
            read_probe(tmp_path, name)


class TestSourceHash:
    def test_contents_and_names_count_and_the_place_does_not(self, tmp_path):
        for place in ("here", "there"):
            (tmp_path / place / "package" / "part").mkdir(parents=True)
            (tmp_path / place / "package" / "part" / "a.py").write_text("x = 1\n")
        here, there = (hash_folders([tmp_path / place / "package"]) for place in ("here", "there"))
        assert here == there
        (tmp_path / "there" / "package" / "a.pyc").write_text("compiled")
        assert hash_folders([tmp_path / "there" / "package"]) == here
        file = tmp_path / "there" / "package" / "part" / "a.py"
        file.write_text("x = 2\n")
        changed = hash_folders([tmp_path / "there" / "package"])
        assert changed != here
        file.write_text("x = 1\n")
        file.rename(file.with_name("b.py"))
        assert hash_folders([tmp_path / "there" / "package"]) not in (here, changed)
