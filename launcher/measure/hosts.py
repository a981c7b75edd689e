"""Links between the machines of a hostfile, as a profile has them: by the workers that ``doctor`` asks over ssh."""

from __future__ import annotations

from pathlib import Path

from launcher.cluster.hostfile import read_hostfile
from launcher.doctor.network.start import survey_hosts
from launcher.doctor.network.survey import Link
from launcher.measure.figures import Figure
from longctx.errors import ClusterError, ConfigError
from parallel.comm.links.rates import LinkRate


def slots_of(hostfile: Path) -> dict[str, int]:
    """The hosts and how many ranks each has; ConfigError for a file that is wrong, or names one host alone."""
    slots = read_hostfile(hostfile)
    if len(slots) < 2:
        raise ConfigError(
            f"--hostfile {hostfile} names one host, {', '.join(slots)}: there are no links between hosts to measure.\n"
            "Leave it out to measure this machine."
        )
    return slots


def measure_network(slots: dict[str, int], *, device_type: str, port: int) -> Figure:
    """``network_bandwidth`` of the slowest link; ClusterError where one does not work.

    Pairs of hosts take turns, a rank of each. By gloo the ranks of a host share what was found; by NCCL each GPU is
    taken to have a network adapter of its own.
    """
    backend, share, shared = "gloo", max(slots.values()), f"of which each of {max(slots.values())} ranks has its share"
    if device_type == "cuda":
        backend, share, shared = "nccl", 1, "which each GPU is taken to have"
    survey = survey_hosts(list(slots), port=port)
    links = [link for link in survey.links if link.backend == backend]
    rates = [link.found for link in links if isinstance(link.found, LinkRate)]
    trouble = [_trouble(link) for link in links]
    trouble += [f"{host}: {why}" for host, why in survey.silent.items()]
    trouble += [why for name, why in survey.problems.items() if name == backend]
    trouble = [line for line in trouble if line]
    if trouble or not rates:
        listed = "\n".join(f"  {line}" for line in trouble[:8] or ["no link was measured"])
        raise ClusterError(
            f"Links between hosts cannot be measured by {backend}:\n{listed}\n"
            "`longctx doctor --hostfile FILE` says what to do."
        )
    # A ring waits for its slowest link.
    slowest = min(rates, key=lambda rate: rate.bytes_per_second)
    what = f"the slowest of {len(rates)} links between hosts, by {backend}, {shared}"
    return Figure.of("network_bandwidth", slowest.bytes_per_second / share, what)


def _trouble(link: Link) -> str:
    """What is wrong with a link; "" where it works."""
    if isinstance(link.found, LinkRate):
        return ""
    return f"{link.first} and {link.second}: {link.found.problem}"
