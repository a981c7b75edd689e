"""Asking a host: what ssh and the shell there are given, and every way in which an answer may be none."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from launcher.cluster.remote_shell import environment_files
from launcher.doctor.machine_checks import CheckOptions
from launcher.doctor.remote import (
    HostAnswer,
    NoAnswer,
    ask,
    check_environment_files,
    exports,
    remote_command_line,
    ssh_command,
)
from longctx.errors import ClusterError
from tests.launcher.doctor.samples import FACTS, answering, put_ssh

OPTIONS = CheckOptions(folder=Path("/shared/runs"), port=29500, world_size=16, probe=".longctx-doctor-" + "0" * 32)


def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, timeout: float = 30.0) -> NoAnswer:
    """What is made of an ssh program that does ``script``."""
    put_ssh(folder, monkeypatch, script)
    answer = ask("node-01", OPTIONS, timeout=timeout)
    assert isinstance(answer, NoAnswer)
    assert answer.hint
    return answer


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "a;b", "a b", "$(id)", "", "a\n", "user@host", "-l"])
def test_a_name_that_is_none_reaches_no_ssh(host):
    with pytest.raises(ClusterError, match="not a host name"):
        ssh_command(host, "true")


def test_ssh_asks_for_nothing_and_reads_the_name_as_a_name(monkeypatch):
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222 -F 'my config'")
    words = "ssh|-o|BatchMode=yes|-o|ConnectTimeout=5|-p|2222|-F|my config|--|node-01|true"
    assert ssh_command("node-01", "true") == words.split("|")


def test_a_shell_there_reads_every_word_as_it_is(tmp_path, monkeypatch):
    """The line is given to a real shell, with a program in the place of Python that writes down its arguments."""
    folder = tmp_path / "a; touch pwned $(touch pwned) 'b'"
    folder.mkdir()
    python = tmp_path / "my python"
    python.write_text('#!/bin/sh\npwd > seen\nprintf "%s\\n" "$PYTHONPATH" "$@" >> seen\n')
    python.chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "executable", str(python))
    command = remote_command_line(("-m", "a b"), {"PYTHONPATH": "a b;c $(touch pwned)", "SECRET": "s"})
    assert "SECRET" not in command
    subprocess.run(["sh", "-c", command], check=True, timeout=30, cwd="/")
    assert (folder / "seen").read_text().splitlines() == [str(folder), "a b;c $(touch pwned)", "-m", "a b"]
    assert list(folder.iterdir()) == [folder / "seen"]


def test_an_order_and_its_answer_among_the_noise_of_a_login_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = answering(tmp_path / "answer", time=time.time() - 100)
    arguments = put_ssh(tmp_path, monkeypatch, f"echo Welcome; echo '{{hello'; {script}")
    answer = ask("node-01", CheckOptions(folder=Path("runs"), port=7))
    assert isinstance(answer, HostAnswer)
    assert answer.machine.facts.packages == FACTS.packages
    assert answer.skew_seconds == pytest.approx(-100, abs=30)
    # Nothing of the order is on a line that a shell reads. A relative folder is meant from here.
    assert arguments.read_text().splitlines()[-1].endswith(f"exec {sys.executable} -m launcher.doctor.doctor_worker")
    order = json.loads((tmp_path / "orders").read_text())
    assert order == {"do": "examine", "folder": str(tmp_path / "runs"), "port": 7, "world_size": 1, "probe": ""}


class TestNoAnswer:
    @pytest.mark.parametrize(
        ("said", "advice"),
        [
            ("Permission denied (publickey).", "ssh-copy-id HOST"),
            ("ssh: Could not resolve hostname node-01: Name or service not known", "/etc/hosts"),
            ("ssh: connect to host node-01 port 22: Connection refused", "systemctl start ssh"),
            ("ssh: connect to host node-01 port 22: Connection timed out", "ping HOST"),
            ("Host key verification failed.", "ssh HOST true"),
        ],
    )
    def test_ssh_fails(self, tmp_path, monkeypatch, said, advice):
        answer = refusal(tmp_path, monkeypatch, f"echo '{said}' >&2; exit 255")
        assert answer.why == f"ssh failed: {said}"
        assert advice in answer.hint

    def test_python_is_not_there(self, tmp_path, monkeypatch):
        answer = refusal(tmp_path, monkeypatch, "echo 'sh: python: not found' >&2; exit 127")
        assert answer.why == "doctor does not run there: sh: python: not found"

    def test_silence(self, tmp_path, monkeypatch):
        started = time.monotonic()
        answer = refusal(tmp_path, monkeypatch, "exec sleep 60", timeout=0.5)
        assert "no answer within" in answer.why
        assert time.monotonic() - started < 20

    def test_another_version(self, tmp_path, monkeypatch):
        answer = refusal(tmp_path, monkeypatch, answering(tmp_path / "answer", python=3.12))
        assert answer.why.startswith("an invalid answer: facts.python: ")
        assert "another version" in answer.hint

    def test_an_answer_without_end_is_cut(self, tmp_path, monkeypatch):
        refusal(tmp_path, monkeypatch, "exec yes 'longctx-doctor {'")

    def test_no_ssh_at_all(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        answer = ask("node-01", OPTIONS)
        assert isinstance(answer, NoAnswer)
        assert answer.why == "this machine has no ssh"


@pytest.mark.parametrize("has_gpus", [False, True])
def test_variables_of_nccl_are_handed_over_where_deepspeed_does_so(monkeypatch, has_gpus):
    # From a machine with GPUs, as deepspeed's accelerators have it.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    line = exports({"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1"}, [])
    assert ("NCCL_SOCKET_IFNAME" in line) == has_gpus
    assert "GLOO" not in line


class TestVariables:
    """Those that deepspeed's pdsh would set, read from its files and given to a real shell."""

    @pytest.fixture
    def file(self, tmp_path, monkeypatch) -> Path:
        """The name of deepspeed's file in the working folder; the home folder has none."""
        monkeypatch.delenv("DS_ENV_FILE", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.chdir(tmp_path)
        return tmp_path / ".deepspeed_env"

    def printed(self, line: str, name: str, cwd: Path) -> str:
        """The value that a shell gives a variable after ``line``."""
        command = ["sh", "-c", f"{line} printf '%s' \"${name}\""]
        environment = {"PATH": "/usr/bin:/bin"}
        return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=True).stdout

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("/venv/bin:$PATH", "/venv/bin:/usr/bin:/bin"),
            ("/venv/bin:${PATH}", "/venv/bin:/usr/bin:/bin"),
            ("a b; touch pwned", "a b; touch pwned"),
            ("$(touch pwned)`touch pwned`", "$(touch pwned)`touch pwned`"),
            ('"; touch pwned; "', '"; touch pwned; "'),
            ("a\\\\$b=c", "a\\\\=c"),
            ("", ""),
        ],
    )
    def test_a_shell_reads_values_and_runs_nothing(self, file, value, expected):
        file.write_text(f"OTHER=1\nVALUE={value}\n")
        assert environment_files() == [file]
        assert self.printed(exports({}, [file]), "VALUE", file.parent) == expected
        assert list(file.parent.iterdir()) == [file]

    def test_the_file_goes_before_what_this_process_has(self, file):
        file.write_text("PYTHONPATH=/there\n")
        line = exports({"PYTHONPATH": "/here $PATH", "SECRET": "s"}, [file])
        assert "SECRET" not in line
        assert self.printed(line, "PYTHONPATH", file.parent) == "/there"
        assert self.printed(exports({"PYTHONPATH": "/here $PATH"}, []), "PYTHONPATH", file.parent) == "/here $PATH"
        assert remote_command_line((), {}).startswith('export PYTHONPATH="/there"; cd ')

    def test_a_file_of_another_name(self, file, monkeypatch, tmp_path):
        monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "mine"))
        assert environment_files() == []
        (tmp_path / "mine").write_text("A=1\n")
        assert environment_files() == [tmp_path / "mine"]

    @pytest.mark.parametrize("line", ["", "# comment", "# A=1", "A", "export A=1", "A B=1"])
    def test_a_line_that_deepspeed_cannot_read(self, file, line):
        file.write_text(f"A=1\n{line}\nB=2\n")
        (finding,) = check_environment_files(environment_files())
        assert (finding.verdict, finding.value) == ("fail", f"{file}:2 is not KEY=VALUE.")

    def test_a_value_that_a_shell_would_run(self, file):
        file.write_text("A=$HOME/bin\nTOKEN=secret$(touch x)\n")
        (finding,) = check_environment_files(environment_files())
        assert finding.verdict == "fail"
        assert "TOKEN contains characters" in finding.value
        assert "secret" not in finding.value + finding.advice
