"""A frozen base in 4 or 8 bits: bit for bit the model whose frozen weights are the dequantized ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longctx.architecture.adapter import AdapterShape, is_adapter
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.generation.loop import generate
from longctx.kernels.quantized_weights import dequantize
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.as_on_a_gpu import computing_as_on_a_gpu
from tests.longctx.model.test_adapters import ADAPTER, EXECUTIONS
from tests.longctx.model.test_chunks import BATCH, CONFIGS
from tests.longctx.samples import dense_config, step_loss, tiny_config

KINDS = ("nf4", "fp8")


def quantized(config: ModelConfig, kind: str, **changed) -> ModelConfig:
    return replace(config, adapter=replace(ADAPTER, quantize_base=kind), **changed)


def with_adapters(network: Decoder) -> Decoder:
    """B starts at 0, which would hide A's gradient."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if name.endswith("lora_B"):
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return network


def both(config: ModelConfig, dtype: torch.dtype, execution: Execution | None = None) -> tuple[CausalLM, CausalLM]:
    """The quantized model, and the same adapters on a full-precision base with the dequantized values."""
    lm = CausalLM(with_adapters(Decoder(config, execution=execution))).to(dtype)
    plain_config = replace(config, adapter=config.adapter.without_quantization())
    plain = CausalLM(Decoder(plain_config, execution=execution, seed=None)).to(dtype)
    weights = dict(lm.network.state_dict())
    for name, layout in lm.network.layouts.items():
        weights[name] = dequantize(weights[name], layout, dtype)
    plain.network.load_state_dict(weights)
    return lm, plain


def results(lm: CausalLM) -> dict[str, torch.Tensor | None]:
    sums = lm.loss_sum(lm(BATCH, TrainingPass(seed=3)))
    step_loss(sums, 0.1).backward()
    return {"objective": sums["objective"].detach(), **{name: p.grad for name, p in lm.named_parameters()}}


def check_equal(got: CausalLM, wanted: CausalLM) -> None:
    found, expected = results(got), results(wanted)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            assert value.any(), name
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients_are_those_of_the_dequantized_weights(name, kind):
    lm, plain = both(quantized(CONFIGS[name], kind), torch.float32)
    assert lm.network.layouts
    check_equal(lm, plain)
