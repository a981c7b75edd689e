"""Two hosts by deepspeed's real multi-node path, pdsh over ssh, against the same run on one host."""

from __future__ import annotations

import json

import pytest

from tests.launcher.cluster.cluster import missing_programs, two_hosts
from tests.launcher.runs import flags, pretrain
from tests.launcher.workers import rows, run, train

LACKS = missing_programs()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(LACKS is not None, reason=str(LACKS))]
LIMIT = 180.0
"""Seconds for a launch: each host starts Python anew, one by one on a busy machine."""


def test_two_hosts_compute_what_one_host_does(shards, tmp_path):
    with two_hosts(tmp_path) as (hostfile, environment):
        ended = pretrain(flags(shards, tmp_path / "run"), timeout=LIMIT, hostfile=hostfile, environment=environment)
    assert ended.code == 0, ended.text
    assert "pdsh" in ended.text, "one host alone would have been started without it"
    run(train, 2, shards, tmp_path / "one", {})
    assert rows(ended.folder) == rows(tmp_path / "one"), "to the last bit"
    assert json.loads((ended.folder / "environment.json").read_text())["world_size"] == 2
    assert not ended.orphans


def test_a_ring_over_two_hosts_crosses_between_them_once(shards, tmp_path):
    """2 hosts × 2 ranks, one sequence on all four: rows cross by counterparts and are handed round inside a host."""
    spread = {"parallel.context": 4, "parallel.layout": "balanced"}
    one_host = tmp_path / "one_host"
    one_host.write_text("localhost slots=4\n")
    with two_hosts(tmp_path, slots=2) as (hostfile, environment):
        asked = flags(shards, tmp_path / "two", spread)
        two = pretrain(asked, timeout=LIMIT, hostfile=hostfile, environment=environment)
    assert two.code == 0, two.text
    assert "rows by two_level" in (two.folder / "logs" / "rank_0.log").read_text()
    one = pretrain(flags(shards, tmp_path / "one", spread), timeout=LIMIT, hostfile=one_host)
    assert "rows by p2p" in (one.folder / "logs" / "rank_0.log").read_text()
    for got, want in zip(rows(two.folder), rows(one.folder), strict=True):
        if got["kind"] == "train":
            assert got["loss"] == pytest.approx(want["loss"], rel=1e-6), "gradients were added in another order"


def test_a_configuration_is_verified_over_two_hosts(shards, tmp_path):
    asked = flags(shards, tmp_path / "run", {"train.chunk_tokens": 40, "train.keep": "attention"})
    with two_hosts(tmp_path) as (hostfile, environment):
        script = {"script": "launcher/verify.py", "hostfile": hostfile, "environment": environment}
        ended = pretrain(asked, timeout=LIMIT, **script)
    assert ended.code == 0, ended.text
    assert "They agree" in ended.text
    assert "pdsh" in ended.text
    assert not ended.orphans
