"""How many prompts are under way together, and that an evaluation's folder has one writer."""

from __future__ import annotations

import pytest
import torch

import launcher.evaluation.memory as memory
from launcher.evaluation.store import locked
from longctx.errors import ConfigError
from longctx.generation.cache_size import cache_bytes
from parallel.mesh import Mesh
from tests.longctx.cached_models import config_of


def test_prompts_are_under_way_together_where_memory_holds_their_caches(monkeypatch):
    config, how = config_of("grouped"), {"dtype": torch.float32, "chunk_tokens": 16}
    of_one = cache_bytes(config, 4096, **how)
    for free, together in ((2**40, 8), (6 * of_one, 3), (0, 1)):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        found = memory.fitting_together(config, Mesh.build(context=1), torch.device("cpu"), 4096, **how, most=8)
        assert found == together


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    folder = tmp_path / "new/out"
    for _ in range(2):  # it is free again
        with locked(folder), pytest.raises(ConfigError, match="another evaluation is writing there"), locked(folder):
            pytest.fail("two writers")
