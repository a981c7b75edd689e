"""TCP port test between machines: a listener sends a word, and a client expects it."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

SECONDS = 3.0
"""Limit for connecting and receiving the word. A local network takes milliseconds; a firewall that drops packets never
answers."""
_MOST_AT_ONCE = 64
_WORD_BYTES = 32


class Listener:
    """Server thread that sends a word on every connection."""

    def __init__(self, address: str, port: int, word: str) -> None:
        """Listen at ``port`` (0: any free one) on a local ``address`` ("": all). Raise OSError on failure."""
        self._word = word.encode()
        # SO_REUSEADDR, as in PyTorch's store: lingering connections from a finished run do not block the port.
        self._socket = socket.create_server((address, port), family=_family(address), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        """Port it listens at."""
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and free the port."""
        # shutdown wakes the thread blocked in accept; close alone would not.
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
    """Return a random word that no other program sends."""
    return secrets.token_hex(_WORD_BYTES // 2)


def try_ports(targets: Sequence[tuple[str, int]], word: str) -> list[str]:
    """Test all ports concurrently; return each one's problem, "" if it sends the word."""
    if not targets:
        return []
    with ThreadPoolExecutor(max_workers=min(_MOST_AT_ONCE, len(targets))) as pool:
        return list(pool.map(lambda target: try_port(target[0], target[1], word), targets))


def try_port(address: str, port: int, word: str, *, seconds: float = SECONDS) -> str:
    """Test another machine's port; return the problem on one line, or "" if it sends the word."""
    deadline = time.monotonic() + seconds
    # A connection alone proves little: a proxy, or a backlog without a server, accepts it too.
    try:
        connection = socket.create_connection((address, port), timeout=seconds)
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except ConnectionRefusedError:
        return "connection refused"
    except OSError as error:
        return f"{error.strerror or error}".lower()
    with connection:
        received = _receive(connection, deadline)
    if received == word.encode():
        return ""
    # If two machines share an address, or a port is forwarded, another program may listen.
    if received:
        return "another program answers"
    return f"connected, and no word within {seconds:g} s"


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """Receive until the deadline, at most one word's length."""
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < _WORD_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            data = connection.recv(_WORD_BYTES - len(received))
            if not data:
                break
            received += data
    return received


def _family(address: str) -> socket.AddressFamily:
    if ":" in address:
        return socket.AF_INET6
    return socket.AF_INET
