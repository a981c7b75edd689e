"""A host compared with this machine: each difference, and what to do about it."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.doctor.check_result import CheckResult, results_summary, worst
from launcher.doctor.host_checks import Host, check_deepspeed_launch, check_remote_hosts, compare_host, lines_of_hosts
from launcher.doctor.machine_checks import CheckOptions
from launcher.doctor.remote import HostAnswer, NoAnswer
from launcher.doctor.storage import FolderProbe
from tests.launcher.doctor.samples import FACTS, answering, machine, put_ssh

PROBE = FolderProbe("name", "content")


def answered(*findings: CheckResult, skew: float = 0.0, **facts: Any) -> HostAnswer:
    """The answer of a host that differs in these facts."""
    there = machine(*findings, **{"probe": PROBE.content, **facts})
    return HostAnswer(machine=there, seconds=1.5, skew_seconds=skew)


def trouble(answer: HostAnswer | NoAnswer, num_slots: int = 8, **here: Any) -> list[tuple[str, str]]:
    """Check and verdict of all that is not ok."""
    found = compare_host(answer, machine(**here).facts, num_slots, PROBE)
    assert all(finding.advice for finding in found if finding.verdict != "ok")
    return [(finding.check, finding.verdict) for finding in found if finding.verdict != "ok"]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"code": "f" * 16}, ("code", "fail")),
        ({"python": "3.11.7"}, ("python", "fail")),
        ({"packages": {**FACTS.packages, "torch": "2.12.0"}}, ("torch", "fail")),
        ({"packages": {"torch": "2.13.0", "flash-attn": None}}, ("deepspeed", "fail")),
        ({"packages": {**FACTS.packages, "flash-attn": "2.8.3"}}, ("flash-attn", "fail")),
        ({"cuda": "12.6"}, ("CUDA", "fail")),
        ({"driver": "570.1"}, ("driver", "warn")),
        ({"gpus": ["H100"] * 7}, ("slots", "fail")),
        ({"gpus": []}, ("slots", "fail")),
        ({"gpus": ["H100"] * 9}, ("slots", "warn")),
        ({"probe": None}, ("shared folder", "fail")),
        ({"probe": "other"}, ("shared folder", "fail")),
        ({"skew": 5.1}, ("clock", "warn")),
        ({"skew": -60.0}, ("clock", "warn")),
        ({"skew": float("nan")}, ("clock", "warn")),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_difference_is_found(facts, expected):
    assert trouble(answered(**facts)) == [expected]


def test_what_is_no_difference():
    assert trouble(answered()) == []
    # Without GPUs slots are processes. A machine that only starts the run has no driver.
    assert trouble(answered(gpus=[]), num_slots=3, gpus=[]) == []
    assert trouble(answered(), driver=None, gpus=[]) == []


def test_what_a_host_found_of_itself_is_told_and_no_answer_is_all_there_is():
    taken = CheckResult(check="master port", verdict="fail", value="taken", advice="wait")
    assert trouble(answered(taken)) == [("master port", "fail")]
    assert trouble(NoAnswer(why="ssh failed", hint="keys")) == [("ssh", "fail")]


@pytest.mark.parametrize(
    ("slots", "warned"),
    [
        ({"localhost": 2}, False),
        ({"127.0.0.1": 2}, False),
        ({"node-01": 2}, False),
        ({"node-02": 2}, True),
        ({"node-02": 2, "node-03": 2}, False),
    ],
)
def test_a_single_other_host_would_not_be_used(slots, warned):
    assert ("hostfile" in [finding.check for finding in check_deepspeed_launch(slots, "node-01.cluster")]) == warned


def test_several_hosts_need_pdsh(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [finding.check for finding in check_deepspeed_launch({"a": 1, "b": 1}, "a")] == ["pdsh"]
    assert check_deepspeed_launch({"a": 1}, "a") == []
    (tmp_path / "pdsh").write_text("#!/bin/sh\n")
    (tmp_path / "pdsh").chmod(0o755)
    assert check_deepspeed_launch({"a": 1, "b": 1}, "a") == []


def host(name: str, answer: HostAnswer | NoAnswer) -> Host:
    findings = [finding.on(name) for finding in compare_host(answer, FACTS, 8, PROBE)]
    return Host(name=name, answer=answer, results=findings)


def test_sixteen_hosts_with_one_trouble_take_one_line():
    hosts = [host(f"node-{n:02}", answered(code="f" * 16)) for n in range(16)]
    hosts.append(host("node-16", answered()))
    healthy, failed = lines_of_hosts(hosts)
    assert healthy.startswith("ok    node-16 ")
    assert failed.startswith("fail  code on node-00, node-01, node-02, node-03 and 12 more")
    assert results_summary([finding for each in hosts for finding in each.results]).startswith("16 checks failed")


class TestAskingAll:
    """With a program in ssh's place that gives the answer of ``samples.DOCUMENT_DTYPE``."""

    def ask(self, tmp_path, monkeypatch, script: str, slots: dict[str, int], folder: str = "runs") -> list[Host]:
        put_ssh(tmp_path, monkeypatch, script or answering(tmp_path / "answer"))
        monkeypatch.chdir(tmp_path)
        return check_remote_hosts(slots, machine(), CheckOptions(folder=tmp_path / folder, port=12345))

    def test_the_first_host_looks_at_the_port(self, tmp_path, monkeypatch):
        hosts = self.ask(tmp_path, monkeypatch, "", {"node-01": 8, "node-02": 8, "node-03": 8})
        assert [each.name for each in hosts] == ["node-01", "node-02", "node-03"]
        orders = (tmp_path / "orders").read_text()
        assert (orders.count('"port": 12345'), orders.count('"port": 0')) == (1, 2)

    def test_a_folder_that_only_this_machine_sees(self, tmp_path, monkeypatch):
        (each,) = self.ask(tmp_path, monkeypatch, "", {"localhost": 8})
        assert [finding.check for finding in each.results if finding.verdict == "fail"] == ["shared folder"]
        assert each.results[0].host == "localhost"
        assert not list(tmp_path.glob(".longctx-doctor-*"))

    def test_one_host_without_ssh_is_told_how_to_do_without(self, tmp_path, monkeypatch):
        (each,) = self.ask(tmp_path, monkeypatch, "exit 255", {"localhost": 2})
        assert worst(each.results) == "fail"
        assert "longctx train --ranks 2" in each.results[0].advice

    def test_a_folder_that_cannot_be_written_is_told_and_all_else_is_asked(self, tmp_path, monkeypatch):
        (each,) = self.ask(tmp_path, monkeypatch, "", {"localhost": 8}, folder="/sys/kernel")
        failed = [finding for finding in each.results if finding.verdict == "fail"]
        assert [finding.check for finding in failed] == ["shared folder"]
        assert "/sys/kernel" in failed[0].value
