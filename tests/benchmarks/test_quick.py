"""Every benchmark runs to its end on little; what it measures then says nothing: its bounds are not looked at."""

from __future__ import annotations

import pytest

from benchmarks import __main__ as runner


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", runner.NAMES)
def test_a_benchmark_states_its_bounds(name: str):
    bounds, problem = runner.measure(name, ["--quick"], timeout=580)
    assert bounds, problem
