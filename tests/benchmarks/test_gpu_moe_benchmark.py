"""The benchmarks of expert layers: their own arithmetic, and the whole of the GPU's on the CPU at tiny sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_moe as benchmark
from benchmarks.moe import least_bytes
from benchmarks.moe_layers import Case, Shape, even_choices, zipf_choices


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


def test_models_are_the_published_ones():
    """Weights of one layer's routed experts, and the FFN channels that a token passes, from the models' papers."""
    sizes = {
        m.name: (m.config.num_experts * 3 * m.config.hidden_size * m.config.expert_ffn_size) for m in benchmark.MODELS
    }
    assert sizes == {"Mixtral-8x7B": 1_409_286_144, "Qwen3-30B-A3B": 603_979_776, "DeepSeek-V3": 11_274_289_152}
    assert [m.active_width for m in benchmark.MODELS] == [28_672, 6144, 18_432]


def test_rates():
    model = replace(benchmark.MODELS[0], config=replace(benchmark.MIXTRAL, hidden_size=1000, expert_ffn_size=500))
    work = 6.0 * 2000 * 1000 * 1000
    assert model.flops(2000) == work
    measured = benchmark.Measured(forward_s=2.0, backward_s=6.0, peak_gib=None, load=1.5)
    row = benchmark.rates(model, 2000, measured, (1.0, 3.0))
    assert row["forward_tflops"] == pytest.approx(work / 2e12)
    assert row["backward_tflops"] == pytest.approx(2 * work / 6e12)
    assert row["dense_backward"] == pytest.approx(2 * work / 3e12)
    assert row["share"] == pytest.approx(0.5)
    nothing = benchmark.rates(model, 2000, None, (1.0, 3.0))
    assert nothing["share"] is None
    assert nothing["dense_forward"] == pytest.approx(work / 1e12)
    assert nothing.keys() == row.keys()


def test_goals_are_missed_by_a_models_best_row():
    rows = [{"model": "a", "share": s, "goal": 0.85} for s in (None, 0.5, 0.9)]
    rows += [{"model": "b", "share": 0.6, "goal": 0.65}, {"model": "c", "share": None, "goal": 0.65}]
    result = {"layers": rows, "errors": [{"model": "a", "unchosen": 0.0}]}
    assert [text.split(":")[0] for text in benchmark.behind(result)] == ["b", "c"]
    assert len(benchmark.behind({**result, "errors": [{"model": "a", "unchosen": float("nan")}]})) == 3


def test_what_does_not_fit_is_none():
    def run():
        raise torch.OutOfMemoryError("no")

    assert benchmark.fitting(run) is None
    assert benchmark.fitting(lambda: 3) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys):
    assert benchmark.main([]) == 1
    assert capsys.readouterr().err.startswith("No CUDA device")
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "cpu"])


# --- what the CPU's benchmark counts -------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "experts", "k"), [(48, 16, 2), (64, 64, 8), (12, 4, 4)])
def test_even_choices_are_even_and_different(tokens, experts, k):
    chosen_Nk = even_choices(tokens, experts, k)
    assert chosen_Nk.shape == (tokens, k)
    assert chosen_Nk.flatten().bincount(minlength=experts).tolist() == [tokens * k // experts] * experts
    assert all(len(set(row)) == k for row in chosen_Nk.tolist())


def test_zipf_choices_fall_off_and_are_different():
    chosen_Nk = zipf_choices(20_000, 16, 1)
    load = chosen_Nk.flatten().bincount(minlength=16).sort(descending=True).values / 20_000
    harmonic = sum(1 / n for n in range(1, 17))
    want = torch.tensor([1 / n / harmonic for n in range(1, 17)])
    torch.testing.assert_close(load, want, atol=0.02, rtol=0)
    assert all(len(set(row)) == 8 for row in zipf_choices(50, 16, 8).tolist())


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_tokens_choose_the_experts_they_are_meant_to(skewed, dtype):
    case = Case(Shape(8, 3, 16, "mixtral", hidden_size=32), 100, dtype, skewed)
    x_NM, _ = case.inputs()
    logits_NE = x_NM @ case.weights()["router"].T  # rounded to the model's dtype, as some libraries do
    assert logits_NE.topk(3).indices.sort(1).values.tolist() == case.chosen().sort(1).values.tolist()


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
