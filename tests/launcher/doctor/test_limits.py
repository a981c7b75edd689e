"""Limits of the system, the compiler, the port."""

from __future__ import annotations

import resource
import socket

import pytest

from launcher.doctor.limits import check_compiler, check_locked_memory, check_map_count, check_open_files, check_port


@pytest.mark.parametrize(
    ("soft", "world_size", "verdict"),
    [
        (1023, 1, "warn"),
        (1024, 1, "ok"),
        (1024, 96, "ok"),
        (1024, 97, "warn"),
        (resource.RLIM_INFINITY, 4096, "ok"),
    ],
)
def test_open_files_grow_with_the_ranks(soft, world_size, verdict):
    finding = check_open_files(world_size, soft)
    assert finding.verdict == verdict
    assert bool(finding.advice) == (verdict != "ok")


def test_the_advice_fits_the_hard_limit(monkeypatch):
    """Above which no user may go."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert check_open_files(1).advice == "ulimit -n 1024"
    assert "hard limit (4096)" in check_open_files(1000).advice


def test_locked_memory_matters_where_there_is_infiniband(tmp_path):
    assert check_locked_memory(65536, tmp_path).verdict == "ok"
    assert check_locked_memory(65536, tmp_path / "missing").verdict == "ok"
    (tmp_path / "mlx5_0").mkdir()
    finding = check_locked_memory(65536, tmp_path)
    assert (finding.verdict, finding.value) == ("warn", "64 KiB (ulimit -l)")
    assert check_locked_memory(resource.RLIM_INFINITY, tmp_path).verdict == "ok"


def test_memory_maps(tmp_path):
    file = tmp_path / "max_map_count"
    assert check_map_count(file) is None
    for count, verdict in ((65530, "ok"), (65529, "warn")):
        file.write_text(f"{count}\n")
        finding = check_map_count(file)
        assert finding is not None
        assert finding.verdict == verdict


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = check_compiler()
    assert (finding.verdict, finding.value) == ("warn", "no g++ and no ninja in PATH")
    for name in ("ninja", "my-compiler"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("CXX", "my-compiler -v")
    assert check_compiler().verdict == "ok"
    monkeypatch.setenv("CXX", "")
    assert check_compiler().value == "no g++ in PATH"
    monkeypatch.setenv("CXX", "my-compiler g++")
    assert check_compiler().value == "no g++ in PATH"


def test_a_port_that_is_taken():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        finding = check_port(port)
        assert finding.verdict == "fail"
        assert f"--master_port {port + 1}" in finding.advice
    assert check_port(port).verdict == "ok"
