"""Runs with a frozen base in 4 or 8 bits: start, resume, export, evaluation, memory, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.checkpoint.load_checkpoint import load_weights
from launcher.cli import cli_commands
from launcher.config.load_config import load_run_config
from launcher.config.objective import check_objective
from launcher.evaluation.inference_model import build_decoder
from launcher.evaluation.model_source import ModelSource, open_reader
from longctx.architecture.adapter import AdapterShape, is_adapter
from longctx.checkpoint_format import MANIFEST, CheckpointReader, list_checkpoints
from longctx.conversion.checkpoint_writer import save_master_weights
from longctx.conversion.merged_adapters import open_merged
from longctx.conversion.tensor_layouts import quantized_layouts
from longctx.errors import ConfigError
from longctx.generation.load_decoder import load_model
from longctx.kernels.quantized_weights import dequantize, quantize
from longctx.model.decoder import Decoder
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.zero.optimizer import OptimizerOptions
from parallel.zero.zero_engine import ZeroEngine
from tests.helpers import run_distributed
from tests.launcher.runs import TINY_RUN
from tests.launcher.test_adapters import ADAPTED, train_adapters
from tests.launcher.workers import rows, run, train
from tests.longctx.samples import dense_config

pytestmark = pytest.mark.timeout(240)

QUANTIZED = {**ADAPTED, "model.adapter.quantize_base": "nf4"}


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "base"
    run(train, 2, shards, folder, {"train.steps": 2, "validation.rows": 0})
    return folder


@pytest.fixture(scope="module")
def adapters(shards, base) -> Path:
    folder = base.with_name("adapters")
    run(train_adapters, 2, shards, folder, {**QUANTIZED, "run.start_from": base, "zero.stage": 3})
    return folder


def test_a_checkpoint_holds_adapters_alone_and_is_read_with_its_base(base, adapters):
    newest = list_checkpoints(adapters)[-1]
    reader, of_base = CheckpointReader(newest), CheckpointReader(list_checkpoints(base)[-1])
    stored = json.loads((newest / MANIFEST).read_text())["tensors"]
    assert stored
    assert all(map(is_adapter, stored))
    for name in of_base.names():
        assert torch.equal(reader.read(name), of_base.read(name)), name


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_goes_on_as_if_it_had_not_stopped(shards, base, adapters, stage):
    stopped = Path(shutil.copytree(adapters, adapters.with_name(f"stopped{stage}")))
    shutil.rmtree(list_checkpoints(stopped)[-1])
    changed = {**QUANTIZED, "run.start_from": base, "run.resume": "latest", "zero.stage": stage}
    run(train_adapters, 2, shards, stopped, changed)
    again, wanted = ([row["loss"] for row in rows(folder)[-2:]] for folder in (stopped, adapters))
    assert again == wanted, "to the last bit"


def test_an_export_merges_into_the_dequantized_base(base, adapters, tmp_path, capsys):
    assert cli_commands.main(["convert", "--to", "hf", str(adapters), str(tmp_path / "hf"), "--verify", "tensors"]) == 0
    capsys.readouterr()
    ours, merged = load_model(adapters), load_model(tmp_path / "hf")
    assert ours.layouts
    assert not merged.layouts
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        got, wanted = (one.logits(one(tokens, tokens)) for one in (ours, merged))
    assert (got - wanted).abs().max() <= 1e-5
    of_base, of_merged, state = CheckpointReader(list_checkpoints(base)[-1]), merged.state_dict(), ours.state_dict()
    for name, layout in ours.layouts.items():
        rounded = dequantize(quantize(of_base.read(name), layout), layout, torch.float32)
        assert torch.equal(rounded, dequantize(state[name], layout, torch.float32)), name
        prefix = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        a, b = state[f"{prefix}lora_A"], state[f"{prefix}lora_B"]
        scale = ours.config.adapter.scale
        torch.testing.assert_close(of_merged[name], rounded + scale * (b @ a), rtol=0, atol=1e-6)


def test_a_merged_range_is_the_whole_tensors(adapters):
    reader = CheckpointReader(list_checkpoints(adapters)[-1])
    merged = open_merged(reader)
    for name in quantized_layouts(load_model(adapters).config):
        whole = merged.read(name).flatten()
        for start, count in ((0, 5), (61, 9), (len(whole) - 3, 3), (7, len(whole) - 9)):
            part = merged.read_range(name, "master", start, count)
            torch.testing.assert_close(part, whole[start : start + count], rtol=0, atol=1e-7)


def test_a_peft_folder_is_as_before(adapters, tmp_path):
    peft = tmp_path / "peft"
    assert cli_commands.main(["convert", "--to", "peft", str(adapters), str(peft)]) == 0
    assert json.loads((peft / "adapter_config.json").read_text())["r"] == 4


def test_evaluation_quantizes_the_same_base(adapters):
    newest = list_checkpoints(adapters)[-1]
    reader, model, _ = open_reader(newest)
    for dtype in (torch.float32, torch.bfloat16):
        source = ModelSource(folder=newest, reader=reader, model=model, fingerprint="", tokenizer=None)  # type: ignore[arg-type]
        decoder = build_decoder(source, Mesh(rank=0, world_size=1, context=1), dtype, torch.device("cpu"))
        found = decoder.state_dict()
        for name, x in load_model(newest, dtype).state_dict().items():
            assert torch.equal(found[name], x), name


def config_of(base: Path, **changed: object):
    words = {**TINY_RUN, **QUANTIZED, "run.start_from": base, **changed}
    return load_run_config([word for key, value in words.items() for word in (f"--{key}", str(value))])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"zero.quantized_weights": "true"},
            r"(?s)zero.quantized_weights=true .*quantize_base=nf4.*Set zero.quantized",
        ),
        ({"zero.offload_parameters": "nvme", "zero.stage": 3, "zero.nvme_path": "/tmp"}, r"(?s)nvme .*Try .*=cpu"),
    ],
)
def test_ways_to_move_weights_that_change_bytes_are_refused(base, changed, message):
    with pytest.raises(ConfigError, match=message):
        check_objective(config_of(base, **changed))


def test_adapters_stay_on_the_base_that_they_were_trained_on(shards, adapters):
    for kind in ("none", "fp8"):
        with pytest.raises(ConfigError, match=r"model.adapter"):
            config_of(adapters, **{"model.adapter.quantize_base": kind, "data.train": shards})


LARGE = dense_config(
    hidden_size=1024, ffn_size=10_240, num_layers=5, num_heads=16, num_kv_heads=16, head_dim=64, qkv_bias=False,
    tie_embeddings=False,
)  # fmt: skip
LARGEST_BYTES = 4 * 1024 * 10_240


def kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A checkpoint of 710 MB."""
    folder = tmp_path_factory.mktemp("large") / "base"
    tensors = Decoder(LARGE).state_dict()
    return save_master_weights(LARGE, iter(tensors.items()), folder, dtype=torch.float32, training={})


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_base_is_quantized_while_it_is_read(large, kind, stage):
    run_distributed(load_large, 1, large, kind, stage, timeout=200)


def load_large(folder: Path, kind: str, stage: int) -> None:
    adapter = AdapterShape(rank=2, quantize_base=kind)
    config = replace(LARGE, adapter=adapter)
    task = build_parallel_model(config, Mesh.build(context=1), layout="contiguous", seed=None)
    engine = ZeroEngine(task, stage=stage, dtype=torch.float32, accumulation=1, options=OptimizerOptions())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = kib("VmRSS")
    load_weights(folder, engine, config, seed=0)
    grown = (kib("VmHWM") - before) * 1024
    stored = sum(p.numel() * p.element_size() for _, p in engine.model.network.named_parameters())
    if stage == 3:
        stored = sum(engine.partition.working_part(*named).nbytes for named in engine.partition.frozen())
    allowed = stored + LARGEST_BYTES + 200 * 10**6
    assert grown <= allowed < 4 * sum(shape.numel() for shape in engine.shapes.values())
