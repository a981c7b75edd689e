"""The machines of a hostfile, each asked over ssh, and compared with the one that asks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.cluster.remote_shell import environment_files
from launcher.doctor.environment import check_environment_files
from launcher.doctor.finding import Finding, Verdict, printable
from launcher.doctor.machine import Facts, Machine, Options
from launcher.doctor.probe import Probe, probe_in
from launcher.doctor.remote import Answer, NoAnswer, ask
from launcher.doctor.storage import existing_part
from launcher.wording import plural

_SKEW_SECONDS = 5.0
_MOST_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host of the hostfile."""

    name: str
    answer: Answer | NoAnswer
    findings: list[Finding]


def examine_hosts(
    slots: Mapping[str, int], here: Machine, options: Options, *, asked: Callable[[int], None] = lambda done: None
) -> list[Host]:
    """Ask every host at once and compare it with this machine; ``asked`` hears how many have answered."""
    folder = existing_part(options.folder)
    try:
        with probe_in(folder) as probe:
            return _ask_all(slots, here, replace(options, folder=folder, probe=probe.name), probe, asked)
    except OSError as error:
        hosts = _ask_all(slots, here, replace(options, folder=folder), None, asked)
        value = printable(f"cannot be checked: {folder}: {error.strerror}")
        unchecked = Finding(check="shared folder", verdict="fail", value=value, advice="Give a --folder to write to")
        return [replace(host, findings=[unchecked.on(host.name), *host.findings]) for host in hosts]


def check_start(slots: Mapping[str, int], own_name: str) -> list[Finding]:
    """What deepspeed on this machine, ``own_name``, would make of the hostfile, apart from the hosts themselves."""
    findings = check_environment_files(environment_files())
    if len(slots) > 1:
        if shutil.which("pdsh") is None:
            advice = "apt-get install pdsh: with it deepspeed starts ranks on other machines"
            findings.append(Finding(check="pdsh", verdict="fail", value="not installed here", advice=advice))
        return findings
    host = next(iter(slots))
    if host not in ("localhost", own_name, own_name.partition(".")[0]) and not host.startswith("127."):
        advice = "If it is another machine, start deepspeed there with --num_gpus, or add --force_multi"
        value = f"{host} is the only one: deepspeed starts its ranks on this machine ({own_name})"
        findings.append(Finding(check="hostfile", verdict="warn", value=value, advice=advice))
    return findings


def _ask_all(
    slots: Mapping[str, int], here: Machine, options: Options, probe: Probe | None, asked: Callable[[int], None]
) -> list[Host]:
    """The hosts in the order of the hostfile, of which the first holds rank 0."""
    first = next(iter(slots))

    def question(host: str) -> Answer | NoAnswer:
        port = 0
        # The others connect to it and listen at ports that the system gives them.
        if host == first:
            port = options.port
        return ask(host, replace(options, port=port))

    hosts = []
    with ThreadPoolExecutor(max_workers=_MOST_AT_ONCE) as pool:
        for host, answer in zip(slots, pool.map(question, slots), strict=True):
            if len(slots) == 1 and isinstance(answer, NoAnswer):
                # deepspeed asks it over ssh for its address, although it would start the ranks without ssh.
                advice = f"On this machine alone deepspeed --num_gpus {slots[host]} needs no hostfile and no ssh"
                answer = replace(answer, advice=f"{answer.advice}. {advice}")
            findings = compare(answer, here.facts, slots[host], probe)
            hosts.append(Host(name=host, answer=answer, findings=[finding.on(host) for finding in findings]))
            asked(len(hosts))
    return hosts


def compare(answer: Answer | NoAnswer, here: Facts, num_slots: int, probe: Probe | None) -> list[Finding]:
    """All findings of a host: whether it answers, what differs from this machine, and what it found of itself."""
    if isinstance(answer, NoAnswer):
        return [Finding(check="ssh", verdict="fail", value=answer.why, advice=answer.advice)]
    facts = answer.machine.facts
    found = [
        Finding(check="ssh", verdict="ok", value=f"answers without a password, after {answer.seconds:.1f} s"),
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
        return Finding(check="code", verdict="ok", value=f"the same ({here.code})")
    advice = f"Ranks would disagree: copy {Path.cwd()} there, or start from a shared folder"
    return Finding(check="code", verdict="fail", value=f"{there.code}, here {here.code}", advice=advice)


def _same_versions(there: Facts, here: Facts) -> list[Finding]:
    """One finding where everything is equal; else one for each difference."""
    findings = []
    if there.python != here.python:
        findings.append(_differs("python", "fail", there.python, here.python, "Install the same Python"))
    for name in here.packages:
        # Names that only the other machine knows are those of another version, which its code's hash tells.
        version, ours = there.packages.get(name), here.packages.get(name)
        if version != ours:
            advice = f"pip install {name}=={ours}"
            if ours is None:
                advice = f"pip uninstall {name}, or install it everywhere"
            findings.append(_differs(name, "fail", version or "not installed", ours or "not installed", advice))
    if there.cuda != here.cuda:
        advice = "Install the same build of PyTorch"
        findings.append(_differs("CUDA", "fail", there.cuda or "none", here.cuda or "none", advice))
    # A machine that starts a run need not have GPUs itself.
    if there.driver and here.driver and there.driver != here.driver:
        findings.append(_differs("driver", "warn", there.driver, here.driver, "Install the same driver on all"))
    return findings or [Finding(check="versions", verdict="ok", value="the same Python and packages")]


def _differs(check: str, verdict: Verdict, there: str, here: str, advice: str) -> Finding:
    return Finding(check=check, verdict=verdict, value=f"{there}, here {here}", advice=advice)


def _same_clock(skew: float) -> Finding:
    value = f"its clock is {abs(skew):.1f} s ahead"
    if skew < 0:
        value = f"its clock is {abs(skew):.1f} s behind"
    if abs(skew) <= _SKEW_SECONDS:
        return Finding(check="clock", verdict="ok", value=value)
    return Finding(
        check="clock", verdict="warn", value=value, advice="Logs and file times disagree: run chrony or ntpd"
    )


def _enough_gpus(there: Facts, here: Facts, num_slots: int) -> Finding:
    """Slots are ranks. On GPUs each needs one of its own; on a CPU they may be as many as one likes."""
    count = len(there.gpus)
    value = f"{plural(count, 'GPU')}, slots={num_slots}"
    if count == num_slots:
        return Finding(check="slots", verdict="ok", value=value)
    if count == 0 and not here.gpus:
        return Finding(check="slots", verdict="ok", value=f"{value}: ranks run on the CPU")
    if count < num_slots:
        return Finding(check="slots", verdict="fail", value=value, advice=f"Write slots={count} in the hostfile")
    advice = f"GPUs stay idle: write slots={count} in the hostfile"
    return Finding(check="slots", verdict="warn", value=value, advice=advice)


def _same_folder(there: Facts, here: Facts, probe: Probe) -> Finding:
    if there.probe == probe.content:
        return Finding(check="shared folder", verdict="ok", value=f"{here.folder} is the same there")
    value = f"a file written here in {here.folder} is not there"
    if there.probe is not None:
        value = f"a file written here in {here.folder} has other content there"
    advice = "Checkpoints need one folder that all machines see: give it with --folder, and mount it on each"
    return Finding(check="shared folder", verdict="fail", value=value, advice=advice)
