"""How many prompts are under way together, and that an evaluation's folder has one writer."""

from __future__ import annotations

import pytest
import torch

import launcher.evaluation.inference_model as memory
from launcher.evaluation.evaluation_store import locked
from longctx.errors import ConfigError
from longctx.generation.cache_size import cache_bytes
from parallel.mesh import Mesh
from tests.longctx.cached_models import config_of


def test_prompts_are_under_way_together_where_memory_holds_their_caches(monkeypatch):
    config, mesh, device, dtype = config_of("grouped"), Mesh.build(context=1), torch.device("cpu"), torch.float32
    of_one = cache_bytes(config, 4096, dtype, chunk_tokens=16)
    for free, together in ((2**40, 8), (6 * of_one, 3), (0, 1)):
        monkeypatch.setattr(memory, "free_device_bytes", lambda device, free=free: free)
        found = memory.fitting_together(config, mesh, device, 4096, dtype=dtype, chunk_tokens=16, most=8)
        assert found == together


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    folder = tmp_path / "new/out"
    for _ in range(2):  # it is free again
        with locked(folder), pytest.raises(ConfigError, match="another evaluation is writing there"), locked(folder):
            pytest.fail("two writers")
