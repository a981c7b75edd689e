"""docs/commands.md has a table of options for every verb; that it is in step, tests/benchmarks/test_tables.py says."""

from __future__ import annotations

from launcher.cli.verbs import VERBS
from tests.helpers import REPOSITORY


def test_every_verb_has_its_options():
    text = (REPOSITORY / "docs" / "commands.md").read_text()
    assert [verb for verb in VERBS if f"<!-- options: {verb} -->" not in text] == []
