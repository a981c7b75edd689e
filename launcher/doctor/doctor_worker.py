"""Worker process that doctor starts on every host: ``python -m launcher.doctor.doctor_worker``.

It reads orders from standard input, one JSON object per line, and answers each with one line on standard output that
begins with ``MARK``. The end of standard input means that the caller is gone: the process exits at once, even during a
wait.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

import torch

from launcher.doctor.check_result import first_line
from launcher.doctor.machine_checks import CheckOptions, check_machine
from launcher.doctor.network.interfaces import gloo_choice, read_adapters, read_interfaces
from launcher.doctor.network.nccl import call_nccl, predict_network
from launcher.doctor.network.ports import Listener, try_ports
from launcher.doctor.session import MARK
from longctx.errors import ClusterError, LongCtxError
from parallel.runtime.interface import INTERFACE_VARIABLE

_HOSTNAME_SECONDS = 5.0
_MACHINE_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_READ_BY_LIBRARIES = ("GLOO_", "NCCL_", "UCX_")


class DoctorWorker:
    """One host's checks, order by order."""

    def __init__(self) -> None:
        """Prepare without opening a port."""
        # Other hosts try these ports, so they stay open until the process ends.
        self._rendezvous: Listener | None = None
        self._listener: Listener | None = None
        self._handlers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "examine": self._check_machine,
            "lead": self._lead,
            "listen": self._listen,
            "connect": lambda request: try_ports(request["targets"], request["word"]),
            "nccl": self._nccl,
        }

    def handle(self, request: dict[str, Any]) -> Any:
        """Execute an order and return the answer; on an error, a dict with its first line as ``problem``."""
        # A failed phase is an answer too; the next order may succeed.
        try:
            return self._handlers[request.pop("do")](request)
        except (LongCtxError, OSError, RuntimeError) as error:
            return {"problem": first_line(error)}

    def _check_machine(self, request: dict[str, Any]) -> dict[str, Any]:
        return asdict(check_machine(CheckOptions(**{**request, "folder": Path(request["folder"])})))

    def _lead(self, request: dict[str, Any]) -> tuple[str, int]:
        """Listen at the ranks' rendezvous address; sent only to the first host."""
        address = "127.0.0.1"
        if request["over_ssh"]:
            address = _first_own_address()
        # All interfaces, like PyTorch's store.
        try:
            self._rendezvous = Listener("", request["port"], request["word"])
        except OSError:
            # check_port reports the problem with this port; hosts can still try another one.
            self._rendezvous = Listener("", 0, request["word"])
        return address, self._rendezvous.port

    def _listen(self, request: dict[str, Any]) -> dict[str, Any]:
        """Listen on gloo's interface and return this machine's network."""
        interfaces, adapters = read_interfaces(), read_adapters()
        environment = {key: text for key, text in os.environ.items() if key.startswith(_READ_BY_LIBRARIES)}
        name, address = gloo_choice(request["master"], interfaces)
        # gloo reads this variable when it first connects.
        os.environ.setdefault(INTERFACE_VARIABLE, name)
        self._listener = Listener(address, 0, request["word"])
        return {
            "interface": name,
            "address": address,
            "port": self._listener.port,
            "interfaces": [asdict(interface) for interface in interfaces],
            "adapters": [asdict(adapter) for adapter in adapters],
            "nccl": asdict(predict_network(interfaces, adapters)),
            "environment": environment,
            "num_gpus": torch.cuda.device_count(),
            "machine": _machine(),
        }

    def _nccl(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start NCCL, together with any other ranks, and return its network."""
        if request["rank"] == 0 and self._listener is not None:
            # The store reuses this port, which all other hosts have reached.
            self._listener.close()
        return call_nccl(**request)


def _first_own_address() -> str:
    """Return this machine's address that deepspeed uses as master address. Raise ClusterError if there is none."""
    try:
        result = subprocess.run(
            ["hostname", "-I"], capture_output=True, text=True, timeout=_HOSTNAME_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError("`hostname -I`, deepspeed's source of the master address, fails there") from error
    addresses = result.stdout.split()
    if not addresses:
        raise ClusterError("`hostname -I`, deepspeed's source of the master address, prints no address there")
    return addresses[0]


def _machine() -> str:
    """Return a machine identifier that does not depend on the host name, if the system has one."""
    try:
        return _MACHINE_ID_FILE.read_text().strip()
    except OSError:
        return socket.gethostname()


def _read_requests() -> Iterator[dict[str, Any]]:
    """Yield orders one by one; exit the process at once when standard input ends."""
    waiting: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            waiting.put(json.loads(line))
        # The main thread may be stuck in a library that no exception reaches.
        os._exit(0)

    threading.Thread(target=read, name="orders", daemon=True).start()
    while True:
        yield waiting.get()


def _own_output() -> TextIO:
    """Redirect all output, including libraries', to standard error; return a stream for the original output."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def main() -> None:
    """Answer orders until standard input ends."""
    output, worker = _own_output(), DoctorWorker()
    # The checks need no cores for their tiny tensors; leave them to other local workers.
    torch.set_num_threads(1)
    for request in _read_requests():
        output.write(f"{MARK}{json.dumps(worker.handle(request))}\n")
        output.flush()


if __name__ == "__main__":
    main()
