"""Tables are made of results, and the pages of docs/ are in step with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tables import DOCS, GPU_TABLES, TABLES, main, rewritten

PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_are_in_step_with_the_results(page: Path):
    text = page.read_text()
    assert rewritten(text) == text, "run python -m benchmarks.tables"


def test_every_table_stands_in_a_page():
    text = "".join(page.read_text() for page in PAGES)
    missing = [name for name in (*TABLES, *GPU_TABLES) if f"<!-- table: {name} -->" not in text]
    assert missing == []


def test_check_writes_nothing(monkeypatch, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- table: loss -->\n<!-- end -->\n")
    monkeypatch.setattr("benchmarks.tables.DOCS", tmp_path)
    assert main(["--check"]) == 1
    assert page.read_text() == "<!-- table: loss -->\n<!-- end -->\n"
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert "page.md" in capsys.readouterr().out
