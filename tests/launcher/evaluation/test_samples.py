"""How many samples are measured together, and that an evaluation's folder has one writer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import launcher.evaluation.memory as memory
from launcher.evaluation.options import Options
from launcher.evaluation.store import locked
from longctx.errors import ConfigError
from longctx.generation.cache_size import cache_bytes
from parallel.mesh import Mesh
from tests.longctx.cached_models import config_of

CPU = torch.device("cpu")


def together(monkeypatch: pytest.MonkeyPatch, *, length: int, free: int) -> int:
    """Samples of this length that one process measures together with so many bytes free."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    options = Options(checkpoint=Path(), output=Path(), tasks=("passkey",), lengths=(length,))
    return memory.samples_together(options, config_of("grouped"), Mesh.build(context=1), CPU, length)


def test_samples_are_measured_together_where_memory_holds_their_caches(monkeypatch):
    of_one = cache_bytes(config_of("grouped"), 4096, torch.float32, chunk_tokens=4096)
    assert together(monkeypatch, length=4096, free=2**40) == 8
    assert together(monkeypatch, length=4096, free=6 * of_one) == 3
    assert together(monkeypatch, length=4096, free=0) == 1


def test_few_long_samples_are_lost_to_a_kill(monkeypatch):
    assert [together(monkeypatch, length=n, free=2**40) for n in (32_768, 131_072, 1_048_576)] == [4, 1, 1]


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    folder = tmp_path / "new/out"
    for _ in range(2):  # it is free again
        with locked(folder), pytest.raises(ConfigError, match="another evaluation is writing there"), locked(folder):
            pytest.fail("two writers")
