"""Ranks that compute as on a GPU, on tensors of a CPU, against the plain single-process oracle."""

from __future__ import annotations

import pytest

from tests.as_on_a_gpu import computing_as_on_a_gpu
from tests.helpers import on_ranks
from tests.parallel.zero.test_zero import BOUNDS, FEW, SMALL, check_parity


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind", "stages", "way"),
    [
        ("moe", (2,), {"expert": 2}),
        pytest.param("moe", (3,), {"expert": 2, "keep": "attention"}, marks=pytest.mark.slow),
        pytest.param("dense", (2, 3), {"keep": "inputs"}, marks=pytest.mark.slow),
        pytest.param("dense", (2,), {"compiler": "aot_eager"}, marks=pytest.mark.slow),
        pytest.param("moe", (3,), {"compiler": "aot_eager", "keep": "attention"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@on_ranks(2, timeout=150)
def test_ranks_train_like_one_process(kind: str, stages: tuple[int, ...], way: dict) -> None:
    with computing_as_on_a_gpu():
        check_parity(kind, 2, BOUNDS[kind], FEW, stages, fused=True, zero=SMALL, **way)
