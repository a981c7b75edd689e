"""What a terminal would act on is spelt, and is as it is everywhere else."""

from __future__ import annotations

import io

import pytest

from longctx.untrusted.terminal import for_terminal, spelled

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
    assert spelled(text) == wanted


def test_elsewhere_it_is_raw():
    assert for_terminal(TITLE, io.StringIO()) == TITLE
