"""The benchmarks of expert layers: their own arithmetic, and the whole of the GPU's on the CPU at tiny sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_moe as benchmark
from benchmarks.moe import least_bytes
from benchmarks.moe_layers import Case, Shape


@pytest.mark.slow
def test_everything_once_on_the_cpu(tmp_path, capsys):
    path = tmp_path / "result.json"
    assert benchmark.main(["--device", "cpu", "--tiny", "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    assert {"card", "layers", "parts", "errors", "machine", "tiny"} <= result.keys()
    names = {"Mixtral-8x7B", "Qwen3-30B-A3B", "DeepSeek-V3"}
    assert {(row["model"], row["tokens"]) for row in result["layers"]} == {(n, t) for n in names for t in (64, 96)}
    assert all(row["share"] > 0 and row["load"] >= 1 for row in result["layers"])
    assert {row["model"] for row in result["parts"]} == names
    for row in result["errors"]:
        assert row["unchosen"] == 0
        assert all(row[name] < 2e-2 for name in ("out", "dx", "dgates", "dgate_up", "ddown"))
    printed = capsys.readouterr().out
    assert "no measurement" in printed


def test_the_loop_is_the_layer_in_float64():
    setting = replace(benchmark.tiny_setting("cpu"), dtype=torch.float64)
    torch.manual_seed(0)
    for model in setting.models:
        row = benchmark.measure_errors(setting, model, tokens=33)
        assert all(row[name] < 1e-12 for name in ("out", "dx", "dgates", "dgate_up", "ddown")), row


# --- what the CPU's benchmark counts -------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 4])
def test_least_bytes(degree):
    """Counted one token at a time."""
    case = Case(Shape(8, 3, 16, "mixtral", hidden_size=32), 24, "bf16", skewed=True)
    visits = rows = 0
    for token, experts in enumerate(case.chosen().tolist()):
        home = token // (24 // degree)
        away = [expert // (8 // degree) for expert in experts if expert // (8 // degree) != home]
        visits, rows = visits + len(set(away)), rows + len(away)
    assert least_bytes(case, degree) == (4 * 32 * 2 * visits, 4 * 32 * 2 * rows)
    assert 0 < visits < rows
