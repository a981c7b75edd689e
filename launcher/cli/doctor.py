"""The verb ``doctor``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from launcher.cli.cli_output import Json, print_json, print_line, progress
from launcher.cluster.exit import DONE, FAILED
from launcher.wording import format_count
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from launcher.doctor.check_result import CheckResult
    from launcher.doctor.host_checks import Host
    from launcher.doctor.machine_checks import CheckOptions, MachineReport
    from launcher.doctor.network.network_check import Network

_LARGEST_PORT = 65535


def doctor(
    *,
    hostfile: Annotated[Path | None, arg(metavar="H")] = None,
    folder: Annotated[Path, arg(metavar="DIR")] = Path("runs"),
    master_port: int = 29500,
    local: bool = False,
    world_size: int = 0,
    links: bool = True,
    json: Json = False,
) -> int:
    """Check this machine, and every machine in a hostfile, before a run.

    Prints one line per finding: ok, warn or fail, the value, and a remedy. The exit code is 1 if anything fails. With
    --hostfile every host is queried over ssh, which must need no password, and compared with this machine. The network
    check then reports unreachable hosts and ports, and the interfaces that gloo and NCCL use.

    Args:
        hostfile: The run's hostfile.
        folder: Folder for runs. A file of at most 64 MiB is written there, and removed.
        master_port: deepspeed's --master_port, used for the rendezvous; 0 to leave it out.
        local: Check only this machine, without its network.
        world_size: Ranks in the run; default: those in the hostfile.
        links: Leave the network out.
    """
    if local and hostfile is not None:
        raise ConfigError("--local checks only this machine, --hostfile also others. Leave one of them out.")
    if not 0 <= master_port <= _LARGEST_PORT:
        raise ConfigError(f"--master-port {master_port} is not a port: use 1 to {_LARGEST_PORT}, or 0 to skip it.")
    if world_size < 0:
        raise ConfigError(f"--world-size {world_size} must be at least 1, or 0 for the default.")
    from launcher.cluster.hostfile import read_hostfile
    from launcher.doctor.machine_checks import CheckOptions, check_machine

    slots: dict[str, int] = {}
    if hostfile is not None:
        slots = read_hostfile(hostfile)
    options = CheckOptions(folder=folder, port=master_port, world_size=world_size or sum(slots.values()) or 1)
    with progress("checking this machine"):
        # With a hostfile, the port belongs to its first host, which is checked over ssh.
        this_machine = check_machine(replace(options, port=0) if slots else options)
    hosts = _hosts(slots, this_machine, options)
    network = None
    # Last, because it connects only hosts that answered over ssh.
    if not local:
        network = _network(hostfile, slots, this_machine, hosts, port=master_port, wanted=links)
    return _say(this_machine, hosts, network, json)


def _hosts(slots: dict[str, int], this_machine: MachineReport, options: CheckOptions) -> list[Host]:
    if not slots:
        return []
    from launcher.doctor.host_checks import check_deepspeed_launch, check_remote_hosts

    with progress(f"asking {format_count(len(slots), 'host')}", total=len(slots)) as update:
        hosts = check_remote_hosts(slots, this_machine, options, on_progress=update)
    # This part of a start happens on this machine, so its findings belong to it.
    this_machine.findings.extend(check_deepspeed_launch(slots, this_machine.facts.name))
    return hosts


def _network(
    hostfile: Path | None,
    slots: dict[str, int],
    this_machine: MachineReport,
    hosts: list[Host],
    *,
    port: int,
    wanted: bool,
) -> Network:
    """Check the network between the hosts that answer, or between one machine's GPUs."""
    from launcher.doctor.network.network_check import Network, check_hosts, check_this_machine
    from launcher.doctor.network.network_results import skipped_result

    if not wanted:
        return Network(results=[skipped_result("--no-links")])
    if hostfile is not None and len(slots) > 1:
        with progress("checking the network between hosts"):
            return check_hosts(hosts, port=port, hostfile=hostfile, num_ranks=sum(slots.values()))
    with progress("checking the network"):
        return check_this_machine(len(this_machine.facts.gpus))


def _say(this_machine: MachineReport, hosts: list[Host], network: Network | None, as_json: bool) -> int:
    """Print all findings and return the exit code."""
    from dataclasses import asdict

    from launcher.doctor.check_result import format_results, results_summary, worst
    from launcher.doctor.host_checks import lines_of_hosts

    # The exit code depends on all findings, so they are collected before anything is printed.
    of_network: list[CheckResult] = []
    if network is not None:
        of_network = network.results
    entries = this_machine.findings + [entry for host in hosts for entry in host.results] + of_network
    status = worst(entries)
    if as_json:
        of_hosts = {
            host.name: {"verdict": worst(host.results), "findings": [asdict(entry) for entry in host.results]}
            for host in hosts
        }
        result = this_machine.to_json() | {"hosts": of_hosts, "verdict": status}
        if network is not None:
            result["links"] = network.to_json()
        print_json(result)
    else:
        for line in (
            format_results(this_machine.findings)
            + lines_of_hosts(hosts)
            + format_results(of_network)
            + [results_summary(entries)]
        ):
            print_line(line)
    if status == "fail":
        return FAILED
    return DONE
