"""Refusals that cost little: what a stranger's file may take of time, memory and screen before it is refused."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longctx.errors import LongCtxError

MOST_SECONDS, MOST_MIB = 5.0, 200.0
SCREEN_LINES, SCREEN_CHARACTERS = 25, 2500
ODD_FILES = ("pipe", "folder", "itself", "ten gigabytes")
"""What may stand where a small file is expected."""
HOSTILE_JSON: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "cannot be read"),
    "no UTF-8": (b'{"format": "\xff"}', "cannot be read"),
    "UTF-16": ('{"format": 1}'.encode("utf-16"), "cannot be read"),
    "a mark of byte order": (b'\xef\xbb\xbf{"format": 1}', "cannot be read"),
    "lists in lists": (b"[" * 500_000 + b"]" * 500_000, "cannot be read"),
    "objects in objects": (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "cannot be read"),
    "100 levels": (b'{"format": ' + b"[" * 100 + b"]" * 100 + b"}", "more than 64 deep"),
    "a key twice": (b'{"format": "longctx-checkpoint", "format": "other"}', "has the key 'format' twice"),
    "millions of lists": (b"[" + b"[]," * 5_000_000 + b"[]]", "values; the limit is"),
    "NaN": (b'{"format": NaN}', "NaN, which is not a JSON number"),
    "Infinity": (b'{"format": [-Infinity]}', "Infinity, which is not a JSON number"),
    "a float beyond floats": (b'{"format": 1e999}', "beyond a float's range"),
    "a number of 4,000 digits": (b'{"format": ' + b"9" * 4000 + b"}", "an integer with 4,000 digits"),
    "a number of a megabyte": (b'{"format": ' + b"9" * 2**20 + b"}", "cannot be read"),
    "half a character": (b'{"format": "\\ud800"}', "an unpaired surrogate"),
}
"""What is no strict JSON, and what is said of it."""


def refusal(action: Callable[[], object]) -> str:
    """The message of the error of ours that ``action`` ends in: a screen, within the bounds of time and memory."""
    with within_bounds(), pytest.raises(LongCtxError) as caught:
        action()
    message = str(caught.value)
    check_screen(message)
    return message


@contextlib.contextmanager
def within_bounds() -> Iterator[None]:
    """AssertionError where the block takes more time or memory than a stranger's file may."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, started = _status_mib("VmRSS"), _processor_seconds()
    yield
    seconds, mib = _processor_seconds() - started, _status_mib("VmHWM") - before
    assert seconds < MOST_SECONDS, f"{seconds:.1f} processor seconds"
    assert mib < MOST_MIB, f"{mib:.0f} MiB"


def check_screen(message: str) -> None:
    """AssertionError unless a message is a screen of printable text."""
    assert len(message) <= SCREEN_CHARACTERS, message[:SCREEN_CHARACTERS]
    assert len(message.splitlines()) <= SCREEN_LINES
    assert message.replace("\n", "").isprintable(), repr(message)
    assert "Traceback" not in message


def zstd_bomb(num_bytes: int) -> bytes:
    """A frame of zstd that becomes so many letters, 128 KiB from each 4 bytes of it."""
    block, last = 2**17, (0 << 3 | 1).to_bytes(3, "little")
    # No size of the content, and a window of 128 KiB; blocks that repeat one byte.
    head = (0xFD2FB528).to_bytes(4, "little") + bytes([0x00, 7 << 3])
    return head + ((block << 3 | 1 << 1).to_bytes(3, "little") + b"a") * (num_bytes // block) + last


def put_odd_file(path: Path, kind: str) -> None:
    """Put one of ``ODD_FILES`` in the place of a file, if there is one."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "itself":
        path.symlink_to(path.name)
    else:
        put_sparse_file(path, 10 * 2**30)


def put_sparse_file(path: Path, size: int) -> None:
    """A file of so many bytes that takes no room."""
    with path.open("wb") as file:
        file.truncate(size)


def _processor_seconds() -> float:
    """What this process and those that it has ended took: a machine that others load changes nothing."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def _status_mib(name: str) -> float:
    """A size in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024
