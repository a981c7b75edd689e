"""``longctx doctor``: exit codes, lines and JSON."""

from __future__ import annotations

import json
import socket

import pytest
import torch

from tests.launcher.cli.calls import call
from tests.launcher.doctor.samples import put_ssh


def test_a_line_for_each_finding_and_a_summary(capsys, tmp_path):
    code, out, _ = call(capsys, "doctor", "--folder", tmp_path, "--master-port", 0, "--no-links")
    lines = out.splitlines()
    verdicts = {line[:6].strip() for line in lines[:-1]}
    assert verdicts <= {"ok", "warn", "fail"}
    # A machine may have GPUs that this PyTorch cannot use.
    assert code == int("fail" in verdicts), out
    assert len(lines) < 25, "one screen"
    assert lines[-1].endswith(("well.", "warning.", "warnings."))
    assert ("failed," in lines[-1]) == (code == 1)
    assert "ok    network          not checked: --no-links" in lines


def test_a_failure_is_exit_code_1_also_as_json(capsys, tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        code, out, _ = call(capsys, "doctor", "--folder", tmp_path, "--master-port", port, "--json", "--no-links")
    told = json.loads(out)
    assert (code, told["verdict"]) == (1, "fail")
    assert "master port" in [finding["check"] for finding in told["findings"] if finding["verdict"] == "fail"]
    assert told["facts"]["folder"] == str(tmp_path)
    assert told["hosts"] == {}
    assert [finding["value"] for finding in told["links"]["findings"]] == ["not checked: --no-links"]


def test_the_network_of_this_machine(capsys, tmp_path):
    code, out, _ = call(capsys, "doctor", "--folder", tmp_path, "--master-port", 0, "--json")
    told = json.loads(out)
    assert code == int(told["verdict"] == "fail")
    # One a GPU, or one on a CPU.
    count = max(1, torch.cuda.device_count())
    assert list(told["links"]["interfaces"]) == [f"rank {rank}" for rank in range(count)]
    assert [finding["check"] for finding in told["links"]["findings"]][:1] == ["NCCL network"]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--local", "--hostfile", "h"), 2, "Leave one of them out"),
        (("--hostfile", "missing"), 1, "hostfile missing does not exist"),
    ],
)
def test_wrong_options_say_why(capsys, options, code, said):
    ended, out, complaint = call(capsys, "doctor", *options)
    assert (ended, out) == (code, "")
    assert said in complaint


@pytest.mark.parametrize("line", ["-oProxyCommand=x slots=1", "a;b slots=1", "node-01 slots=0", "node-01"])
def test_a_hostfile_that_breaks_the_rules_reaches_no_ssh(capsys, tmp_path, monkeypatch, line):
    arguments = put_ssh(tmp_path, monkeypatch, "exit 255")
    (tmp_path / "hostfile").write_text(f"node-00 slots=1\n{line}\n")
    code, out, complaint = call(capsys, "doctor", "--hostfile", tmp_path / "hostfile")
    assert (code, out) == (1, "")
    assert "hostfile:2" in complaint
    assert not arguments.exists()
