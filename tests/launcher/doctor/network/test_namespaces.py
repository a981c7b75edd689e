"""Hosts with networks of their own, of which two do not reach each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY
from tests.launcher.cluster.namespaces import Namespaces, namespaces, why_no_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def network_of(spaces: Namespaces) -> dict:
    """What doctor on the first host says of the network."""
    options = ["--hostfile", str(spaces.folder / "hostfile"), "--folder", str(spaces.folder), "--json"]
    ended = subprocess.run(
        spaces.on(spaces.hosts[0], sys.executable, "-m", "launcher", "doctor", *options),
        cwd=REPOSITORY,
        env={**os.environ, **spaces.environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stderr
    told = json.loads(ended.stdout)
    assert ended.returncode == int(told["verdict"] == "fail")
    return told["links"]


def of(found: dict, check: str) -> list[dict]:
    return [finding for finding in found["findings"] if finding["check"] == check]


def test_a_pair_whose_packets_are_lost_is_named_with_its_port_and_nobody_waits(tmp_path: Path):
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with namespaces(tmp_path, 3) as spaces:
        a, b, c = spaces.hosts
        spaces.cut(b, c)
        started = time.monotonic()
        found = network_of(spaces)
        seconds = time.monotonic() - started
    assert found["interfaces"] == dict.fromkeys(spaces.hosts, "eth0")
    assert found["meeting_place"] == [a, 29500]
    assert {(port["from"], port["to"]) for port in found["blocked"]} == {(b, c), (c, b)}
    assert {port["problem"] for port in found["blocked"]} == {"no answer within 3 s"}
    (finding,) = of(found, "ports")
    assert finding["verdict"] == "fail"
    assert f"{b} and {c} do not reach each other ({c}:" in finding["value"]
    assert "firewall" in finding["advice"]
    # Far less than the minutes for which gloo would wait.
    assert seconds < 200
