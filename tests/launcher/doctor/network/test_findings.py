"""What is said of a survey: ok, warn or fail, the hosts by name, and what to do."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from launcher.doctor.finding import Finding
from launcher.doctor.hosts import Host
from launcher.doctor.network.check import Network, check_hosts
from launcher.doctor.network.findings import (
    finding_of_rates,
    findings_of_hosts,
    findings_of_machine,
    skipped,
    survey_to_json,
)
from launcher.doctor.network.interfaces import Interface
from launcher.doctor.network.nccl import NcclNetwork
from launcher.doctor.network.survey import Port, Survey
from launcher.doctor.remote import NoAnswer
from tests.launcher.doctor.network.samples import ETH, HCA, network, survey_of

INFINIBAND = NcclNetwork(transport="IB", devices=("mlx5_0:1/IB",), meets_at="eth0")
LO = Interface(name="lo", addresses=("127.0.0.1",), mtu=65536)
NONE = NcclNetwork(transport="")


def port(source: str, target: str, problem: str = "no answer within 3 s", *, meeting_place: bool = False) -> Port:
    return Port(
        source=source,
        target=target,
        address=f"10.0.0.{ord(target) - ord('a') + 1}",
        number=29500,
        is_meeting_place=meeting_place,
        problem=problem,
    )


def troubles(survey: Survey, environment: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """Check and verdict of what is not ok; each of these says what to do, which the others do not."""
    findings = findings_of_hosts(survey, environment or {})
    assert all(bool(finding.advice) == (finding.verdict != "ok") for finding in findings)
    return [(finding.check, finding.verdict) for finding in findings if finding.verdict != "ok"]


def only(survey: Survey, check: str, environment: dict[str, str] | None = None) -> Finding:
    (finding,) = [finding for finding in findings_of_hosts(survey, environment or {}) if finding.check == check]
    return finding


def test_all_is_well():
    survey = survey_of(network(1), network(2), network(3))
    assert troubles(survey) == []
    said = {finding.check: finding.value for finding in findings_of_hosts(survey, {})}
    assert said["gloo interface"] == "eth0 (25 Gbit/s, MTU 9000) on all 3 hosts (the way to 10.0.0.1)"
    assert said["NCCL network"].startswith("TCP sockets over eth0 on all 3 hosts (by its rules")
    assert said["ports"] == "every host reaches 10.0.0.1:29500, and a free port of every other"


class TestInterfaces:
    @pytest.mark.parametrize("name", ["lo", "docker0", "br-12ab", "virbr0"])
    def test_one_that_leads_nowhere(self, name):
        bad = Interface(name=name, addresses=("172.17.0.1",), mtu=1500)
        survey = survey_of(network(1, interface=name, interfaces=[bad]), network(2))
        assert ("gloo interface", "warn") in troubles(survey)
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

    def test_infiniband_everywhere(self):
        survey = survey_of(network(1, **self.gpus()), network(2, **self.gpus()))
        assert troubles(survey) == []
        assert only(survey, "NCCL network").value.startswith("IB over mlx5_0:1/IB, meeting over eth0 on all 2 hosts")

    def test_nccl_s_own_words_win(self):
        said = NcclNetwork(transport="IB", devices=("mlx5_0:1/IB",), meets_at="eth0", was_asked=True)
        survey = survey_of(network(1, num_gpus=8), network(2, num_gpus=8), nccl={"a": said, "b": said})
        assert troubles(survey) == []
        assert "NCCL says so" in only(survey, "NCCL network").value

    def test_a_host_that_uses_sockets_among_infiniband(self):
        sockets = NcclNetwork(transport="Socket", devices=("eth0",), meets_at="eth0")
        survey = survey_of(network(1, **self.gpus()), network(2, **self.gpus(nccl=sockets)))
        assert troubles(survey) == [("NCCL network", "warn")]
        assert "Hosts differ" in only(survey, "NCCL network").advice

    def test_adapters_that_are_left_out(self):
        sockets = NcclNetwork(transport="Socket", devices=("eth0",), meets_at="eth0")
        survey = survey_of(*(network(n, **self.gpus(nccl=sockets)) for n in (1, 2)))
        assert troubles(survey) == [("NCCL network", "warn")]
        assert "active RDMA adapters of a, b" in only(survey, "NCCL network").advice

    def test_adapters_that_differ(self):
        other = NcclNetwork(transport="IB", devices=("mlx5_4:1/RoCE",), meets_at="eth0")
        survey = survey_of(network(1, **self.gpus()), network(2, **self.gpus(nccl=other)))
        assert troubles(survey) == [("NCCL network", "warn")]
        assert "NCCL_IB_HCA" in only(survey, "NCCL network").advice

    @pytest.mark.parametrize("name", ["lo", "docker0"])
    def test_interfaces_that_lead_nowhere(self, name):
        bad = NcclNetwork(transport="Socket", devices=(name,), meets_at=name)
        survey = survey_of(*(network(n, num_gpus=1, nccl=bad) for n in (1, 2)))
        assert troubles(survey) == [("NCCL network", "warn")]
        assert "NCCL_SOCKET_IFNAME=eth0" in only(survey, "NCCL network").advice

    def test_no_network_at_all(self):
        survey = survey_of(network(1, num_gpus=1, nccl=NONE), network(2, num_gpus=1))
        assert troubles(survey) == [("NCCL network", "fail")]

    def test_without_gpus_it_is_nobody_s_trouble(self):
        assert troubles(survey_of(network(1, nccl=NONE), network(2))) == []

    def test_nccl_that_does_not_start(self):
        survey = survey_of(network(1), network(2), nccl_problem="a: NCCL hangs")
        assert troubles(survey) == [("NCCL", "fail")]
        assert [finding.check for finding in findings_of_machine(survey)] == ["NCCL network", "NCCL"]


class TestPorts:
    def test_one_way(self):
        survey = survey_of(network(1), network(2), network(3), blocked=[port("c", "b")])
        finding = only(survey, "ports")
        assert finding.verdict == "fail"
        assert finding.value == "c does not reach b (10.0.0.2:29500), where gloo listens: no answer within 3 s"
        assert "firewall" in finding.advice
        assert "ip_local_port_range" in finding.advice

    def test_both_ways_are_one_phrase(self):
        survey = survey_of(network(1), network(2), network(3), blocked=[port("b", "c"), port("c", "b")])
        value = only(survey, "ports").value
        assert value.startswith("b and c do not reach each other (10.0.0.3:29500, 10.0.0.2:29500)")

    def test_a_host_that_nobody_reaches_is_one_phrase(self):
        blocked = [port("b", other) for other in "acd"] + [port(other, "b") for other in "acd"]
        survey = survey_of(*(network(n) for n in range(1, 5)), blocked=blocked)
        assert only(survey, "ports").value.startswith("b and the other 3 hosts do not reach each other, where gloo")

    def test_where_ranks_meet(self):
        survey = survey_of(network(1), network(2), blocked=[port("b", "a", "connection refused", meeting_place=True)])
        finding = only(survey, "ports")
        assert "where ranks meet: connection refused" in finding.value
        assert "--master_addr" in finding.advice

    @pytest.mark.parametrize(
        ("problem", "advice"),
        [
            ("connected, and no word within 3 s", "firewall drops"),
            ("another program answers", "/etc/hosts"),
            ("network is unreachable", "ip route get"),
        ],
    )
    def test_each_problem_has_its_advice(self, problem, advice):
        survey = survey_of(network(1), network(2), blocked=[port("a", "b", problem)])
        assert advice in only(survey, "ports").advice

    def test_a_large_cluster_is_one_line(self):
        names = [chr(ord("a") + n) for n in range(20)]
        blocked = [port(a, b) for a, b in combinations(names, 2)]
        finding = only(survey_of(*(network(n) for n in range(1, 21)), blocked=blocked), "ports")
        assert finding.value.count("does not reach") == 4
        assert "and 186 more" in finding.value


def test_hosts_that_are_silent():
    survey = survey_of(network(1), silent={"b": "it ended: killed", "c": "it ended: killed"})
    finding = only(survey, "network")
    assert finding.verdict == "fail"
    assert finding.value == "b, c: it ended: killed"
    assert not [each for each in findings_of_hosts(survey, {}) if each.check == "ports"], "not all were asked"


def test_json_has_every_host_and_blocked_port():
    survey = survey_of(network(1), network(2), network(3), blocked=[port("b", "c")])
    told = survey_to_json(survey)
    assert told["blocked"] == [{"from": "b", "to": "c", "port": 29500, "problem": "no answer within 3 s"}]
    assert told["interfaces"] == {"a": "eth0", "b": "eth0", "c": "eth0"}
    assert told["nccl"]["a"] == {"network": "TCP sockets over eth0", "was_asked": False}
    assert Network(findings=findings_of_hosts(survey, {}), survey=survey).to_json()["verdict"] == "fail"
    assert ETH in survey.networks["a"].interfaces


def test_a_network_that_is_not_looked_at():
    assert skipped("--no-links").value == "not looked at: --no-links"
    silent = NoAnswer(why="ssh failed", advice="keys")
    hosts = [Host(name="a", answer=silent, findings=[])]
    (finding,) = check_hosts(hosts, port=29500, hostfile=Path("h"), num_ranks=8).findings
    assert finding.value == "not looked at: a, where ranks would meet, does not answer"


def test_the_command_that_measures_rates():
    gpus = survey_of(network(1, num_gpus=8), network(2, num_gpus=8))
    assert "-np 16 ./build/sendrecv_perf" in finding_of_rates(gpus, "mpirun --hostfile h -np 16 ").value
    assert finding_of_rates(gpus).value.endswith("./build/sendrecv_perf -b 1M -e 1G -f 4 -g 8")
    assert "iperf3 -c HOST" in finding_of_rates(survey_of(network(1), network(2)), "mpirun ").value
