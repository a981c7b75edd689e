"""Check a hostfile's machines over ssh and compare them with this one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.cluster.hostfile import is_own_name
from launcher.cluster.remote_shell import environment_files
from launcher.doctor.check_result import CHECK_STATUSES, CheckResult, CheckStatus, format_result, sanitize_line
from launcher.doctor.machine_checks import CheckOptions, MachineInfo, MachineReport
from launcher.doctor.remote import HostAnswer, NoAnswer, ask, check_environment_files
from launcher.doctor.storage import FolderProbe, existing_part, probe_in
from launcher.wording import first_names, format_count

_SKEW_SECONDS = 5.0
_MOST_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host in the hostfile with its check results."""

    name: str
    answer: HostAnswer | NoAnswer
    results: list[CheckResult]


def check_remote_hosts(
    slots: Mapping[str, int],
    local: MachineReport,
    options: CheckOptions,
    *,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[Host]:
    """Check every host concurrently and compare it with this machine; ``stop_request`` receives the answer count so
    far.
    """
    folder = existing_part(options.folder)
    # A probe file written here shows whether each host sees the same folder.
    try:
        with probe_in(folder) as probe:
            return _ask_all(slots, local, replace(options, folder=folder, probe=probe.name), probe, on_progress)
    except OSError as error:
        hosts = _ask_all(slots, local, replace(options, folder=folder), None, on_progress)
        value = sanitize_line(f"cannot be checked: {folder}: {error.strerror}")
        unchecked = CheckResult.of("shared folder", value, "Give a --folder to write to", "fail")
        return [replace(host, results=[unchecked.on(host.name), *host.results]) for host in hosts]


def check_deepspeed_launch(slots: Mapping[str, int], own_name: str) -> list[CheckResult]:
    """Check how deepspeed would start ranks from this machine, ``own_name``, without contacting the hosts."""
    results = check_environment_files(environment_files())
    if len(slots) > 1:
        if shutil.which("pdsh") is None:
            hint = "apt-get install pdsh: deepspeed starts ranks on other machines with it"
            results.append(CheckResult.of("pdsh", "not installed here", hint, "fail"))
        return results
    host = next(iter(slots))
    if not is_own_name(host, own_name):
        hint = "If it is another machine, start deepspeed there with --num_gpus, or add --force_multi"
        value = f"{host} is the only host: deepspeed starts its ranks on this machine ({own_name})"
        results.append(CheckResult.of("hostfile", value, hint))
    return results


def _ask_all(
    slots: Mapping[str, int],
    local: MachineReport,
    options: CheckOptions,
    probe: FolderProbe | None,
    on_progress: Callable[[int], None],
) -> list[Host]:
    """Return the hosts in hostfile order; the first one runs rank 0."""
    first = next(iter(slots))

    def question(host: str) -> HostAnswer | NoAnswer:
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
                hint = f"On this machine, longctx train --ranks {slots[host]} needs no hostfile and no ssh"
                answer = replace(answer, hint=f"{answer.hint}. {hint}")
            results = compare_host(answer, local.facts, slots[host], probe)
            hosts.append(Host(name=host, answer=answer, results=[result.on(host) for result in results]))
            on_progress(len(hosts))
    return hosts


def compare_host(
    answer: HostAnswer | NoAnswer, local: MachineInfo, num_slots: int, probe: FolderProbe | None
) -> list[CheckResult]:
    """Return all results for a host: ssh, mismatches with this machine, and the host's own checks."""
    if isinstance(answer, NoAnswer):
        return [CheckResult.of("ssh", answer.why, answer.hint, "fail")]
    remote = answer.machine.facts
    found = [
        CheckResult.of("ssh", f"answers without a password, after {answer.seconds:.1f} s"),
        _same_code(remote, local),
        *_same_versions(remote, local),
        _same_clock(answer.skew_seconds),
        _enough_gpus(remote, local, num_slots),
    ]
    if probe is not None:
        found.append(_same_folder(remote, local, probe))
    return found + answer.machine.findings


def _same_code(remote: MachineInfo, local: MachineInfo) -> CheckResult:
    if remote.code == local.code:
        return CheckResult.of("code", f"the same ({local.code})")
    hint = f"Ranks would run different code: copy {Path.cwd()} there, or start from a shared folder"
    return CheckResult.of("code", f"{remote.code}, here {local.code}", hint, "fail")


def _same_versions(remote: MachineInfo, local: MachineInfo) -> list[CheckResult]:
    """Return one result if all versions match, otherwise one per mismatch."""
    results: list[CheckResult] = []

    def compare_values(
        check: str,
        remote_value: str | None,
        ours: str | None,
        hint: str,
        status: CheckStatus = "fail",
        none: str = "none",
    ) -> None:
        if remote_value != ours:
            results.append(CheckResult.of(check, f"{remote_value or none}, here {ours or none}", hint, status))

    compare_values("python", remote.python, local.python, "Install the same Python")
    for name in local.packages:
        # A package known only to the other machine implies another longctx version, which the code hash reveals.
        ours = local.packages[name]
        hint = f"pip install {name}=={ours}"
        if ours is None:
            hint = f"pip uninstall {name}, or install it everywhere"
        compare_values(name, remote.packages.get(name), ours, hint, none="not installed")
    compare_values("CUDA", remote.cuda, local.cuda, "Install the same build of PyTorch")
    # The launching machine need not have GPUs.
    if remote.driver and local.driver:
        compare_values("driver", remote.driver, local.driver, "Install the same driver on all", "warn")
    return results or [CheckResult.of("versions", "the same Python and packages")]


def _same_clock(skew: float) -> CheckResult:
    value = f"its clock is {abs(skew):.1f} s ahead"
    if skew < 0:
        value = f"its clock is {abs(skew):.1f} s behind"
    if abs(skew) <= _SKEW_SECONDS:
        return CheckResult.of("clock", value)
    return CheckResult.of("clock", value, "Logs and file times disagree: run chrony or ntpd")


def _enough_gpus(remote: MachineInfo, local: MachineInfo, num_slots: int) -> CheckResult:
    """Compare GPUs with slots. Each rank needs its own GPU; a CPU may run any number of ranks."""
    count = len(remote.gpus)
    value = f"{format_count(count, 'GPU')}, slots={num_slots}"
    if count == num_slots:
        return CheckResult.of("slots", value)
    if count == 0 and not local.gpus:
        return CheckResult.of("slots", f"{value}: ranks run on the CPU")
    if count < num_slots:
        return CheckResult.of("slots", value, f"Write slots={count} in the hostfile", "fail")
    return CheckResult.of("slots", value, f"GPUs stay idle: write slots={count} in the hostfile")


def _same_folder(remote: MachineInfo, local: MachineInfo, probe: FolderProbe) -> CheckResult:
    if remote.probe == probe.content:
        return CheckResult.of("shared folder", f"{local.folder} is the same there")
    value = f"a file written here in {local.folder} is missing there"
    if remote.probe is not None:
        value = f"a file written here in {local.folder} has other content there"
    hint = "Checkpoints need one shared folder: mount it on all machines, and give it with --folder"
    return CheckResult.of("shared folder", value, hint, "fail")


def lines_of_hosts(hosts: Sequence[Host]) -> list[str]:
    """Format one line per healthy host, and one per warning or failure, shared by all hosts that have it."""
    lines = [_healthy(host) for host in hosts if all(result.verdict == "ok" for result in host.results)]
    groups: dict[tuple[str, str, str], list[CheckResult]] = {}
    for result in (result for host in hosts for result in host.results):
        if result.verdict != "ok":
            # Group by advice, since values differ slightly between machines (seconds, bytes).
            groups.setdefault((result.verdict, result.check, result.advice), []).append(result)
    # Worst last, next to the prompt.
    for status in CHECK_STATUSES:
        lines += [_shared(group) for key, group in groups.items() if key[0] == status]
    return lines


def _healthy(host: Host) -> str:
    assert isinstance(host.answer, HostAnswer), "no answer is a failure"
    values = [result.value for result in host.results if result.check in ("ssh", "versions", "clock", "slots")]
    return f"ok    {host.name:15}  {'; '.join(values)}; the same code and folder"


def _shared(group: Sequence[CheckResult]) -> str:
    """Format a result shared by several hosts, with the first host's value."""
    names = first_names([result.host for result in group], most=4)
    return format_result(group[0], f"{group[0].check} on {names}")
