"""Whether one machine reaches a TCP port of another: a listener that says a word, and a client that expects it."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

SECONDS = 3.0
"""For connecting and hearing the word. A local network needs milliseconds; a firewall that drops answers never."""
_MOST_AT_ONCE = 64
_WORD_BYTES = 32


class Listener:
    """Answers everyone who connects with a word, in a thread."""

    def __init__(self, address: str, port: int, word: str) -> None:
        """Listen at ``port`` (0: one that is free) of an address of this machine ("": all). OSError where it cannot."""
        self._word = word.encode()
        # As PyTorch's store does: a connection of an ended run that lingers is no obstacle.
        self._socket = socket.create_server((address, port), family=_family(address), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        """Where it listens."""
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more; the port is free afterwards."""
        # It wakes the thread, which closing alone would not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(SECONDS)
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), connection:
                connection.settimeout(SECONDS)
                connection.sendall(self._word)


def new_word() -> str:
    """A word that nothing else at a port says."""
    return secrets.token_hex(_WORD_BYTES // 2)


def try_ports(targets: Sequence[tuple[str, int]], word: str) -> list[str]:
    """For each address and port what is wrong; "" where it answers with the word. All are tried at the same time."""
    if not targets:
        return []
    with ThreadPoolExecutor(max_workers=min(_MOST_AT_ONCE, len(targets))) as pool:
        return list(pool.map(lambda target: try_port(target[0], target[1], word), targets))


def try_port(address: str, port: int, word: str, *, seconds: float = SECONDS) -> str:
    """What is wrong with a port of another machine, on one line; "" where it answers with the word."""
    deadline = time.monotonic() + seconds
    try:
        connection = socket.create_connection((address, port), timeout=seconds)
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except ConnectionRefusedError:
        return "connection refused"
    except OSError as error:
        return f"{error.strerror or error}".lower()
    with connection:
        said = _hear(connection, deadline)
    if said == word.encode():
        return ""
    if said:
        return "another program answers"
    return f"connected, and no word within {seconds:g} s"


def _hear(connection: socket.socket, deadline: float) -> bytes:
    """What the other side says, at most a word."""
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < _WORD_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            data = connection.recv(_WORD_BYTES - len(said))
            if not data:
                break
            said += data
    return said


def _family(address: str) -> socket.AddressFamily:
    if ":" in address:
        return socket.AF_INET6
    return socket.AF_INET
