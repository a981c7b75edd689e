"""Hosts with networks of their own, of which one is slow, and two do not reach each other."""

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


def links_of(spaces: Namespaces) -> dict:
    """What doctor on the first host says of the links."""
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


def of(links: dict, check: str) -> list[dict]:
    return [finding for finding in links["findings"] if finding["check"] == check]


def test_a_slow_host_is_named_with_the_rate_that_it_has(tmp_path: Path):
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with namespaces(tmp_path, 3) as spaces:
        spaces.slow(spaces.hosts[2], "100mbit")
        links = links_of(spaces)
    assert links["interfaces"] == dict.fromkeys(spaces.hosts, "eth0")
    assert links["meeting_place"] == [spaces.hosts[0], 29500]
    rates = {(pair["first"], pair["second"]): pair["bytes_per_second"] for pair in links["pairs"]}
    a, b, slow = spaces.hosts
    for pair in ((a, slow), (b, slow)):
        # 100 Mbit/s are 12.5 MB/s; the shaper lets 64 KiB of the first 256 KiB through at once.
        assert 5e6 < rates[pair] < 12.5e6 * 4 / 3
    assert rates[a, b] > 4 * 12.5e6
    (finding,) = [finding for finding in of(links, "slow link") if "GB/s" in finding["value"]]
    assert finding["verdict"] == "warn"
    assert finding["value"].startswith(f"{slow} and every other by gloo:")


def test_a_pair_whose_packets_are_lost_is_named_with_its_port_and_nobody_waits(tmp_path: Path):
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with namespaces(tmp_path, 3) as spaces:
        a, b, c = spaces.hosts
        spaces.cut(b, c)
        started = time.monotonic()
        links = links_of(spaces)
        seconds = time.monotonic() - started
    assert {(port["from"], port["to"]) for port in links["blocked"]} == {(b, c), (c, b)}
    assert {port["problem"] for port in links["blocked"]} == {"no answer within 3 s"}
    (finding,) = of(links, "ports")
    assert finding["verdict"] == "fail"
    assert f"{b} and {c} do not reach each other ({c}:" in finding["value"]
    assert "firewall" in finding["advice"]
    assert [(pair["first"], pair["second"]) for pair in links["pairs"]] == [(a, b), (a, c)]
    # Far less than the minutes for which gloo would wait.
    assert seconds < 200


def test_hosts_that_do_not_reach_the_meeting_place(tmp_path: Path):
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with namespaces(tmp_path, 3) as spaces:
        a, b, c = spaces.hosts
        spaces.cut_port(b, a, 29500)
        links = links_of(spaces)
    assert [(port["from"], port["to"], port["port"]) for port in links["blocked"]] == [(b, a, 29500)]
    assert [(pair["first"], pair["second"]) for pair in links["pairs"]] == [(a, c)]
    (finding,) = of(links, "ports")
    assert f"{b} does not reach {a} ({a}:29500), where ranks meet: no answer within 3 s" in finding["value"]
    assert "--master_addr" in finding["advice"]
