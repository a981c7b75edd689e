"""The GPU benchmark's own arithmetic, and the whole of it on the CPU's kernels at tiny sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_attention as benchmark
from longctx.kernels.attention.kernel_selection import KERNELS


def test_everything_once_on_the_cpu(tmp_path, capsys):
    path = tmp_path / "result.json"
    assert benchmark.main(["--device", "cpu", "--tiny", "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    assert {"card", "blocks", "rings", "errors", "thresholds", "machine"} <= result.keys()
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


@pytest.fixture
def one_thread():
    """Thousands of calls of microseconds each: threads of a busy machine would wait for one another in all of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kernel", ["cpu_flash", pytest.param("blockwise", marks=pytest.mark.slow)])
def test_a_ring_on_one_device_is_float64s(kernel):
    """Every degree from 2 to 8, layout and packing, grouped keys: values, and gradients added at the keys' owners."""
    setting = replace(benchmark.tiny_setting("cpu"), dtype=torch.float32)
    # Whole chunks of every layout: zigzag has two for each rank.
    sizes = {240: (2, 3, 4, 5, 6, 8), 112: (7,)}
    rows = []
    for tokens, degrees in sizes.items():
        small = replace(setting, ring_tokens=tokens, degrees=degrees)
        rows += benchmark.compare_rings(small, KERNELS[kernel])
    assert len(rows) == 7 * 4 * 2
    # Sums of up to 240 terms in float32, folded eight times: 1e-6. A hop that is missing is off by 0.1 and more.
    assert [row for row in rows if not row["worst"] < 1e-5] == []
