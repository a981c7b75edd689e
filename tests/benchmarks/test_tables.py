"""Tables are made of results, and the pages of docs/ are in step with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.machine import KINDS, RESULTS
from benchmarks.tables import DOCS, GPU_TABLES, TABLES, caption, main, markdown, rewritten, section

PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_are_in_step_with_the_results(page: Path):
    text = page.read_text()
    assert rewritten(text) == text, "run python -m benchmarks.tables"


def test_every_table_stands_in_a_page():
    text = "".join(page.read_text() for page in PAGES)
    missing = [name for name in (*TABLES, *GPU_TABLES) if f"<!-- table: {name} -->" not in text]
    assert missing == []


@pytest.mark.parametrize("name", list(TABLES))
def test_a_table_has_a_part_for_each_kind_that_was_measured(name):
    benchmark = TABLES[name][0]
    measured = [kind for kind in KINDS if (RESULTS / kind / f"{benchmark}.json").exists()]
    text = section(name)
    assert text.count(f"`python -m benchmarks.{benchmark}`") == len(measured) > 0
    widths = {line.count("|") for part in text.split("\n\n")[1::2] for line in part.splitlines()}
    assert all(width > 2 for width in widths)


def test_only_what_is_marked_is_replaced(tmp_path):
    (tmp_path / "plain").mkdir()
    machine = {"processor": "Intel(R) Xeon(R) Processor @ 2.50GHz", "cores": 2, "torch": "2", "date": "2026-11-21"}
    row = {"way": "longctx, chunked", "cpu_seconds": 2, "ratio_to_fastest_whole": 0.5, "resident_rise_mb": 7}
    row["relative_error"] = {"loss": 1e-8, "dhidden": 1.66e-3, "dweight": 1.2e-3}
    (tmp_path / "plain" / "loss.json").write_text(json.dumps({"machine": machine, "rows": [row]}))
    page = "before\n<!-- table: loss -->\nold\n<!-- end -->\nafter <!-- end -->\n"
    new = rewritten(page, tmp_path)
    assert new.startswith("before\n<!-- table: loss -->\n\n`python -m benchmarks.loss`, Intel Xeon 2.5 GHz, 2 cores, ")
    assert "| chunked | 2.0 | 0.50 | 7 | 1.0e-8 | 1.7e-3 | 1.2e-3 |" in new
    assert new.endswith("|\n\n<!-- end -->\nafter <!-- end -->\n")
    assert "old" not in new
    assert rewritten(new, tmp_path) == new


def test_an_unknown_table_is_an_error():
    with pytest.raises(KeyError):
        rewritten("<!-- table: lost -->\n<!-- end -->")


def test_captions_name_command_machine_and_day():
    machine = {"processor": "AMD EPYC 9B14", "cores": 2, "torch": "2.13.0+cpu", "date": "2026-11-22"}
    text = caption("decoder", "bf16", machine)
    assert text == (
        "`python -m benchmarks.decoder`, AMD EPYC 9B14, 2 cores, bfloat16 instructions, torch 2.13.0+cpu,\n2026-11-22:"
    )


def test_markdown():
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_check_writes_nothing(monkeypatch, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- table: loss -->\n<!-- end -->\n")
    monkeypatch.setattr("benchmarks.tables.DOCS", tmp_path)
    assert main(["--check"]) == 1
    assert page.read_text() == "<!-- table: loss -->\n<!-- end -->\n"
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert "page.md" in capsys.readouterr().out
