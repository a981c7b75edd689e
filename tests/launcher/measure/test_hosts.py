"""Links between hosts in a profile: the slowest one counts, and one that does not work is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.doctor.network.survey import Link, Survey
from launcher.measure import hosts
from launcher.measure.hosts import measure_network, slots_of
from longctx.errors import ClusterError, ConfigError
from parallel.comm.links.rates import LinkFailure, LinkRate
from tests.launcher.cluster.cluster import missing_programs, two_hosts
from tests.launcher.runs import free_port

SLOTS = {"one": 4, "two": 4, "three": 2}


def rate(first: int, second: int, bytes_per_second: float, backend: str = "gloo") -> Link:
    found = LinkRate(first, second, bytes_per_second=bytes_per_second, latency_seconds=1e-4)
    names = list(SLOTS)
    return Link(backend=backend, first=names[first], second=names[second], found=found)


def answering(monkeypatch: pytest.MonkeyPatch, **survey) -> None:
    """Let the hosts find this of their network."""
    monkeypatch.setattr(hosts, "survey_hosts", lambda names, port: Survey(hosts=names, **survey))


def test_ranks_of_a_host_share_the_slowest_link(monkeypatch):
    answering(monkeypatch, links=[rate(0, 1, 8e9), rate(0, 2, 2e9), rate(1, 2, 4e9), rate(0, 1, 1.0, "nccl")])
    figure = measure_network(SLOTS, device_type="cpu", port=29500)
    assert (figure.name, figure.values) == ("network_bandwidth", {"value": [2e9 / 4]})
    assert "the slowest of 3 links" in figure.what


def test_each_gpu_has_what_nccl_found(monkeypatch):
    answering(monkeypatch, links=[rate(0, 1, 8e9), rate(0, 1, 40e9, "nccl")])
    assert measure_network(SLOTS, device_type="cuda", port=29500).values == {"value": [40e9]}


@pytest.mark.parametrize(
    ("survey", "said"),
    [
        ({"silent": {"three": "ssh failed"}, "links": [rate(0, 1, 1e9)]}, "three: ssh failed"),
        ({"problems": {"gloo": "port 29500 is taken"}}, "port 29500 is taken"),
        ({}, "no link was measured"),
        (
            {
                "links": [
                    rate(0, 1, 1e9),
                    Link(backend="gloo", first="one", second="three", found=LinkFailure(0, 2, "no")),
                ]
            },
            "one and three: no",
        ),
    ],
)
def test_a_link_that_does_not_work_is_named(monkeypatch, survey, said):
    answering(monkeypatch, **survey)
    with pytest.raises(ClusterError, match=said) as caught:
        measure_network(SLOTS, device_type="cpu", port=29500)
    assert "longctx doctor --hostfile" in str(caught.value)


def test_a_hostfile_of_one_host_has_no_links(tmp_path: Path):
    path = tmp_path / "hosts"
    path.write_text("alone slots=8\n")
    with pytest.raises(ConfigError, match="names one host, alone"):
        slots_of(path)
    path.write_text("one slots=8\ntwo slots=8\n")
    assert slots_of(path) == {"one": 8, "two": 8}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_hosts_behind_a_real_ssh_server(tmp_path, monkeypatch):
    if reason := missing_programs():
        pytest.skip(reason)
    with two_hosts(tmp_path, slots=2) as (hostfile, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        figure = measure_network(slots_of(hostfile), device_type="cpu", port=free_port())
    # Both are this machine: faster than a tape, slower than its memory.
    assert 1e6 < figure.values["value"][0] < 1e12
    assert "the slowest of 1 links between hosts, by gloo" in figure.what
