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
from tests.longctx.samples import step_loss, tiny_config

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


@pytest.mark.few(10)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients_are_those_of_the_dequantized_weights(name, kind):
    lm, plain = both(quantized(CONFIGS[name], kind), torch.float32)
    assert lm.network.layouts
    check_equal(lm, plain)


@pytest.mark.few(4)
@pytest.mark.parametrize("way", [way for way in EXECUTIONS if way != "all"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_way_to_run_layers_gives_them(name, kind, way):
    check_equal(*both(quantized(CONFIGS[name], kind), torch.float32, EXECUTIONS[way]))


@pytest.mark.few(6)
@pytest.mark.parametrize("products", ["native", "float32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dense", "experts", "latent", "gated delta", "mamba"])
def test_both_ways_to_multiply_bfloat16_give_them(name, kind, products):
    config = quantized(CONFIGS[name], kind)
    for execution in (Execution(matmul_mode=products), Execution("attention", chunk_tokens=7, matmul_mode=products)):
        check_equal(*both(config, torch.bfloat16, execution))


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_products_of_a_gpu_give_them(kind):
    lm, plain = both(quantized(tiny_config(), kind), torch.float32)
    with computing_as_on_a_gpu():
        check_equal(lm, plain)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dense", "experts", "latent", "gated delta"])
def test_compiled_layers_give_them(name, kind):
    config = quantized(CONFIGS[name], kind)
    found = []
    for execution in (Execution("attention"), Execution("attention", compiler="aot_eager")):
        lm, plain = both(config, torch.float32, execution)
        check_equal(lm, plain)
        found.append(results(lm))
    for name, value in found[0].items():
        if value is not None:
            torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dense", "experts", "latent", "gated delta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_generated_as_from_the_dequantized_weights(name, kind, dtype):
    lm, plain = both(quantized(CONFIGS[name], kind, residual_dropout=0.0), dtype)
    with torch.no_grad():
        for count in (1, 2, 40):
            tokens = torch.arange(count)[None]
            assert torch.equal(*(one.eval().network(tokens, tokens) for one in (lm, plain)))
    prompt = list(range(11))
    assert generate(lm.network, prompt, 9) == generate(plain.network, prompt, 9)


def test_all_matrices_in_the_blocks_are_quantized_and_nothing_else():
    network = Decoder(quantized(tiny_config(num_layers=2, shared_ffn_size=16, shared_gate=True), "nf4"), seed=None)
    packed = {name for name, p in network.named_parameters() if p.dtype == torch.uint8}
    assert packed == set(network.layouts)
    frozen = {name for name, _ in network.named_parameters() if not is_adapter(name)} - packed
    for ending in ("q_proj.weight", "o_proj.weight", "experts.gate_up_proj", "shared_expert.down_proj.weight"):
        assert any(name.endswith(ending) for name in packed), ending
    for ending in ("embed_tokens.weight", "norm.weight", "mlp.gate.weight", "shared_expert_gate.weight"):
        assert any(name.endswith(ending) for name in frozen), ending


def test_backward_keeps_no_dequantized_weight():
    lm = both(quantized(tiny_config(num_layers=2, dense_layers=(0,), ffn_size=24), "nf4"), torch.float32)[0]
    state, saved = lm.network.state_dict(), []

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved.append(x.detach().clone())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        lm.loss_sum(lm(BATCH, TrainingPass(seed=3)))
    assert any(x.dtype == torch.uint8 for x in saved), "codes are saved"
    # A matrix is known by the sum of its squares, transposed or not.
    sums = torch.stack([x.double().square().sum() for x in saved if x.is_floating_point()])
    for name, layout in lm.network.layouts.items():
        values = dequantize(state[name], layout, torch.float32).double().square()
        for total in (values.sum(), *values.view(-1, *layout.shape[-2:]).sum((1, 2))):
            assert ((sums - total).abs() > 1e-9 * total).all(), name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rank": 4, "quantize_base": "nf8"},
            r"quantize_base=.?nf8.? is unknown. Try nf4, one of \['none', 'fp8', 'nf4",
        ),
        ({"rank": 4, "quantize_base": "FP8"}, r"is unknown. Try fp8"),
        ({"quantize_base": "nf4"}, r"model.adapter.rank=0 .*Try --model.adapter.rank 16, or .*quantize_base none"),
    ],
)
def test_values_without_meaning_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        AdapterShape(**values)
