"""Every benchmark starts, and the one of a training step runs whole at a tiny size."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

import benchmarks
from benchmarks import decoder

FOLDER = Path(benchmarks.__file__).parent
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if 'if __name__ == "__main__"' in path.read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_of_every_script(name, monkeypatch, capsys):
    main = importlib.import_module(f"benchmarks.{name}").main
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "--help" in capsys.readouterr().out


@pytest.mark.few(1)
@pytest.mark.parametrize("name", list(decoder.SHAPES))
def test_a_step_beside_its_floor_at_a_tiny_size(name, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(decoder, "THREADS", threads)
    monkeypatch.setattr(decoder, "TOKENS", 32)
    small = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 32_000, "max_position_embeddings": 32}
    monkeypatch.setattr(decoder, "_COMMON", {**decoder._COMMON, **small})
    found = decoder.measure_time(name, rounds=1)
    assert set(found["cpu_seconds"]) == {"transformers", "longctx", "products", "attention"}
    assert found["losses"][1] == pytest.approx(found["losses"][0], abs=2e-2)
