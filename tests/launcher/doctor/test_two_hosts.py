"""Two hosts behind a real ssh server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import REPOSITORY
from tests.launcher.cluster.cluster import HOSTS, missing_programs, two_hosts


def run_doctor(hostfile: Path, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    options = ["--hostfile", str(hostfile), "--folder", str(folder), "--master-port", "0", "--json"]
    return subprocess.run(
        [sys.executable, "-m", "launcher", "doctor", *options],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_hosts_are_asked_over_ssh(tmp_path):
    if reason := missing_programs():
        pytest.skip(reason)
    (tmp_path / "cluster").mkdir()
    with two_hosts(tmp_path / "cluster", slots=max(1, torch.cuda.device_count())) as (hostfile, environment):
        well = run_doctor(hostfile, tmp_path, environment)
        (tmp_path / "cluster" / "key").unlink()
        locked_out = run_doctor(hostfile, tmp_path, environment)
    told = json.loads(well.stdout)
    assert well.returncode == int(told["verdict"] == "fail"), well.stdout
    assert list(told["hosts"]) == list(HOSTS)
    for host in told["hosts"].values():
        found = {finding["check"]: finding["verdict"] for finding in host["findings"]}
        assert {found[check] for check in ("ssh", "code", "versions", "clock", "slots", "shared folder")} == {"ok"}
    # Both hosts are this machine, and gloo takes its loopback.
    assert told["links"]["interfaces"] == dict.fromkeys(HOSTS, "lo")
    assert told["links"]["blocked"] == []
    checks = {finding["check"]: finding["verdict"] for finding in told["links"]["findings"]}
    assert {checks[check] for check in ("gloo interface", "NCCL network", "ports", "rates")} == {"ok"}
    assert locked_out.returncode == 1, "ssh would ask for a password"
    for host in json.loads(locked_out.stdout)["hosts"].values():
        (finding,) = host["findings"]
        assert (finding["check"], finding["verdict"]) == ("ssh", "fail")
        assert "Permission denied" in finding["value"]
    (skipped,) = json.loads(locked_out.stdout)["links"]["findings"]
    assert skipped["value"] == f"not checked: {HOSTS[0]}, the rendezvous host, does not answer"
