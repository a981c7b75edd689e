"""The GPU benchmark's own arithmetic, and the whole of it on the CPU's kernels at tiny sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from benchmarks import gpu_attention as benchmark


def test_everything_once_on_the_cpu(tmp_path, capsys):
    path = tmp_path / "result.json"
    assert benchmark.main(["--device", "cpu", "--tiny", "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    assert {"device", "blocks", "rings", "errors", "thresholds", "machine"} <= result.keys()
    kernels = {row["kernel"] for row in result["blocks"]}
    assert "cpu_flash" in kernels
    assert {row["kernel"] for row in result["errors"]} == kernels
    assert {(row["layout"], row["documents"]) for row in result["rings"]} == {
        (layout, documents) for layout in ("zigzag", "striped", "balanced") for documents in ("one document", "packed")
    }
    assert all(row["efficiency"] > 0 for row in result["rings"])
    assert all(row["dq"] < 2e-2 for row in result["errors"])
    printed = capsys.readouterr().out
    assert "assumed 45 GB/s" in printed
    assert "no measurement" in printed


def test_a_ring_on_one_device_is_exact():
    setting = replace(benchmark.tiny_setting("cpu"), dtype=torch.float32)
    _, kernel = next(iter(setting.kernels().items()))
    bounds = benchmark.packed_documents(512, 60)
    assert bounds[-1] == 512
    slices = benchmark.slice_table(benchmark.AttentionSlice(a, b, a, b, 0) for a, b in pairwise(bounds))
    q, k, v, dout = setting.tensors(512)
    out, lse = kernel.forward(q, k, v, slices, scores=setting.scores)
    dq = kernel.backward(dout, q, k, v, out, lse, slices, scores=setting.scores)[0]
    for kind in ("zigzag", "striped", "balanced"):
        layout = benchmark.SequenceLayout.build(kind, 512, 4, bounds)
        schedule = benchmark.Schedule.build(layout, bounds)
        work = [benchmark.RankWork(setting, kernel, schedule, r, [q, k, v, dout, out, lse]) for r in range(4)]
        torch.testing.assert_close(layout.join([w.forward()[0] for w in work], 1), out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layout.join([w.backward() for w in work], 1), dq, atol=1e-5, rtol=1e-5)


def test_ratios():
    found = benchmark.ratios([6.0, 12.0], [(3.0, 6.0), (3.0, 9.0)])
    assert found["forward_efficiency"] == 1.0
    assert found["backward_efficiency"] == pytest.approx(0.8)
    assert found["backward_slowest"] == pytest.approx(12 / 18)
    assert found["efficiency"] == pytest.approx(18 / 21)
    assert found["slowest"] == pytest.approx(18 / 24)


def test_thresholds_are_the_notes_figures():
    """500 TFLOP/s, 32/8 heads: 0.7K tokens a rank over 350 GB/s and 5.6K over 45 GB/s forward."""
    rows = [{"kernel": "flash", "mask": "full", "forward_tflops": 500.0, "backward_tflops": 500.0}]
    nvlink, infiniband = benchmark.thresholds(benchmark.full_setting(), rows)
    assert (nvlink["forward"], nvlink["backward_float32"]) == (714, 857)
    assert (infiniband["forward"], infiniband["backward_float32"], infiniband["backward_bfloat16"]) == (
        5556,
        6667,
        4444,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys):
    assert benchmark.main([]) == 1
    assert capsys.readouterr().err.startswith("No CUDA device")
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "cpu"])
