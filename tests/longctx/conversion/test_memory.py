"""Conversions stream: resident memory does not grow with the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longctx.config import ModelConfig
from longctx.conversion import import_hf
from longctx.conversion.tensor_layouts import tensor_specs
from longctx.conversion.weights.json_files import write_json
from longctx.conversion.weights.weights_folder import INDEX
from longctx.storage.safetensors import SafetensorsShardWriter
from tests.helpers import REPOSITORY
from tests.longctx.samples import dense_config

SMALL = dense_config(qkv_bias=False, tie_embeddings=False)
CONFIG = dense_config(
    hidden_size=1024, ffn_size=10_240, num_layers=5, num_heads=16, num_kv_heads=16, head_dim=64, qkv_bias=False,
    tie_embeddings=False,
)  # fmt: skip
LARGEST_BYTES = 4 * 1024 * 10_240
ALLOWED_BYTES = 2 * LARGEST_BYTES + 200 * 10**6

MEASURE = """
import sys
from pathlib import Path
from longctx.conversion import export_checkpoint, import_hf

def kib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])

kind, small, source, output = sys.argv[1:]
run = import_hf if kind == "from" else export_checkpoint
run(small, output + "-small", verify="tensors")  # imports all that a conversion imports
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = kib("VmRSS")
run(source, output, verify="tensors", shard_bytes=200_000_000)
print((kib("VmHWM") - before) * 1024)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 710 MB in several safetensors files."""
    folder = tmp_path_factory.mktemp("large") / "hf"
    assert write_model(folder, CONFIG, shard_bytes=200_000_000) > 2 * ALLOWED_BYTES
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of some kilobytes in each form: ``hf``, ``pickled``, ``ours``."""
    folder = tmp_path_factory.mktemp("small")
    write_model(folder / "hf", SMALL, shard_bytes=10_000)
    write_pickle(folder / "hf", folder / "pickled")
    import_hf(folder / "hf", folder / "ours")
    return folder


def write_model(folder: Path, config: ModelConfig, *, shard_bytes: int) -> int:
    """Write random weights as a Hugging Face folder of several files; returns their bytes."""
    folder.mkdir()
    writer = SafetensorsShardWriter(folder, "model", shard_bytes)
    for spec in tensor_specs(config):
        writer.add(spec.name, torch.rand(spec.shape))
    write_json(folder / INDEX, {"metadata": {}, "weight_map": writer.finish()})
    write_json(folder / "config.json", config.to_hf())
    return writer.total_bytes


def write_pickle(source: Path, folder: Path) -> None:
    """Write a Hugging Face folder's weights as one pickle."""
    folder.mkdir()
    tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text((source / "config.json").read_text())


def rise(*arguments: object) -> int:
    """Bytes that resident memory rose by in a process of its own, after its imports."""
    words = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    result = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with Linux's /proc"),
]


def test_resident_memory_rises_by_two_tensors_and_200_mb_at_most(small, large, tmp_path):
    assert rise("from", small / "hf", large, tmp_path / "ours") <= ALLOWED_BYTES
    assert rise("to", small / "ours", tmp_path / "ours", tmp_path / "hf") <= ALLOWED_BYTES
    assert len(json.loads((tmp_path / "hf" / INDEX).read_text())["weight_map"]) == len(tensor_specs(CONFIG))


def test_so_it_does_with_a_pickle(small, large, tmp_path):
    write_pickle(large, tmp_path / "pickled")
    assert rise("from", small / "pickled", tmp_path / "pickled", tmp_path / "ours") <= ALLOWED_BYTES
