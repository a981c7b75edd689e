"""Findings of the links between hosts, or between ranks: how fast, which do not work, which are slow."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.doctor.finding import Finding
from launcher.doctor.network.survey import GLOO, NCCL, Link, Survey
from launcher.wording import plural
from parallel.comm.links.outliers import Outlier, find_outliers
from parallel.comm.links.rates import LinkFailure, LinkRate

_ON_SLOW_LINKS = (
    "A ring is as fast as its slowest link: compare `ethtool IFACE` (speed, errors), cable, switch port and MTU with "
    "another host's; or leave it out (deepspeed --exclude)"
)


def findings_of_links(survey: Survey, *, compared: Sequence[str] = (GLOO, NCCL)) -> list[Finding]:
    """How fast links are, which do not work, and which are slow: those of the backends that are ``compared``."""
    findings = []
    # Backends are never compared with each other: NCCL is faster by far.
    for backend in (GLOO, NCCL):
        links = [link for link in survey.links if link.backend == backend]
        good = [link for link in links if isinstance(link.found, LinkRate)]
        if good:
            findings.append(_summary(survey, backend, good))
        findings += _broken(links)
        if backend in compared:
            rates = [link.found for link in good if isinstance(link.found, LinkRate)]
            findings += _slow(find_outliers(rates), good)
        if problem := survey.problems.get(backend):
            advice = "See the other findings first; then NCCL_DEBUG=INFO in .deepspeed_env says more"
            if backend == GLOO:
                advice = "See the other findings first, and try again"
            findings.append(Finding(check="links", verdict="fail", value=f"{backend}: {problem}", advice=advice))
    return findings


def _summary(survey: Survey, backend: str, links: Sequence[Link]) -> Finding:
    """How many links there are, and how fast they are."""
    rates = [link.found for link in links if isinstance(link.found, LinkRate)]
    speeds = sorted(rate.bytes_per_second for rate in rates)
    latencies = sorted(rate.latency_seconds for rate in rates)
    count = plural(len(rates), "pair")
    # Pairs are missing that are blocked, that failed, or that are not in the sample.
    if backend == GLOO and len(rates) < survey.num_pairs:
        count = f"{len(rates):,} of {plural(survey.num_pairs, 'pair')}"
    value = (
        f"{count} by {backend}: {_range(speeds, 1e9, 'GB/s')} each way while both send, "
        f"latency {_range(latencies, 1e-3, 'ms')}"
    )
    return Finding(check="links", verdict="ok", value=value)


def _broken(links: Sequence[Link]) -> list[Finding]:
    """A failure for each link that could not be measured."""
    findings = []
    for link in links:
        if not isinstance(link.found, LinkFailure):
            continue
        # Which sizes passed tells a broken connection from packets that are too large for a switch.
        advice = "The connection breaks: look at both hosts' logs (dmesg) and at the switch"
        if "bytes pass" in link.found.problem:
            advice = (
                "Small messages pass and large ones do not: the MTU differs on the way (ip link; "
                "ping -M do -s 8972 HOST for an MTU of 9000), or the link is very slow"
            )
        value = f"{link.first} and {link.second} by {link.backend}: {link.found.problem}"
        findings.append(Finding(check="links", verdict="fail", value=value, advice=advice))
    return findings


def _slow(outliers: Sequence[Outlier], links: Sequence[Link]) -> list[Finding]:
    """A warning for each link, or host, that is much slower than the others."""
    names = _names_of_ranks(links)
    # One line for bandwidth and latency of the same link.
    said: dict[tuple[int, ...], list[str]] = {}
    for outlier in outliers:
        said.setdefault(outlier.ranks, []).append(_how_slow(outlier))
    findings = []
    for ranks, parts in said.items():
        who = " and ".join(names[rank] for rank in ranks)
        if len(ranks) == 1:
            who = f"{who} and every other"
        value = f"{who} by {links[0].backend}: {'; '.join(parts)}"
        findings.append(Finding(check="slow link", verdict="warn", value=value, advice=_ON_SLOW_LINKS))
    return findings


def _how_slow(outlier: Outlier) -> str:
    if outlier.quantity == "latency":
        usual = _milliseconds(outlier.usual)
        return f"latency {_milliseconds(outlier.value)}, {outlier.ratio:.1f} times more than usual here ({usual})"
    usual = _gigabytes(outlier.usual)
    return f"{_gigabytes(outlier.value)}, {outlier.ratio:.1f} times less than usual here ({usual})"


def _names_of_ranks(links: Sequence[Link]) -> dict[int, str]:
    names = {}
    for link in links:
        names[link.found.first] = link.first
        names[link.found.second] = link.second
    return names


def _range(values: Sequence[float], unit: float, name: str) -> str:
    """``1.2 GB/s``, or ``1.2 to 1.4 GB/s``, of ascending values."""
    low, high = f"{values[0] / unit:.2g}", f"{values[-1] / unit:.2g}"
    if low == high:
        return f"{low} {name}"
    return f"{low} to {high} {name}"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.2g} GB/s"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.2g} ms"
