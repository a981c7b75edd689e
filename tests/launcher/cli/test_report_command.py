"""``report``."""

from __future__ import annotations

import csv
from contextlib import closing

from tests.launcher.cli.calls import call


def test_report_prints_where(capsys, tmp_path):
    from launcher.metrics.metrics_writer import MetricsWriter

    (tmp_path / "config.toml").write_text("[train]\nsteps = 4\n")
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write({"kind": "train", "step": 1, "loss": 8.0, "lr": 1e-3, "grad_norm": 1.0, "tokens": 64})
    code, out, _ = call(capsys, "report", tmp_path)
    assert (code, out) == (0, f"{tmp_path / 'report.html'}\n")
    assert (tmp_path / "report.html").stat().st_size > 1000


def write_evaluation(folder, means: dict[int, float]) -> None:
    """An evaluation of needles at two depths: so large a share of the samples of each length is right."""
    from launcher.report.evaluation.evaluation_folder import RESULTS_FILE, SETTINGS_FILE, encode_row
    from longctx.evaluation import ScoreRow

    folder.mkdir(parents=True)
    (folder / SETTINGS_FILE).write_text('{"model": "tiny", "date": "2026-11-01", "depths": [0.0, 1.0]}')
    lines = []
    for length, mean in means.items():
        for index in range(8):
            score = float(index // 2 < 4 * mean)
            row = ScoreRow(
                task="niah", length=length, index=index, depth=float(index % 2), score=score, prompt_tokens=length,
                answers=("x",), output="y",
            )  # fmt: skip
            lines.append(encode_row(row))
    (folder / RESULTS_FILE).write_text("".join(lines))


def test_evaluations_stand_side_by_side(capsys, tmp_path):
    write_evaluation(tmp_path / "a/plain", {256: 1.0, 512: 0.25})
    write_evaluation(tmp_path / "b/plain", {256: 1.0, 512: 0.75, 1024: 0.5})
    page = tmp_path / "out/needles.html"
    code, out, _ = call(capsys, "report", tmp_path / "a/plain", tmp_path / "b/plain", "--output", page)
    assert (code, out) == (0, f"{page}\n")
    text = page.read_text()
    assert "a/plain · b/plain" in text
    rows = list(csv.DictReader((tmp_path / "out/needles_niah.csv").read_text().splitlines()))
    means = {(row["evaluation"], row["length"], row["depth"]): float(row["mean"]) for row in rows}
    assert means["a/plain", "512", "1.0"] == 0.25
    assert means["b/plain", "1024", "0.0"] == 0.5
    assert ("a/plain", "1024", "0.0") not in means
    svg = (tmp_path / "out/needles_niah.svg").read_text()
    # Both panels have the same columns; the one without samples at a length leaves it blank.
    assert svg.count(">1,024<") == 2
    for said in ("a/plain: tiny, 2026-11-01, n = 16 samples", "b/plain: tiny, 2026-11-01, n = 24 samples"):
        assert said in svg


def test_a_page_in_a_folder_has_its_plots_there(capsys, tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("a", "b"):
        write_evaluation(tmp_path / name, {256: 1.0})
    assert call(capsys, "report", tmp_path / "a", tmp_path / "b", "--output", tmp_path / "out")[0] == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "comparison.html", "comparison_niah.svg", "comparison_niah.csv"
    }  # fmt: skip
    assert not list(tmp_path.glob("*.svg"))
