"""Who is asked what: a host that fails keeps no other from being asked. Workers are stand-ins."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import psutil
import pytest

from launcher.doctor.network import network_probe as survey_module
from launcher.doctor.network.network_check import probe_this_machine
from launcher.doctor.network.network_probe import NetworkState, probe_network
from tests.launcher.doctor.network.samples import Host, network, stops


def surveyed(*hosts: Host, port: int = 29500) -> NetworkState:
    return probe_network(hosts, port=port, over_ssh=True)


def with_gpus(number: int, num_gpus: int, machine: str) -> Any:
    """An answer to "listen"."""
    return lambda order: asdict(network(number, num_gpus=num_gpus, machine=machine))


def test_all_is_well():
    hosts = [Host(name, number) for number, name in enumerate("abcd", 1)]
    found = surveyed(*hosts)
    assert (found.failures, found.blocked, found.nccl_problem) == ({}, [], "")
    assert found.rendezvous == ("10.0.0.1", 29500)
    # The first host alone leads, in front of the others.
    assert [len(host.orders("lead")) for host in hosts] == [1, 0, 0, 0]
    # Every host tries the meeting place and all others; the first one's meeting place is its own.
    targets = [[tuple(target) for target in host.orders("connect")[0]["targets"]] for host in hosts]
    assert targets[0] == [("10.0.0.2", 40002), ("10.0.0.3", 40003), ("10.0.0.4", 40004)]
    assert targets[1] == [("10.0.0.1", 29500), ("10.0.0.1", 40001), ("10.0.0.3", 40003), ("10.0.0.4", 40004)]
    assert not any(host.orders("nccl") for host in hosts), "without GPUs NCCL is not asked"
    words = {order["word"] for host in hosts for order in host.heard if "word" in order}
    assert len(words) == 1


def test_a_pair_that_is_blocked():
    # b does not reach c, the third of its ports.
    blocked = Host("b", 2, connect=lambda order: ["", "", "no answer within 3 s"])
    found = surveyed(Host("a", 1), blocked, Host("c", 3))
    (port,) = found.blocked
    assert (port.source, port.target, port.number, port.is_rendezvous) == ("b", "c", 40003, False)


def test_a_host_that_does_not_reach_the_meeting_place():
    locked_out = Host("b", 2, connect=lambda order: ["connection refused", "", ""])
    found = surveyed(Host("a", 1), locked_out, Host("c", 3))
    assert [(port.source, port.is_rendezvous) for port in found.blocked] == [("b", True)]


@pytest.mark.parametrize("phase", ["listen", "connect", "nccl"])
def test_a_host_that_stops_is_left_out(phase):
    hosts = [Host(name, n, listen=with_gpus(n, 1, f"machine {n}")) for n, name in enumerate("abc", 1)]
    hosts[1]._answers[phase] = stops("it ended: killed")
    found = surveyed(*hosts)
    assert found.failures == {"b": "it ended: killed"}
    assert hosts[2].orders("nccl")[0]["world_size"] == (3 if phase == "nccl" else 2)


def test_without_the_first_host_nobody_is_asked():
    other = Host("b", 2)
    found = surveyed(Host("a", 1, lead=stops("it ended: killed")), other)
    assert found.failures == {"a": "it ended: killed"}
    assert not other.heard


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "10.0.0.2; rm -rf /"},
        {"port": 0},
        {"port": True},
        {"interfaces": [3]},
        {"nccl": None},
    ],
)
def test_networks_that_are_none(changes):
    lying = Host("b", 2, listen=lambda order: {**asdict(network(2)), **changes})
    found = surveyed(Host("a", 1), lying, Host("c", 3))
    assert set(found.failures) == {"b"}


def test_what_is_shown_is_printable():
    noisy = asdict(network(2, environment={"NCCL_NET": "\x1b[2J"}, interface="eth0\n"))
    found = surveyed(Host("a", 1), Host("b", 2, listen=lambda order: noisy))
    assert found.networks["b"].environment == {"NCCL_NET": "[2J"}
    assert found.networks["b"].interface == "eth0"


def test_ports_that_were_not_all_tried():
    lazy = Host("b", 2, connect=lambda order: [""])
    found = surveyed(Host("a", 1), lazy, Host("c", 3))
    assert list(found.failures) == ["b"]


class TestNccl:
    def test_hosts_with_gpus_start_it_together(self):
        hosts = [Host(name, n, listen=with_gpus(n, 8, f"machine {n}")) for n, name in enumerate("abc", 1)]
        found = surveyed(*hosts)
        assert [host.orders("nccl")[0]["gpu"] for host in hosts] == [0, 0, 0]
        assert [host.orders("nccl")[0]["rank"] for host in hosts] == [0, 1, 2]
        assert {host.orders("nccl")[0]["world_size"] for host in hosts} == {3}
        # Where the first of them listens, and all others have reached it.
        assert {host.orders("nccl")[0]["store"] for host in hosts} == {("10.0.0.1", 40001)}
        assert {name: said.is_reported for name, said in found.nccl.items()} == {"a": True, "b": True, "c": True}

    def test_two_names_of_one_machine_take_two_gpus(self):
        hosts = [Host(name, n, listen=with_gpus(n, 2, "one machine")) for n, name in enumerate("abc", 1)]
        surveyed(*hosts)
        assert [host.orders("nccl")[0]["gpu"] for host in hosts[:2]] == [0, 1]
        assert not hosts[2].orders("nccl"), "there is no third GPU"

    def test_a_lone_gpu_is_asked_for_its_network(self):
        hosts = [Host("a", 1), Host("b", 2, listen=with_gpus(2, 1, "machine 2"))]
        found = surveyed(*hosts)
        (order,) = hosts[1].orders("nccl")
        assert (order["rank"], order["world_size"]) == (0, 1)
        assert list(found.nccl) == ["b"]
        assert not hosts[0].orders("nccl")

    def test_hosts_that_do_not_reach_each_other_would_wait_for_ever(self):
        blocked = Host("b", 2, listen=with_gpus(2, 1, "machine 2"), connect=lambda order: ["", "no answer within 3 s"])
        hosts = [Host("a", 1, listen=with_gpus(1, 1, "machine 1")), blocked]
        found = surveyed(*hosts)
        assert [host.orders("nccl")[0]["world_size"] for host in hosts] == [1, 1]
        assert list(found.nccl) == ["a", "b"]
        assert "do not reach each other" in found.nccl_problem

    def test_what_went_wrong_is_told_with_the_host(self):
        hangs = {"fault": "NCCL hangs", "network": None}
        hosts = [Host(name, n, listen=with_gpus(n, 1, f"machine {n}")) for n, name in enumerate("ab", 1)]
        for host in hosts:
            host._answers["nccl"] = lambda order: hangs
        found = surveyed(*hosts)
        assert found.nccl_problem == "a: NCCL hangs"


@pytest.mark.slow
def test_this_machine_for_real():
    found = probe_this_machine(2)
    assert (found.failures, found.blocked) == ({}, [])
    assert list(found.networks) == ["rank 0", "rank 1"]
    assert {each.interface for each in found.networks.values()} == {"lo"}


@pytest.mark.slow
def test_a_worker_that_hangs_for_real(monkeypatch):
    look_around = survey_module._ProbeCoordinator.listen

    def stop_one(self):
        look_around(self)
        workers = [each for each in psutil.Process().children() if "doctor_worker" in " ".join(each.cmdline())]
        workers[-1].suspend()

    monkeypatch.setattr(survey_module._ProbeCoordinator, "listen", stop_one)
    monkeypatch.setattr(survey_module, "_PHASE_SECONDS", 2.0)
    found = probe_this_machine(2)
    assert found.failures == {"rank 1": "no answer within 8 s"}
    assert not [each for each in psutil.Process().children() if "doctor_worker" in " ".join(each.cmdline())]
