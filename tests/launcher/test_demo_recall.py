"""``make demo-recall``: a model learns over two ranks to find needles, and every picture of it is there."""

from __future__ import annotations

import csv
import os
import subprocess
from pathlib import Path
from statistics import fmean

import pytest

from tests.helpers import REPOSITORY


def grid(evaluation: Path) -> dict[int, float]:
    """The mean score of each length."""
    cells: dict[int, list[float]] = {}
    for row in csv.DictReader((evaluation / "depth_niah_word.csv").read_text().splitlines()):
        cells.setdefault(int(row["length"]), []).append(float(row["mean"]))
    return {length: fmean(means) for length, means in cells.items()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_learns_to_find_needles_across_ranks(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    command = ["bash", str(REPOSITORY / "launcher/demo_recall.sh"), str(tmp_path / "recall")]
    with (tmp_path / "log").open("w") as log:
        ended = subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=1700, check=False
        )
    assert ended.returncode == 0, (tmp_path / "log").read_text()[-4000:]
    model = tmp_path / "recall/3-long"
    for name in ("needles-1-rank", "needles-2-ranks"):
        scores = grid(model / name)
        assert max(scores) >= 1024
        assert fmean(scores.values()) >= 0.95
    plain, yarn = grid(model / "twice-without-scaling"), grid(model / "twice-with-yarn")
    assert yarn[2048] - plain[2048] >= 0.25
    for picture in ("twice_niah_word.svg", "needles-2-ranks/depth_niah_word.svg", "report.html"):
        assert (model / picture).stat().st_size > 10_000
