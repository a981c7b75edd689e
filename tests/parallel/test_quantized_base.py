"""A quantized base over ranks: bit for bit the run on its dequantized weights, in every ZeRO stage and by chunks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from longctx.architecture.adapter import AdapterShape
from longctx.config import ModelConfig
from longctx.kernels.quantized_weights import dequantize, quantize
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.zero.zero_engine import ZeroEngine
from tests.helpers import on_ranks
from tests.longctx.samples import dense_config, tiny_config
from tests.parallel.test_adapters import rows_of, split
from tests.parallel.trained import OPTIONS, train_over_ranks

ADAPTER = AdapterShape(rank=3, alpha=6.0, quantize_base="nf4")
MODELS: dict[str, ModelConfig] = {
    "dense": dense_config(adapter=ADAPTER, init_std=0.05),
    "experts": tiny_config(adapter=ADAPTER, init_std=0.05, num_experts=4),
    "hybrid": dense_config(adapter=ADAPTER, layers=("gated_delta", "full"), init_std=0.05),
}
KINDS = ("nf4", "fp8")


class Values:
    """A model's weights as a checkpoint stores them, with B that are not 0."""

    def __init__(self, config: ModelConfig) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tensors = dict(Decoder(plain(config)).state_dict())
        for name, x in self.tensors.items():
            if name.endswith("lora_B"):
                x.copy_(0.1 * torch.randn(x.shape, generator=generator))

    def rounded(self, config: ModelConfig) -> Values:
        """The same weights with the quantized ones dequantized."""
        found = Values(config)
        for name, layout in Decoder(config, seed=None).layouts.items():
            found.tensors[name] = dequantize(quantize(found.tensors[name], layout), layout, torch.float32)
        return found

    def read(self, name: str, role: str, start: int, out: torch.Tensor) -> None:
        out.copy_(self.tensors[name].view(-1)[start : start + len(out)])


def plain(config: ModelConfig) -> ModelConfig:
    return replace(config, adapter=config.adapter.without_quantization())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dense", "experts"])
@pytest.mark.parametrize(
    ("world_size", "context", "expert", "stages"),
    [
        (2, 2, 1, (3,)),
        (2, 1, 2, (1,)),
        *(
            pytest.param(n, c, e, (0, 1, 2, 3), marks=pytest.mark.slow)
            for n, c, e in ((1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2), (2, 1, 2), (3, 3, 1), (4, 2, 2))
        ),
    ],
)
@on_ranks("world_size", timeout=500)
def test_every_stage_trains_as_on_the_dequantized_weights(name, kind, context, expert, stages):
    config = replace(MODELS[name], adapter=replace(ADAPTER, quantize_base=kind))
    if name == "dense":
        expert = 1
    mesh = Mesh.build(context=context, expert=expert)
    values = Values(config)
    rounded = values.rounded(config)
    if len(stages) == 1:
        # In few tests one kind, with and without experts, goes by chunks.
        chunks = (7 if (kind == "nf4") == (name == "dense") else 0,)
    else:
        chunks = (0, 7)
    for stage, chunk_tokens in product(stages, chunks):
        found = []
        for model, weights in ((config, values), (plain(config), rounded)):
            task = build_parallel_model(
                model, mesh, layout="zigzag", execution=Execution("attention", chunk_tokens=chunk_tokens), seed=None
            )
            cut = partial(split, mesh=mesh, layout="zigzag")
            found.append(
                train_over_ranks(
                    task, mesh, rows_of, cut, stage=stage, options=replace(OPTIONS, clip_norm=0.05), read=weights.read
                )
            )
        assert found[0] == found[1], f"ZeRO {stage}, chunks of {chunk_tokens}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "expert"), [(2, 1), (2, 2), (3, 1)])
@on_ranks("world_size", timeout=200)
def test_a_rank_holds_its_part_of_the_bytes(kind, expert):
    config = replace(MODELS["experts"], adapter=replace(ADAPTER, quantize_base=kind), expert_ffn_size=37)
    if expert == 1:
        config = replace(config, num_experts=2)
    mesh = Mesh.build(context=1, expert=expert)
    values, whole = Values(config), Decoder(config, seed=None)
    for stage, dtype in product((1, 3), (torch.float32, torch.bfloat16)):
        task = build_parallel_model(config, mesh, layout="contiguous", seed=None)
        engine = ZeroEngine(task, stage=stage, dtype=dtype, accumulation=1, options=OPTIONS)
        engine.load(values.read, step=0, moments=False)
        assert engine.shapes == {name: x.shape for name, x in values.tensors.items()}
        assert not engine.nonfinite_weights()
        for name, p in engine.partition.frozen():
            if name not in whole.layouts:
                assert p.dtype == dtype
                continue
            packed = quantize(values.tensors[name], whole.layouts[name])
            if ".experts." in name:
                packed = packed[engine.model.network.dispatcher.local_experts]
            own, start = engine.partition.working_part(name, p).view(-1), engine.partition.working_start(p)
            assert own.dtype == torch.uint8
            assert torch.equal(own, packed.reshape(-1)[start : start + len(own)]), name
