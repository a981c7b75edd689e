"""Variables that deepspeed's pdsh would set, read from its files and given to a real shell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from launcher.cluster.remote_shell import environment_files
from launcher.doctor.environment import check_environment_files, exports
from launcher.doctor.remote import remote_command
from tests.launcher.doctor.test_remote import OPTIONS


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """The name of deepspeed's file in the working folder; the home folder has none."""
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".deepspeed_env"


def printed(line: str, name: str, cwd: Path) -> str:
    """The value that a shell gives a variable after ``line``."""
    command = f"{line} printf '%s' \"${name}\""
    return subprocess.run(
        ["sh", "-c", command], env={"PATH": "/usr/bin:/bin"}, cwd=cwd, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", "1"),
        ("/venv/bin:$PATH", "/venv/bin:/usr/bin:/bin"),
        ("/venv/bin:${PATH}", "/venv/bin:/usr/bin:/bin"),
        ("a b; touch pwned", "a b; touch pwned"),
        ("$(touch pwned)`touch pwned`", "$(touch pwned)`touch pwned`"),
        ('"; touch pwned; "', '"; touch pwned; "'),
        ("a\\\\$b=c", "a\\\\=c"),
        ("", ""),
    ],
)
def test_a_shell_reads_values_and_runs_nothing(file, value, expected):
    file.write_text(f"OTHER=1\nVALUE={value}\n")
    assert environment_files() == [file]
    assert printed(exports({}, [file]), "VALUE", file.parent) == expected
    assert list(file.parent.iterdir()) == [file]


def test_the_file_goes_before_what_this_process_has(file):
    file.write_text("PYTHONPATH=/there\n")
    line = exports({"PYTHONPATH": "/here $PATH", "SECRET": "s"}, [file])
    assert "SECRET" not in line
    assert printed(line, "PYTHONPATH", file.parent) == "/there"
    assert printed(exports({"PYTHONPATH": "/here $PATH"}, []), "PYTHONPATH", file.parent) == "/here $PATH"
    assert remote_command(OPTIONS, {}).startswith('export PYTHONPATH="/there"; cd ')


@pytest.mark.parametrize("has_gpus", [False, True])
def test_variables_of_nccl_are_handed_over_where_deepspeed_does_so(monkeypatch, has_gpus):
    # From a machine with GPUs, as deepspeed's accelerators have it.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    line = exports({"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1"}, [])
    assert ("NCCL_SOCKET_IFNAME" in line) == has_gpus
    assert "GLOO" not in line


def test_a_file_of_another_name(file, monkeypatch, tmp_path):
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "mine"))
    assert environment_files() == []
    (tmp_path / "mine").write_text("A=1\n")
    assert environment_files() == [tmp_path / "mine"]


@pytest.mark.parametrize("line", ["", "# comment", "# A=1", "A", "export A=1", "A B=1"])
def test_a_line_that_deepspeed_cannot_read(file, line):
    file.write_text(f"A=1\n{line}\nB=2\n")
    (finding,) = check_environment_files(environment_files())
    assert (finding.verdict, finding.value) == ("fail", f"{file}:2 is not KEY=VALUE.")


def test_a_value_that_a_shell_would_run(file):
    file.write_text("A=$HOME/bin\nTOKEN=secret$(touch x)\n")
    (finding,) = check_environment_files(environment_files())
    assert finding.verdict == "fail"
    assert "TOKEN has characters in it" in finding.value
    assert "secret" not in finding.value + finding.advice
