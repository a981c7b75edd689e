"""What a terminal would act on is spelt, and is as it is everywhere else."""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator

import pytest

from longctx.untrusted.terminal import escape_control_characters, for_terminal
from tests.helpers import REPOSITORY

TITLE = "\x1b]0;owned\x07"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        (TITLE, "\\x1b]0;owned\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb\bc\x7f", "a\\rb\\x08c\\x7f"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("a\nb\tc é 漢 \U0001f600 \u200f", "a\nb\tc é 漢 \U0001f600 \u200f"),
    ],
)
def test_on_a_terminal(text, wanted):
    assert for_terminal(text, Terminal()) == wanted
    assert escape_control_characters(text) == wanted


def test_elsewhere_it_is_raw():
    assert for_terminal(TITLE, io.StringIO()) == TITLE


def test_all_that_is_printed_goes_through_it():
    """Whoever writes to the terminal itself spells what it writes, in that very call."""
    # Ours is spelt a line above, with what shows the cursor again; and a pipe that this process alone reads.
    known = {"parallel/runtime/watch/last_message.py", "longctx/chat/template_worker.py"}
    strange = []
    for package in ("data_pipeline", "launcher", "longctx", "parallel"):
        for path in (REPOSITORY / package).rglob("*.py"):
            name = path.relative_to(REPOSITORY).as_posix()
            if name not in known:
                strange += [f"{name}:{line}" for line in _raw_writes(ast.parse(path.read_text()))]
    assert not strange


def _raw_writes(tree: ast.Module) -> Iterator[int]:
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        writes = ast.unparse(call.func) in ("sys.stdout.write", "sys.stderr.write")
        if writes and not ast.unparse(call.args[0]).startswith(("for_terminal(", "escape_control_characters(")):
            yield call.lineno
