"""When gradients go in a bucket, and what that adds to the peak of a backward pass."""

from __future__ import annotations

import pytest
import torch

from launcher.config.load_config import load_run_config
from launcher.plan.zero_bytes import Reduction, reduction_bytes
from tests.launcher.runs import resolved

LAYERS = 4
SIZES = {"decoder.embedding": 100, **{f"decoder.layers.{n}.weight": 200 for n in range(LAYERS)}, "head": 100}


def reduction(bucket: int, stage: int = 2) -> Reduction:
    flags = ["--config", "quickstart", "--zero.stage", f"{stage}", "--zero.reduce_bucket_size", f"{bucket}"]
    shapes = {name: torch.Size([size]) for name, size in SIZES.items()}
    return reduction_bytes(resolved(load_run_config(flags)), shapes, set(), world_size=2, device="cpu")


@pytest.mark.few(6)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("bucket", "share"),
    [(50, 1.0), (100, 1.0), (299, 1.0), (300, 0.75), (700, 0.25), (899, 0.25), (900, 0.0), (1000, 0.0), (5000, 0.0)],
)
def test_the_first_bucket_goes_when_the_next_gradient_finds_no_room(bucket, share, stage):
    """Backward comes from the head: 100, then 200 a layer, then 100 of embeddings."""
    assert reduction(bucket, stage).kept_share == share


def test_a_bucket_that_goes_late_stands_beside_less():
    at_once, half_way, at_the_end = (
        Reduction(buckets=100, message=500, kept_share=share, after_backward=0) for share in (1.0, 0.5, 0.0)
    )
    assert at_once.added_peak(400, 50) == 600
    assert half_way.added_peak(400, 50) == 400, "half of what was kept has gone"
    assert at_the_end.added_peak(400, 50) == 150, "all of it, and what passed"
    assert at_the_end.added_peak(4000, 50) == 100, "the bucket itself is there from the start"
    assert at_the_end.added_peak(0, 0) == 600
