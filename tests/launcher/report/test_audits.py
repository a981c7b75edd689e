"""The report's part on wrong numbers: whoever reads the page learns which machine to test."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from launcher.metrics.record import DISCARDED_FILE
from launcher.report.report_run import load_run
from tests.launcher.report.test_report import dense, make_run, page_of, section_of

NAMED = {
    "ranks": [3],
    "hosts": ["node-2"],
    "rank_of_call": 3,
    "what": "a matmul in the backward pass (aten::mm) of model.layers.7.mlp.down_proj.weight",
    "values": 1,
    "of_values": 131072,
    "bits": [27],
    "evidence": "Ranks 0 and 1 recomputed it, and so did rank 3.",
}
OPEN = {**NAMED, "ranks": [1, 0], "hosts": ["node-1", "node-0"], "bits": [3, 9], "evidence": "Two can only disagree."}
REPLICA = {"ranks": [2], "hosts": ["<node>"], "what": "model.norm.weight (exp_avg)"}
"""Of a comparison of replicas, which counts no values."""


def event(step: int, *findings: dict[str, Any]) -> dict[str, Any]:
    """As ``launcher/training/hooks/audit.py`` writes it."""
    return {
        "kind": "event",
        "event": "audit",
        "step": step,
        "world_size": 4,
        "findings": list(findings),
        "time": "2025-01-01T00:00:10+00:00",
    }


def test_a_page_names_the_rank_at_its_head_and_in_a_table(tmp_path: Path):
    page = page_of(make_run(tmp_path / "run", [dense(1), dense(2), event(3, NAMED, OPEN)]))
    said = "A wrong number was found in step 3: rank 3 on node-2, and 1 more finding. See Wrong numbers, below."
    assert said in page
    assert page.index(said) < page.index("<section>")
    assert re.findall(r"<h2>(.*?)</h2>", page)[0] == "Wrong numbers"
    part = section_of(page, "Wrong numbers")
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", part)[1:]]
    assert cells[0] == ["3", "rank 3 on node-2", NAMED["what"], "1 of 131,072, in bit 27", NAMED["evidence"]]
    assert cells[1][1:4:2] == ["one of the ranks 1 on node-1, 0 on node-0", "1 of 131,072, in bits 3, 9"]
    assert "wrong number" in section_of(page, "Loss"), "and the curve has a mark"


def test_a_resume_hides_nothing(tmp_path: Path):
    """It sets the event aside with the rows behind its checkpoint; killed in between, it does so twice."""
    folder = make_run(tmp_path / "run", [dense(1)])
    line = json.dumps(event(3, REPLICA))
    (folder / DISCARDED_FILE).write_text(f'{line}\n{line}\n{{"kind": "train", "step": 3}}\n{line[:50]}')
    assert load_run(folder).audits == [event(3, REPLICA)]
    page = page_of(folder)
    assert "A wrong number was found in step 3: rank 2 on &lt;node&gt;. See" in page
    assert "<td>–</td>" in section_of(page, "Wrong numbers")
