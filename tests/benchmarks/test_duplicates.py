from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import duplicates


def test_both_lines_are_of_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_text("some words " * 100)
    duplicates.main(["--source", str(tmp_path / "a.txt"), "--documents", "3000"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("pass: 1 documents, 0.0 MB in ")
    # A tenth of every part but the first, of which the longest of each group stays.
    assert second.startswith("decision: 3,000 documents in ")
    assert " 270 removed, " in second
