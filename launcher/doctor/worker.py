"""The process that doctor starts on every host: ``python -m launcher.doctor.worker``.

Orders come on standard input, one JSON object a line; each is answered by one line on standard output that begins with
``MARK``. The end of standard input ends the process, whatever it waits for: whoever asked is gone.
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

from launcher.doctor.finding import first_line
from launcher.doctor.machine import Options, examine
from launcher.doctor.network.interfaces import gloo_choice, read_adapters, read_interfaces
from launcher.doctor.network.nccl import call_nccl, would_take
from launcher.doctor.network.ports import Listener, try_ports
from launcher.doctor.session import MARK
from longctx.errors import ClusterError, LongCtxError
from parallel.runtime.interface import INTERFACE_VARIABLE

_HOSTNAME_SECONDS = 5.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_READ_BY_LIBRARIES = ("GLOO_", "NCCL_", "UCX_")


class Worker:
    """One host's part, order by order."""

    def __init__(self) -> None:
        """Open nothing yet."""
        # Ports that others try stay open until the process ends.
        self._meeting_place: Listener | None = None
        self._listener: Listener | None = None
        self._orders: dict[str, Callable[[dict[str, Any]], Any]] = {
            "examine": self._examine,
            "lead": self._lead,
            "listen": self._listen,
            "connect": lambda order: try_ports(order["targets"], order["word"]),
            "nccl": self._nccl,
        }

    def obey(self, order: dict[str, Any]) -> Any:
        """Return the answer to an order; ``problem`` in it says on one line why there is none."""
        # One phase that fails is an answer; the next order may succeed.
        try:
            return self._orders[order.pop("do")](order)
        except (LongCtxError, OSError, RuntimeError) as error:
            return {"problem": first_line(error)}

    def _examine(self, order: dict[str, Any]) -> dict[str, Any]:
        return asdict(examine(Options(**{**order, "folder": Path(order["folder"])})))

    def _lead(self, order: dict[str, Any]) -> tuple[str, int]:
        """Listen where the ranks of a run would meet: at this host, which is the first one."""
        address = "127.0.0.1"
        if order["over_ssh"]:
            address = _first_own_address()
        # All interfaces, as PyTorch's store.
        try:
            self._meeting_place = Listener("", order["port"], order["word"])
        except OSError:
            # What is wrong with the port is a finding of its own; hosts can try another one all the same.
            self._meeting_place = Listener("", 0, order["word"])
        return address, self._meeting_place.port

    def _listen(self, order: dict[str, Any]) -> dict[str, Any]:
        """Listen where gloo would, and tell of this machine's network."""
        interfaces, adapters = read_interfaces(), read_adapters()
        environment = {key: text for key, text in os.environ.items() if key.startswith(_READ_BY_LIBRARIES)}
        name, address = gloo_choice(order["master"], interfaces)
        # gloo reads it when it first connects.
        os.environ.setdefault(INTERFACE_VARIABLE, name)
        self._listener = Listener(address, 0, order["word"])
        return {
            "interface": name,
            "address": address,
            "port": self._listener.port,
            "interfaces": [asdict(interface) for interface in interfaces],
            "adapters": [asdict(adapter) for adapter in adapters],
            "nccl": asdict(would_take(interfaces, adapters)),
            "environment": environment,
            "num_gpus": torch.cuda.device_count(),
            "machine": _machine(),
        }

    def _nccl(self, order: dict[str, Any]) -> dict[str, Any]:
        """Start NCCL, together with the other ranks if there are any, and ask it for its network."""
        if order["rank"] == 0 and self._listener is not None:
            # The store takes its port, which all others have reached.
            self._listener.close()
        return call_nccl(**order)


def _first_own_address() -> str:
    """The address of this machine at which deepspeed has the ranks of other machines meet. ClusterError without one."""
    try:
        said = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=_HOSTNAME_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError("`hostname -I`, which deepspeed asks for the master address, fails there") from error
    addresses = said.stdout.split()
    if not addresses:
        raise ClusterError("`hostname -I`, which deepspeed asks for the master address, names none there")
    return addresses[0]


def _machine() -> str:
    """What two names of one machine have in common, and two machines have not."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def _orders() -> Iterator[dict[str, Any]]:
    """The orders, one after another; the end of standard input ends the process at once."""
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
    """Standard output, which from here on is this stream alone: what libraries print goes to standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def main() -> None:
    """Answer orders until there are no more."""
    output, worker = _own_output(), Worker()
    # Sums of ranks need no cores, which the ranks of other workers on this machine use.
    torch.set_num_threads(1)
    for order in _orders():
        output.write(f"{MARK}{json.dumps(worker.obey(order))}\n")
        output.flush()


if __name__ == "__main__":
    main()
