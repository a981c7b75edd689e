"""Check a hostfile's machines over ssh and compare them with this one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.cluster.hostfile import is_own_name
from launcher.cluster.remote_shell import environment_files
from launcher.doctor.finding import VERDICTS, Finding, Verdict, line_of, printable
from launcher.doctor.machine import Facts, Machine, Options
from launcher.doctor.remote import Answer, NoAnswer, ask, check_environment_files
from launcher.doctor.storage import Probe, existing_part, probe_in
from launcher.wording import first_names, plural

_SKEW_SECONDS = 5.0
_MOST_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host in the hostfile with its check results."""

    name: str
    answer: Answer | NoAnswer
    findings: list[Finding]


def examine_hosts(
    slots: Mapping[str, int], here: Machine, options: Options, *, asked: Callable[[int], None] = lambda done: None
) -> list[Host]:
    """Check every host concurrently and compare it with this machine; ``asked`` receives the answer count so far."""
    folder = existing_part(options.folder)
    # A probe file written here shows whether each host sees the same folder.
    try:
        with probe_in(folder) as probe:
            return _ask_all(slots, here, replace(options, folder=folder, probe=probe.name), probe, asked)
    except OSError as error:
        hosts = _ask_all(slots, here, replace(options, folder=folder), None, asked)
        value = printable(f"cannot be checked: {folder}: {error.strerror}")
        unchecked = Finding.of("shared folder", value, "Give a --folder to write to", "fail")
        return [replace(host, findings=[unchecked.on(host.name), *host.findings]) for host in hosts]


def check_start(slots: Mapping[str, int], own_name: str) -> list[Finding]:
    """Check how deepspeed would start ranks from this machine, ``own_name``, without contacting the hosts."""
    findings = check_environment_files(environment_files())
    if len(slots) > 1:
        if shutil.which("pdsh") is None:
            advice = "apt-get install pdsh: with it deepspeed starts ranks on other machines"
            findings.append(Finding.of("pdsh", "not installed here", advice, "fail"))
        return findings
    host = next(iter(slots))
    if not is_own_name(host, own_name):
        advice = "If it is another machine, start deepspeed there with --num_gpus, or add --force_multi"
        value = f"{host} is the only one: deepspeed starts its ranks on this machine ({own_name})"
        findings.append(Finding.of("hostfile", value, advice))
    return findings


def _ask_all(
    slots: Mapping[str, int], here: Machine, options: Options, probe: Probe | None, asked: Callable[[int], None]
) -> list[Host]:
    """Return the hosts in hostfile order; the first one runs rank 0."""
    first = next(iter(slots))

    def question(host: str) -> Answer | NoAnswer:
        port = 0
        # Rank 0's host listens at the master port; the others connect to it and use ports chosen by the system.
        if host == first:
            port = options.port
        return ask(host, replace(options, port=port))

    hosts = []
    with ThreadPoolExecutor(max_workers=_MOST_AT_ONCE) as pool:
        for host, answer in zip(slots, pool.map(question, slots), strict=True):
            if len(slots) == 1 and isinstance(answer, NoAnswer):
                # deepspeed queries the host's address over ssh, although it would start the ranks without ssh.
                advice = f"On this machine alone longctx train --ranks {slots[host]} needs no hostfile and no ssh"
                answer = replace(answer, advice=f"{answer.advice}. {advice}")
            findings = compare(answer, here.facts, slots[host], probe)
            hosts.append(Host(name=host, answer=answer, findings=[finding.on(host) for finding in findings]))
            asked(len(hosts))
    return hosts


def compare(answer: Answer | NoAnswer, here: Facts, num_slots: int, probe: Probe | None) -> list[Finding]:
    """Return all results for a host: ssh, mismatches with this machine, and the host's own checks."""
    if isinstance(answer, NoAnswer):
        return [Finding.of("ssh", answer.why, answer.advice, "fail")]
    facts = answer.machine.facts
    found = [
        Finding.of("ssh", f"answers without a password, after {answer.seconds:.1f} s"),
        _same_code(facts, here),
        *_same_versions(facts, here),
        _same_clock(answer.skew_seconds),
        _enough_gpus(facts, here, num_slots),
    ]
    if probe is not None:
        found.append(_same_folder(facts, here, probe))
    return found + answer.machine.findings


def _same_code(there: Facts, here: Facts) -> Finding:
    if there.code == here.code:
        return Finding.of("code", f"the same ({here.code})")
    advice = f"Ranks would disagree: copy {Path.cwd()} there, or start from a shared folder"
    return Finding.of("code", f"{there.code}, here {here.code}", advice, "fail")


def _same_versions(there: Facts, here: Facts) -> list[Finding]:
    """Return one result if all versions match, otherwise one per mismatch."""
    findings: list[Finding] = []

    def compare_values(
        check: str, theirs: str | None, ours: str | None, advice: str, verdict: Verdict = "fail", none: str = "none"
    ) -> None:
        if theirs != ours:
            findings.append(Finding.of(check, f"{theirs or none}, here {ours or none}", advice, verdict))

    compare_values("python", there.python, here.python, "Install the same Python")
    for name in here.packages:
        # A package known only to the other machine implies another longctx version, which the code hash reveals.
        ours = here.packages[name]
        advice = f"pip install {name}=={ours}"
        if ours is None:
            advice = f"pip uninstall {name}, or install it everywhere"
        compare_values(name, there.packages.get(name), ours, advice, none="not installed")
    compare_values("CUDA", there.cuda, here.cuda, "Install the same build of PyTorch")
    # The launching machine need not have GPUs.
    if there.driver and here.driver:
        compare_values("driver", there.driver, here.driver, "Install the same driver on all", "warn")
    return findings or [Finding.of("versions", "the same Python and packages")]


def _same_clock(skew: float) -> Finding:
    value = f"its clock is {abs(skew):.1f} s ahead"
    if skew < 0:
        value = f"its clock is {abs(skew):.1f} s behind"
    if abs(skew) <= _SKEW_SECONDS:
        return Finding.of("clock", value)
    return Finding.of("clock", value, "Logs and file times disagree: run chrony or ntpd")


def _enough_gpus(there: Facts, here: Facts, num_slots: int) -> Finding:
    """Compare GPUs with slots. Each rank needs its own GPU; a CPU may run any number of ranks."""
    count = len(there.gpus)
    value = f"{plural(count, 'GPU')}, slots={num_slots}"
    if count == num_slots:
        return Finding.of("slots", value)
    if count == 0 and not here.gpus:
        return Finding.of("slots", f"{value}: ranks run on the CPU")
    if count < num_slots:
        return Finding.of("slots", value, f"Write slots={count} in the hostfile", "fail")
    return Finding.of("slots", value, f"GPUs stay idle: write slots={count} in the hostfile")


def _same_folder(there: Facts, here: Facts, probe: Probe) -> Finding:
    if there.probe == probe.content:
        return Finding.of("shared folder", f"{here.folder} is the same there")
    value = f"a file written here in {here.folder} is not there"
    if there.probe is not None:
        value = f"a file written here in {here.folder} has other content there"
    advice = "Checkpoints need one folder that all machines see: give it with --folder, and mount it on each"
    return Finding.of("shared folder", value, advice, "fail")


def lines_of_hosts(hosts: Sequence[Host]) -> list[str]:
    """Format one line per healthy host, and one per warning or failure, shared by all hosts that have it."""
    lines = [_healthy(host) for host in hosts if all(finding.verdict == "ok" for finding in host.findings)]
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in (finding for host in hosts for finding in host.findings):
        if finding.verdict != "ok":
            # Group by advice, since values differ slightly between machines (seconds, bytes).
            groups.setdefault((finding.verdict, finding.check, finding.advice), []).append(finding)
    # Worst last, next to the prompt.
    for verdict in VERDICTS:
        lines += [_shared(group) for key, group in groups.items() if key[0] == verdict]
    return lines


def _healthy(host: Host) -> str:
    assert isinstance(host.answer, Answer), "no answer is a failure"
    said = [finding.value for finding in host.findings if finding.check in ("ssh", "versions", "clock", "slots")]
    return f"ok    {host.name:15}  {'; '.join(said)}; the same code and folder"


def _shared(group: Sequence[Finding]) -> str:
    """Format a result shared by several hosts, with the first host's value."""
    names = first_names([finding.host for finding in group], most=4)
    return line_of(group[0], f"{group[0].check} on {names}")
