"""All checks for one machine, and the facts compared between machines."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from launcher.doctor.check_result import CheckResult, Text, worst
from launcher.doctor.device_checks import check_devices, check_kernel, check_processor, read_gpus
from launcher.doctor.limits import check_compiler, check_locked_memory, check_map_count, check_open_files, check_port
from launcher.doctor.packages import check_packages, installed_versions, source_hash
from launcher.doctor.storage import check_folder, check_shared_memory, existing_part, read_probe

MASTER_PORT = 29500
"""deepspeed's default --master_port, at which ranks rendezvous."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options for one machine's checks."""

    folder: Path = Path("runs")
    """Run folder; its nearest existing parent is checked."""
    port: int = MASTER_PORT
    """Rank 0's port; 0 if this machine does not run rank 0."""
    world_size: int = 1
    """Ranks in the run."""
    probe: str = ""
    """Probe file in ``folder`` to read for another machine; "" to skip."""


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """Facts that must match on all machines or fit the hostfile. Plain values, because they travel as JSON."""

    name: Text
    """The machine's host name."""
    time: float
    """The machine's clock when it answered, in seconds since 1970."""
    python: Text
    executable: Text
    code: Text
    """Hash over the project's sources."""
    packages: Mapping[Text, Text | None]
    cuda: Text | None
    """CUDA version in PyTorch's build."""
    driver: Text | None
    gpus: Sequence[Text]
    """GPUs usable by PyTorch, by name."""
    folder: Text
    probe: Text | None = None
    """Content read from the probe."""


@dataclass(frozen=True, kw_only=True)
class MachineReport:
    """One machine's facts and check results."""

    facts: MachineInfo
    findings: list[CheckResult]

    def to_json(self) -> dict[str, Any]:
        """Return facts, results and the worst verdict as plain values."""
        return {"verdict": worst(self.findings), **asdict(self)}


def check_machine(options: CheckOptions) -> MachineReport:
    """Run all checks on this machine. Takes a few seconds, mostly to measure the folder's write speed."""
    folder = existing_part(options.folder)
    packages = installed_versions()
    gpus, usable = read_gpus(), _usable_gpus()
    # Ranks run on the GPUs that PyTorch can use; the driver may list more.
    device_type = "cpu"
    if usable:
        device_type = "cuda"
    results = [
        *check_packages(packages),
        *check_devices(gpus, len(usable)),
        check_processor(),
        check_kernel(device_type),
        check_compiler(),
        *check_folder(folder),
        check_shared_memory(len(usable)),
        check_open_files(options.world_size),
        check_locked_memory(),
        check_map_count(),
    ]
    if options.port:
        results.append(check_port(options.port))
    probe, driver = None, None
    if options.probe:
        probe = read_probe(folder, options.probe)
    if gpus:
        driver = gpus[0].driver
    info = MachineInfo(
        name=socket.gethostname(),
        python=platform.python_version(),
        executable=sys.executable,
        code=source_hash(),
        packages=packages,
        cuda=torch.version.cuda,
        driver=driver,
        gpus=usable,
        folder=os.fspath(folder),
        probe=probe,
        # Last, because the asking machine compares it with the arrival time.
        time=time.time(),
    )
    return MachineReport(facts=info, findings=[result for result in results if result is not None])


def _usable_gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
