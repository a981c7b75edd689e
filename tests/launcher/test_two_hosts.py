"""Two hosts by deepspeed's real multi-node path, pdsh over ssh, against the same run on one host."""

from __future__ import annotations

import json

import pytest

from tests.launcher.cluster import missing_programs, two_hosts
from tests.launcher.runs import flags, pretrain
from tests.launcher.workers import rows


@pytest.mark.timeout(200)
def test_two_hosts_compute_what_one_host_does(shards, finished, tmp_path):
    if reason := missing_programs():
        pytest.skip(reason)
    (tmp_path / "cluster").mkdir()
    with two_hosts(tmp_path / "cluster") as (hostfile, environment):
        ended = pretrain(flags(shards, tmp_path / "run"), hostfile=hostfile, environment=environment)
    assert ended.code == 0, ended.text
    assert "pdsh" in ended.text, "one host alone would have been started without it"
    assert rows(ended.folder) == rows(finished.folder), "to the last bit"
    assert json.loads((ended.folder / "environment.json").read_text())["world_size"] == 2
    assert not ended.orphans
