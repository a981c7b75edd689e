"""``report``."""

from __future__ import annotations

from tests.launcher.cli.calls import call


def test_report_prints_where(capsys, tmp_path):
    from launcher.metrics.writer import MetricsWriter

    (tmp_path / "config.toml").write_text("[train]\nsteps = 4\n")
    with MetricsWriter(tmp_path) as writer:
        writer.write({"kind": "train", "step": 1, "loss": 8.0, "lr": 1e-3, "grad_norm": 1.0, "tokens": 64})
    code, out, _ = call(capsys, "report", tmp_path)
    assert (code, out) == (0, f"{tmp_path / 'report.html'}\n")
    assert (tmp_path / "report.html").stat().st_size > 1000
