"""Network survey results: blocked ports and unsuitable interfaces, with advice.

This module opens no connection: it turns the survey (``network_probe.NetworkState``) into one line per finding.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from launcher.doctor.check_result import CheckResult, CheckStatus
from launcher.doctor.network.interfaces import Interface, is_loopback, is_virtual
from launcher.doctor.network.nccl import INFINIBAND, SOCKET, NcclNetwork
from launcher.doctor.network.network_probe import HostNetwork, NetworkState, Port
from launcher.wording import first_names
from parallel.runtime.interface import INTERFACE_VARIABLE

_NETWORK_VARIABLES = (INTERFACE_VARIABLE, "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET")
"""Variables that select gloo's and NCCL's network, so every host needs the same value."""
_ENV_FILE_LINE = "a line of ~/.deepspeed_env"
_MAX_NAMES = 4
"""Hosts or pairs listed in one line; further ones are only counted."""
_OPEN_PORTS = "open TCP between the hosts, for the rendezvous port and all of net.ipv4.ip_local_port_range"


def skipped_result(why: str) -> CheckResult:
    """Report that the network check was skipped."""
    return CheckResult.of("network", f"not checked: {why}")


def host_network_results(state: NetworkState, environment: Mapping[str, str] = os.environ) -> list[CheckResult]:
    """Return all results for the network between a hostfile's hosts; ``environment`` is this machine's."""
    # Causes before consequences: missing host, unsuitable interface, blocked port, NCCL.
    results = _failed_host_results(state) + _variable_results(state, environment)
    results += _gloo_interface_results(state) + _nccl_network_results(state)
    return results + _port_results(state) + _nccl_start_results(state)


def machine_network_results(state: NetworkState) -> list[CheckResult]:
    """Return all results for one machine: NCCL's network to others, local ports, and NCCL between its GPUs."""
    results = _failed_host_results(state) + _local_nccl_results(state)
    return results + _blocked_port_results(state) + _nccl_start_results(state)


def bandwidth_result(state: NetworkState, command_prefix: str = "") -> CheckResult:
    """Report that rates are not measured, with the command that measures them.

    ``launcher`` is a command prefix, with a space at its end, that starts one process per rank (mpirun). Without it one
    process drives all local GPUs.
    """
    # Without ``launcher`` all entries are ranks on this machine, with the same count.
    num_gpus = max((network.num_gpus for network in state.networks.values()), default=0)
    # sendrecv_perf measures one ring hop: every rank sends to the next one at the same time.
    if not num_gpus:
        value = "not measured. Without GPUs, use iperf3: `iperf3 -s` on one host, `iperf3 -c HOST -P 4` on another"
    elif command_prefix:
        value = (
            f"not measured. Use nccl-tests (make MPI=1): {command_prefix}./build/sendrecv_perf -b 1M -e 1G -f 4 -g 1"
        )
    else:
        value = f"not measured. Use nccl-tests: ./build/sendrecv_perf -b 1M -e 1G -f 4 -g {num_gpus}"
    return CheckResult.of("rates", value)


def state_to_json(state: NetworkState) -> dict[str, Any]:
    """Return the survey as plain values: (address, port) for the rendezvous, then interfaces and networks by host."""
    return {
        "meeting_place": state.rendezvous,
        "interfaces": {name: network.interface for name, network in state.networks.items()},
        "nccl": {
            name: {"network": _nccl_network(state, name).describe(), "was_asked": name in state.nccl}
            for name in state.networks
        },
        "blocked": [
            {"from": port.source, "to": port.target, "port": port.number, "problem": port.problem}
            for port in state.blocked
        ],
    }


def _failed_host_results(state: NetworkState) -> list[CheckResult]:
    """Return one failure per reason that removed hosts from the survey."""
    results = []
    # Hosts with the same problem share a line; dict.fromkeys keeps first-seen order.
    for why in dict.fromkeys(state.failures.values()):
        names = _format_names([name for name, reason in state.failures.items() if reason == why])
        hint = f"The network of {names} is unknown: fix its other findings, then try again"
        results.append(CheckResult.of("network", f"{names}: {why}", hint, "fail"))
    return results


# --- interfaces of gloo and NCCL ---


def _variable_results(state: NetworkState, environment: Mapping[str, str] = os.environ) -> list[CheckResult]:
    """Return a warning per variable in ``environment`` that some hosts lack or set otherwise."""
    results = []
    # Workers start with the variables that deepspeed passes (``remote.remote_command_line``), so one that they lack is
    # missing in a run too: exported in this shell, it silently has no effect on other hosts.
    for variable in _NETWORK_VARIABLES:
        value = environment.get(variable)
        hosts_without = [name for name, network in state.networks.items() if network.environment.get(variable) != value]
        if value is not None and hosts_without:
            text = f"{variable}={value} is set here, and not on {_format_names(hosts_without)}"
            hint = f"deepspeed does not pass it on: make it {_ENV_FILE_LINE}"
            results.append(CheckResult.of("environment", text, hint))
    return results


def _gloo_interface_results(state: NetworkState) -> list[CheckResult]:
    """Return one result with gloo's interface on every host; empty if no host answered."""
    networks = state.networks
    if not networks or state.rendezvous is None:
        return []
    reason = f"the route to {state.rendezvous[0]}"
    if chosen := [name for name, network in networks.items() if INTERFACE_VARIABLE in network.environment]:
        reason = f"{INTERFACE_VARIABLE} on {_format_names(chosen)}"
    value = f"{_format_by_value({name: _format_interface(network) for name, network in networks.items()})} ({reason})"
    hint = ""
    # Two names for one machine reach each other over any interface.
    if _num_machines(state) > 1:
        hint = _interface_hint([network.interface for network in networks.values()], INTERFACE_VARIABLE)
        hint = hint or _mtu_hint(networks)
    return [CheckResult.of("gloo interface", value, hint)]


def _interface_hint(names: Iterable[str], variable: str) -> str:
    """Return advice about one interface name per host, or "" if they suit; ``variable`` selects another."""
    names = list(names)
    example = f"set the one that reaches the other hosts, {variable}=eth0 for example, in {_ENV_FILE_LINE}"
    if any(is_loopback(name) for name in names):
        return f"A loopback interface reaches no other machine: {example}"
    if any(is_virtual(name) for name in names):
        return f"A container interface reaches only its own machine: {example}"
    if len(set(names)) > 1:
        return f"Interfaces differ, perhaps networks too: {example}"
    return ""


def _nccl_network_results(state: NetworkState) -> list[CheckResult]:
    """Return one result with the network that NCCL uses, or would use, on every host; empty if no host answered."""
    networks = {name: _nccl_network(state, name) for name in state.networks}
    if not networks:
        return []
    descriptions = {name: network.describe() for name, network in networks.items()}
    value = f"{_format_by_value(descriptions)} ({_nccl_basis(networks)})"
    hint = ""
    # Without GPUs no run depends on NCCL, and two names for one machine reach each other over any interface.
    has_gpus = any(network.num_gpus for network in state.networks.values())
    if has_gpus and _num_machines(state) > 1:
        hint = _nccl_hint(state, networks)
    status: CheckStatus = "warn"
    if any(not network.transport for network in networks.values()):
        status = "fail"
    return [CheckResult.of("NCCL network", value, hint, status)]


def _local_nccl_results(state: NetworkState) -> list[CheckResult]:
    """Return one result with NCCL's network from this machine to others; empty if no local rank answered."""
    if not state.networks:
        return []
    # All surveyed ranks are local and report the same network.
    name = next(iter(state.networks))
    network = _nccl_network(state, name)
    value = f"{network.describe()} to other machines ({_nccl_basis({name: network})})"
    return [CheckResult.of("NCCL network", value)]


def _nccl_network(state: NetworkState, name: str) -> NcclNetwork:
    """Return the network NCCL reported on a host, or the one its rules predict."""
    return state.nccl.get(name, state.networks[name].nccl)


def _num_machines(state: NetworkState) -> int:
    return len({network.machine for network in state.networks.values()})


def _nccl_basis(networks: Mapping[str, NcclNetwork]) -> str:
    """Return how these networks are known: NCCL reported them, or ``nccl.predict_network`` did."""
    reported = [name for name, network in networks.items() if network.is_reported]
    if not reported:
        return "predicted by NCCL's rules, without a GPU"
    if len(reported) < len(networks):
        return f"reported by NCCL on {_format_names(reported)}, predicted for the others"
    return "reported by NCCL"


def _nccl_hint(state: NetworkState, networks: Mapping[str, NcclNetwork]) -> str:
    if isolated := [name for name, network in networks.items() if not network.transport]:
        hosts = _format_names(isolated)
        return f"NCCL finds no network on {hosts}: check NCCL_SOCKET_IFNAME, NCCL_IB_HCA and NCCL_NET there"
    transports = {network.transport for network in networks.values()}
    # The device checks below compare hosts that share one transport.
    if len(transports) > 1:
        return "Hosts differ, and NCCL cannot start: use the same adapters, drivers and NCCL_ variables on all"
    if unused := [name for name in networks if transports == {SOCKET} and _has_adapter(state.networks[name])]:
        return (
            f"NCCL ignores active RDMA adapters on {_format_names(unused)}: check NCCL_IB_DISABLE and NCCL_IB_HCA, "
            "and /dev/infiniband in a container"
        )
    # Adapter names often differ between machine types; adapters on different fabrics cannot reach each other.
    if transports == {INFINIBAND} and len({network.devices for network in networks.values()}) > 1:
        return "Adapters differ between hosts: select one fabric's with NCCL_IB_HCA"
    # NCCL's ranks rendezvous over TCP even if their data goes over InfiniBand, so that interface counts first.
    return _interface_hint(
        [network.bootstrap_interface or next(iter(network.devices), "") for network in networks.values()],
        "NCCL_SOCKET_IFNAME",
    )


def _has_adapter(network: HostNetwork) -> bool:
    return any(adapter.is_active for adapter in network.adapters)


def _gloo_interface(network: HostNetwork) -> Interface | None:
    """Return gloo's interface on a host; None if the host does not list it."""
    return next((interface for interface in network.interfaces if interface.name == network.interface), None)


def _format_interface(network: HostNetwork) -> str:
    """Format gloo's interface with its MTU, and its speed if the driver reports one."""
    interface = _gloo_interface(network)
    if interface is None:
        return network.interface
    speed = ""
    if interface.megabits:
        speed = f"{interface.megabits / 1000:g} Gbit/s, "
    return f"{interface.name} ({speed}MTU {interface.mtu})"


def _mtu_hint(networks: Mapping[str, HostNetwork]) -> str:
    # Path MTU discovery often fails behind firewalls, so a large packet may be dropped without an error.
    sizes = {interface.mtu for network in networks.values() if (interface := _gloo_interface(network)) is not None}
    if len(sizes) < 2:
        return ""
    return f"Different MTUs may drop large packets: ip link set IFACE mtu {min(sizes)} on all"


# --- ports ---


def _port_results(state: NetworkState) -> list[CheckResult]:
    """Return the blocked ports' failures, or one success if all hosts reach each other; empty if that is unknown."""
    if results := _blocked_port_results(state):
        return results
    # A silent host has not tested its own connections, so success is unknown.
    if state.rendezvous is None or state.failures or len(state.networks) < len(state.hosts):
        return []
    address, number = state.rendezvous
    value = f"every host reaches {address}:{number}, and a free port on every other"
    return [CheckResult.of("ports", value)]


def _blocked_port_results(state: NetworkState) -> list[CheckResult]:
    """Return one failure per problem, separately for rendezvous and gloo ports."""
    # One firewall rule blocks many ports; grouping reports it once.
    groups: dict[tuple[bool, str], list[Port]] = {}
    for port in state.blocked:
        groups.setdefault((port.is_rendezvous, port.problem), []).append(port)
    results = []
    for (is_rendezvous, problem), ports in groups.items():
        port_kind, hint = "gloo's port", _port_hint(problem)
        if is_rendezvous:
            port_kind = "rendezvous port"
            hint += "; or give deepspeed another address of the first host: --master_addr"
        value = f"{_format_names(_describe_blocked(ports, state))}, {port_kind}: {problem}"
        results.append(CheckResult.of("ports", value, hint, "fail"))
    return results


def _describe_blocked(ports: Sequence[Port], state: NetworkState) -> list[str]:
    """Return one phrase per host that is cut off in both directions, then one per remaining blocked pair."""
    pairs = {(port.source, port.target): f"{port.address}:{port.number}" for port in ports}
    cut_off = _disconnected_hosts(pairs, list(state.networks))
    phrases = [f"{name} and the other {len(state.networks) - 1} hosts do not reach each other" for name in cut_off]
    for (source, target), place in pairs.items():
        if source in cut_off or target in cut_off:
            continue
        if (target, source) not in pairs:
            phrases.append(f"{source} does not reach {target} ({place})")
        # The loop visits both directions: report the pair once.
        elif source < target:
            phrases.append(f"{source} and {target} do not reach each other ({place}, {pairs[target, source]})")
    return phrases


def _disconnected_hosts(blocked: Container[tuple[str, str]], names: Sequence[str]) -> list[str]:
    """Return hosts cut off from all others in both directions; ``blocked`` contains (source, target)."""
    # With two hosts both would be cut off; the phrase for their pair says it once.
    if len(names) < 3:
        return []
    return [
        name
        for name in names
        if all((name, other) in blocked and (other, name) in blocked for other in names if other != name)
    ]


def _port_hint(problem: str) -> str:
    # Texts from ``ports.try_port``. Any other is the system's message, typically "no route to host".
    if "no answer" in problem or "no word" in problem:
        return f"A firewall drops packets: {_OPEN_PORTS}"
    if "refused" in problem:
        return f"A firewall rejects connections, or the address is another machine's: {_OPEN_PORTS}"
    if "another program" in problem:
        return "The address is another machine's, or is forwarded: check `hostname -I` and /etc/hosts there"
    return "There is no route to that network: check `ip route get ADDRESS`, or set another interface"


def _nccl_start_results(state: NetworkState) -> list[CheckResult]:
    if not state.nccl_problem:
        return []
    hint = "Fix the other findings first; then set NCCL_DEBUG=INFO in .deepspeed_env for details"
    return [CheckResult.of("NCCL", state.nccl_problem, hint, "fail")]


# --- host names in messages ---


def _format_names(names: Sequence[str]) -> str:
    """Format names as ``a, b`` or ``a, b, c, d and 12 more``."""
    return first_names(list(names), _MAX_NAMES)


def _format_by_value(values: Mapping[str, str]) -> str:
    """Format one value per host: ``eth0 on all 3 hosts`` if all agree, otherwise ``eth0 on a, b; ib0 on c``.

    A single host's value stands alone.
    """
    distinct = list(dict.fromkeys(values.values()))
    if len(values) == 1:
        return distinct[0]
    if len(distinct) == 1:
        return f"{distinct[0]} on all {len(values)} hosts"
    return "; ".join(
        f"{value} on {_format_names([name for name in values if values[name] == value])}" for value in distinct
    )
