"""RULER's table of an evaluation: percentages, the average over its tasks, and the picture of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.evaluation.evaluation_store import EvaluationStore
from launcher.report.evaluation.evaluation_folder import load_evaluation
from launcher.report.evaluation.evaluation_plots import plot_needle_scores
from launcher.report.evaluation.evaluation_tables import ruler_rows
from longctx.evaluation import ScoreRow

SCORES = {
    ("ruler_vt", 4096): (1.0, 0.8, 0.2),
    ("ruler_vt", 8192): (0.5, 0.0, 0.1),
    ("ruler_fwe", 4096): (1.0, 1.0, 1.0),
    ("passkey", 4096): (0.0,),
}


def needle_rows(lengths: int) -> list[dict]:
    return [{"length": 64 << n, "depth": depth, "mean": 1.0, "n": 22} for n in range(lengths) for depth in (0.0, 1.0)]


@pytest.mark.parametrize("name", ["3-long", "0-1", "long"])
def test_ids_of_a_picture_carry_a_name_that_may_begin_with_a_digit(name):
    """The folder of a run may be called 3-long; the 3 was read as part of the number of a group."""
    picture = plot_needle_scores([("", needle_rows(2))], "caption", name)
    ids = set(re.findall(r'\bid="([^"]+)"', picture))
    assert all(found.startswith(f"{name}-") for found in ids)
    assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', picture)) <= ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An evaluation of two of RULER's tasks, one of which was not measured at one length."""
    store = EvaluationStore(tmp_path, {"model": "tiny", "date": "2026-01-02", "depths": []}, {})
    for (task, length), scores in SCORES.items():
        for index, score in enumerate(scores):
            row = ScoreRow(
                task=task, length=length, depth=None, index=index, score=score, prompt_tokens=9, answers=(), output=""
            )
            store.add([row])
    return tmp_path


def test_scores_are_per_cent_and_an_average_is_over_the_same_tasks(folder):
    assert ruler_rows(load_evaluation(folder)) == [
        {"task": "ruler_vt", "4096": 66.67, "8192": 20.0},
        {"task": "ruler_fwe", "4096": 100.0, "8192": None},
        {"task": "average of 2 of 13 tasks", "4096": 83.33, "8192": None},
    ]
