"""Inductor's kernels for compiled blocks become machine code of GPUs that are not there."""

from __future__ import annotations

import pytest

from tests.fake_cuda.process import run_on_fake_cuda


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", ["90", "100"])
def test_kernels_of_a_block_compile_for(capability, tmp_path, cuda_python):
    cache = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    said = run_on_fake_cuda(
        "tests.fake_cuda.inductor", capability, str(tmp_path), python=cuda_python, timeout=550, **cache
    )
    # Norm, then query and key each normed and rotated in one; norm, activation, and the last sum.
    before_forward, _, after_forward, _ = map(int, said.split())
    assert (before_forward, after_forward) == (3, 3)
