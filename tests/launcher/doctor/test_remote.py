"""Asking a host: what ssh is given, and every way in which an answer may be none."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.doctor.machine import Options
from launcher.doctor.remote import Answer, NoAnswer, ask, remote_command, ssh_command
from longctx.errors import ClusterError
from tests.launcher.doctor.samples import FACTS, machine, put_ssh

OPTIONS = Options(folder=Path("/shared/runs"), port=29500, world_size=16, probe=".longctx-doctor-" + "0" * 32)


def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, timeout: float = 30.0) -> NoAnswer:
    """What is made of an ssh program that does ``script``."""
    put_ssh(folder, monkeypatch, script)
    answer = ask("node-01", OPTIONS, timeout=timeout)
    assert isinstance(answer, NoAnswer)
    assert answer.advice
    return answer


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "a;b", "a b", "$(id)", "", "a\n", "user@host", "-l"])
def test_a_name_that_is_none_reaches_no_ssh(tmp_path, monkeypatch, host):
    arguments = put_ssh(tmp_path, monkeypatch, "exit 0")
    with pytest.raises(ClusterError, match="not the name of a host"):
        ask(host, OPTIONS)
    assert not arguments.exists()


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
    command = remote_command(OPTIONS, {"PYTHONPATH": "a b;c $(touch pwned)", "SECRET": "s"})
    assert "SECRET" not in command
    subprocess.run(["sh", "-c", command], check=True, timeout=30, cwd="/")
    seen = (folder / "seen").read_text().splitlines()
    assert seen[:5] == [str(folder), "a b;c $(touch pwned)", "-m", "launcher", "doctor"]
    options = f"--local --json --folder /shared/runs --master-port 29500 --world-size 16 --probe {OPTIONS.probe}"
    assert " ".join(seen[5:]) == options
    assert list(folder.iterdir()) == [folder / "seen"]


def test_a_relative_folder_is_meant_from_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(remote_command(Options(folder=Path("runs"))))
    assert words[words.index("--folder") + 1] == str(tmp_path / "runs")


def test_an_answer_after_the_noise_of_a_login_script(tmp_path, monkeypatch):
    told = machine(time=time.time() - 100).to_json()
    (tmp_path / "answer").write_text(json.dumps(told, indent=2))
    # Exit code 1 is an answer too: a check failed there.
    put_ssh(tmp_path, monkeypatch, f"echo Welcome; echo '{{hello'; cat {tmp_path}/answer; exit 1")
    answer = ask("node-01", OPTIONS)
    assert isinstance(answer, Answer)
    assert answer.machine.facts.packages == FACTS.packages
    assert answer.skew_seconds == pytest.approx(-100, abs=30)


def test_the_clock_is_read_when_the_answer_begins_to_come(tmp_path, monkeypatch):
    # A host that takes long to end is no host whose clock is behind.
    (tmp_path / "answer").write_text(json.dumps(machine(time=time.time() + 3600).to_json(), indent=2))
    put_ssh(tmp_path, monkeypatch, f"cat {tmp_path}/answer; sleep 3")
    before = time.time()
    answer = ask("node-01", OPTIONS)
    assert isinstance(answer, Answer)
    assert answer.seconds >= 3
    assert answer.skew_seconds > 3600 - (time.time() - before) + 2


class TestNoAnswer:
    def test_a_password_would_be_needed(self, tmp_path, monkeypatch):
        script = "echo 'Permission denied (publickey).' >&2; exit 255"
        answer = refusal(tmp_path, monkeypatch, script)
        assert answer.why == "ssh failed: Permission denied (publickey)."
        assert "ssh-copy-id HOST" in answer.advice

    @pytest.mark.parametrize(
        ("said", "advice"),
        [
            ("ssh: Could not resolve hostname node-01: Name or service not known", "/etc/hosts"),
            ("ssh: connect to host node-01 port 22: Connection refused", "systemctl start ssh"),
            ("ssh: connect to host node-01 port 22: Connection timed out", "ping HOST"),
            ("Host key verification failed.", "ssh HOST true"),
        ],
    )
    def test_a_host_that_is_not_there_or_not_known(self, tmp_path, monkeypatch, said, advice):
        answer = refusal(tmp_path, monkeypatch, f"echo '{said}' >&2; exit 255")
        assert answer.why == f"ssh failed: {said}"
        assert advice in answer.advice

    def test_silence(self, tmp_path, monkeypatch):
        started = time.monotonic()
        answer = refusal(tmp_path, monkeypatch, "exec sleep 60", timeout=0.5)
        assert "no answer within" in answer.why
        assert time.monotonic() - started < 20

    def test_success_without_a_word(self, tmp_path, monkeypatch):
        refusal(tmp_path, monkeypatch, "exit 0")

    @pytest.mark.parametrize(
        "said",
        ["{\\n", "{\\n}", '{\\n"facts": 1}', '{\\n"a":' + "[" * 5000, '{\\n"facts": {"time": 1' + "0" * 400 + "}}"],
        ids=["cut", "empty", "facts", "deep", "number"],
    )
    def test_nonsense(self, tmp_path, monkeypatch, said):
        (tmp_path / "said").write_text(said.replace("\\n", "\n"))
        answer = refusal(tmp_path, monkeypatch, f"cat {tmp_path}/said")
        assert answer.why.startswith("an answer that is none")

    def test_an_answer_without_end_is_cut(self, tmp_path, monkeypatch):
        refusal(tmp_path, monkeypatch, "echo '{'; exec yes 0123456789012345678901234567890123456789")

    def test_no_ssh_at_all(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        answer = ask("node-01", OPTIONS)
        assert isinstance(answer, NoAnswer)
        assert answer.why == "this machine has no ssh"
