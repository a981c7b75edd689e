"""What is said of a survey: ok, warn or fail, the hosts by name, and what to do."""

from __future__ import annotations

import pytest

from launcher.doctor.check_result import CheckResult
from launcher.doctor.network.interfaces import Interface
from launcher.doctor.network.nccl import NcclNetwork
from launcher.doctor.network.network_probe import NetworkState, Port
from launcher.doctor.network.network_results import host_network_results, machine_network_results
from tests.launcher.doctor.network.samples import HCA, SOCKETS, network, survey_of

INFINIBAND = NcclNetwork(transport="IB", devices=("mlx5_0:1/IB",), bootstrap_interface="eth0")
OTHER_ADAPTER = NcclNetwork(transport="IB", devices=("mlx5_4:1/RoCE",), bootstrap_interface="eth0")
LO = Interface(name="lo", addresses=("127.0.0.1",), mtu=65536)
NONE = NcclNetwork(transport="")


def port(source: str, target: str, problem: str = "no answer within 3 s", *, meeting_place: bool = False) -> Port:
    return Port(
        source=source,
        target=target,
        address=f"10.0.0.{ord(target) - ord('a') + 1}",
        number=29500,
        is_rendezvous=meeting_place,
        problem=problem,
    )


def troubles(survey: NetworkState, environment: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """Check and verdict of what is not ok; each of these says what to do, which the others do not."""
    findings = host_network_results(survey, environment or {})
    assert all(bool(finding.advice) == (finding.verdict != "ok") for finding in findings)
    return [(finding.check, finding.verdict) for finding in findings if finding.verdict != "ok"]


def only(survey: NetworkState, check: str, environment: dict[str, str] | None = None) -> CheckResult:
    (finding,) = [finding for finding in host_network_results(survey, environment or {}) if finding.check == check]
    return finding


def test_all_is_well():
    survey = survey_of(network(1), network(2), network(3))
    assert troubles(survey) == []
    said = {finding.check: finding.value for finding in host_network_results(survey, {})}
    assert said["gloo interface"] == "eth0 (25 Gbit/s, MTU 9000) on all 3 hosts (the route to 10.0.0.1)"
    assert said["NCCL network"].startswith("TCP sockets over eth0 on all 3 hosts (predicted by NCCL's rules")
    assert said["ports"] == "every host reaches 10.0.0.1:29500, and a free port on every other"


class TestInterfaces:
    @pytest.mark.parametrize("name", ["lo", "lo0", "docker0", "br-12ab", "virbr0", "local1", "br0"])
    def test_one_that_leads_nowhere(self, name):
        one = Interface(name=name, addresses=("172.17.0.1",), mtu=1500)
        survey = survey_of(*(network(n, interface=name, interfaces=[one]) for n in (1, 2)))
        if name in ("local1", "br0"):
            assert troubles(survey) == []
            return
        assert troubles(survey) == [("gloo interface", "warn")]
        assert "GLOO_SOCKET_IFNAME=eth0" in only(survey, "gloo interface").advice

    def test_those_that_differ(self):
        other = Interface(name="ib0", addresses=("10.1.0.2",), mtu=9000)
        survey = survey_of(network(1), network(2, interface="ib0", interfaces=[other]), network(3))
        finding = only(survey, "gloo interface")
        assert finding.verdict == "warn"
        assert "eth0 (25 Gbit/s, MTU 9000) on a, c; ib0 (MTU 9000) on b" in finding.value

    def test_mtus_that_differ(self):
        small = Interface(name="eth0", addresses=("10.0.0.2",), mtu=1500)
        finding = only(survey_of(network(1), network(2, interfaces=[small])), "gloo interface")
        assert finding.verdict == "warn"
        assert "mtu 1500 on all" in finding.advice

    def test_two_names_of_one_machine_may_use_its_loopback(self):
        one = network(1, interface="lo", interfaces=[LO], machine="x", environment={"GLOO_SOCKET_IFNAME": "lo"})
        survey = survey_of(one, one)
        assert troubles(survey) == []
        assert only(survey, "gloo interface").value == "lo (MTU 65536) on all 2 hosts (GLOO_SOCKET_IFNAME on a, b)"

    def test_a_variable_that_stays_behind(self):
        survey = survey_of(network(1, environment={"GLOO_SOCKET_IFNAME": "eth1"}), network(2))
        assert troubles(survey, {"GLOO_SOCKET_IFNAME": "eth1"}) == [("environment", "warn")]
        finding = only(survey, "environment", {"GLOO_SOCKET_IFNAME": "eth1"})
        assert finding.value == "GLOO_SOCKET_IFNAME=eth1 is set here, and not on b"
        assert ".deepspeed_env" in finding.advice


class TestNccl:
    def gpus(self, **changes):
        return {"num_gpus": 8, "nccl": INFINIBAND, "adapters": [HCA], **changes}

    @pytest.mark.parametrize(
        ("one", "other", "advice"),
        [
            (INFINIBAND, SOCKETS, "Hosts differ"),
            (SOCKETS, SOCKETS, "active RDMA adapters on a, b"),
            (INFINIBAND, OTHER_ADAPTER, "NCCL_IB_HCA"),
        ],
    )
    def test_what_hosts_with_infiniband_make_of_it(self, one, other, advice):
        survey = survey_of(network(1, **self.gpus(nccl=one)), network(2, **self.gpus(nccl=other)))
        assert troubles(survey) == [("NCCL network", "warn")]
        assert advice in only(survey, "NCCL network").advice

    @pytest.mark.parametrize("name", ["lo", "docker0"])
    def test_interfaces_that_lead_nowhere(self, name):
        bad = NcclNetwork(transport="Socket", devices=(name,), bootstrap_interface=name)
        survey = survey_of(*(network(n, num_gpus=1, nccl=bad) for n in (1, 2)))
        assert troubles(survey) == [("NCCL network", "warn")]
        assert "NCCL_SOCKET_IFNAME=eth0" in only(survey, "NCCL network").advice

    def test_no_network_at_all_is_nobody_s_trouble_without_gpus(self):
        survey = survey_of(network(1, num_gpus=1, nccl=NONE), network(2, num_gpus=1))
        assert troubles(survey) == [("NCCL network", "fail")]
        assert troubles(survey_of(network(1, nccl=NONE), network(2))) == []
        assert troubles(survey_of(network(1, **self.gpus()), network(2, **self.gpus()))) == []

    def test_nccl_that_does_not_start(self):
        survey = survey_of(network(1), network(2), nccl_problem="a: NCCL hangs")
        assert troubles(survey) == [("NCCL", "fail")]
        assert [finding.check for finding in machine_network_results(survey)] == ["NCCL network", "NCCL"]


class TestPorts:
    def test_one_way(self):
        survey = survey_of(network(1), network(2), network(3), blocked=[port("c", "b")])
        finding = only(survey, "ports")
        assert finding.verdict == "fail"
        assert finding.value == "c does not reach b (10.0.0.2:29500), gloo's port: no answer within 3 s"
        assert "firewall" in finding.advice
        assert "ip_local_port_range" in finding.advice

    def test_where_ranks_meet(self):
        survey = survey_of(network(1), network(2), blocked=[port("b", "a", "connection refused", meeting_place=True)])
        finding = only(survey, "ports")
        assert "rendezvous port: connection refused" in finding.value
        assert "--master_addr" in finding.advice


def test_hosts_that_are_silent():
    survey = survey_of(network(1), failures={"b": "it ended: killed", "c": "it ended: killed"})
    finding = only(survey, "network")
    assert finding.verdict == "fail"
    assert finding.value == "b, c: it ended: killed"
    assert not [each for each in host_network_results(survey, {}) if each.check == "ports"], "not all were asked"
