"""Low-rank adapters: against the merged model's gradients, in every way to run layers, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longctx.architecture.adapter import AdapterShape, is_adapter, merged_name
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.generation.loop import generate
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.as_on_a_gpu import computing_as_on_a_gpu
from tests.longctx.model.test_chunks import BATCH, CONFIGS
from tests.longctx.samples import dense_config, step_loss, tiny_config
from tests.rounding import both_ways

ADAPTER = AdapterShape(rank=3, alpha=5.0)
EXECUTIONS = {
    "all": Execution(),
    "attention": Execution("attention"),
    "inputs": Execution("inputs"),
    "chunks": Execution("attention", chunk_tokens=7),
    "chunks on the host": Execution("inputs", "host", chunk_tokens=7),
}


def adapted(config: ModelConfig, execution: Execution | None = None) -> CausalLM:
    """A model whose B are not 0."""
    lm = CausalLM(Decoder(config, execution=execution)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in lm.named_parameters():
            if name.endswith("lora_B"):
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return lm


def backward(lm: CausalLM) -> torch.Tensor:
    """Run a step; return its objective."""
    sums = lm.loss_sum(lm(BATCH, TrainingPass(seed=3)))
    step_loss(sums, 0.1).backward()
    return sums["objective"].detach()


def merged(lm: CausalLM, config: ModelConfig) -> CausalLM:
    """The same function of weights W + s·B·A, without adapters."""
    own, plain = dict(lm.named_parameters()), CausalLM(Decoder(replace(config, adapter=AdapterShape()))).double()
    weights = {name: p.detach().clone() for name, p in own.items() if not is_adapter(name)}
    for name in own:
        if name.endswith("lora_A"):
            weights[merged_name(name)] += config.adapter.scale * (own[f"{name[:-1]}B"] @ own[name]).detach()
    plain.load_state_dict(weights, strict=False)
    return plain


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_the_merged_weights(name):
    config = replace(CONFIGS[name], adapter=ADAPTER)
    lm = adapted(config)
    plain = merged(lm, config)
    torch.testing.assert_close(backward(lm), backward(plain), rtol=1e-12, atol=0)
    own, of_merged = dict(lm.named_parameters()), dict(plain.named_parameters())
    for name, p in own.items():
        if not is_adapter(name):
            assert p.grad is None, name
            continue
        dweight, other = of_merged[merged_name(name)].grad, own[name[:-1] + "BA"["AB".index(name[-1])]]
        wanted = other.mT @ dweight if name.endswith("A") else dweight @ other.mT
        assert p.grad.any(), f"{name} does not move"
        error = (p.grad - config.adapter.scale * wanted).abs().max() / wanted.abs().max()
        assert error <= 1e-12, f"{name}: {error}"


@pytest.mark.few(3)
@pytest.mark.parametrize("way", [way for way in EXECUTIONS if way != "all"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_way_to_run_layers_gives_these_gradients(name, way):
    config, found = replace(CONFIGS[name], adapter=ADAPTER), []
    for execution in (Execution(), EXECUTIONS[way]):
        lm = adapted(config, execution)
        found.append({"objective": backward(lm), **{key: p.grad for key, p in lm.named_parameters()}})
    for key, value in found[0].items():
        if value is not None:
            torch.testing.assert_close(found[1][key], value, rtol=1e-12, atol=1e-12, msg=lambda t, k=key: f"{k}: {t}")


def test_grouped_products_of_a_gpu_give_these_gradients():
    config = tiny_config(adapter=ADAPTER)
    wanted, got = adapted(config), adapted(config)
    backward(wanted)
    with computing_as_on_a_gpu():
        backward(got)
    for (name, p), q in zip(wanted.named_parameters(), got.parameters(), strict=True):
        if is_adapter(name):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-12, atol=1e-12, msg=lambda t, k=name: f"{k}: {t}")


def test_the_first_step_computes_the_bases_values():
    config = tiny_config(adapter=ADAPTER)
    plain, lm = CausalLM(Decoder(replace(config, adapter=AdapterShape()))), CausalLM(Decoder(config))
    assert torch.equal(backward(lm), backward(plain))


@pytest.mark.parametrize("name", ["dense", "experts", "latent", "gated delta"])
def test_tokens_are_generated_with_adapters(name):
    config = replace(CONFIGS[name], adapter=ADAPTER, residual_dropout=0.0)
    lm = adapted(config).eval()
    plain = merged(lm, config).eval()
    with torch.no_grad():
        for count in (1, 2, 40):
            tokens = torch.arange(count)[None]
            got, wanted = (one.network(tokens, tokens) for one in (lm, plain))
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    prompt = list(range(11))
    assert generate(lm.network, prompt, 9) == generate(plain.network, prompt, 9)


@pytest.mark.parametrize(
    ("targets", "count"),
    [(("q_proj",), 2), (("self_attn.q_proj", "down_proj"), 6), (("experts.down_proj",), 2), (("gate_up_proj",), 2)],
)
def test_targets_are_the_ends_of_names(targets, count):
    config = tiny_config(num_layers=2, adapter=replace(ADAPTER, targets=targets))
    trained = [name for name, p in Decoder(config).named_parameters() if p.requires_grad]
    assert len(trained) == 2 * count, trained


@pytest.mark.parametrize(
    ("target", "nearest"), [("q_prj", "q_proj"), ("self_atn.o_proj", "self_attn.o_proj"), ("embed_tokens", "")]
)
def test_a_target_that_matches_nothing_is_refused_with_the_nearest_name(target, nearest):
    with pytest.raises(ConfigError, match=rf"(?s)names '{target}'.*Try --model.adapter.targets {nearest}"):
        Decoder(dense_config(adapter=replace(ADAPTER, targets=(target,))))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": -1}, "rank=-1 must be between"),
        ({"rank": 4, "alpha": 0.0}, "alpha=0.0 must be a positive"),
        ({"targets": ("q_proj",)}, "no effect with model.adapter.rank=0"),
    ],
)
def test_values_without_meaning_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        AdapterShape(**values)


def test_a_rank_as_large_as_the_weights_is_refused():
    with pytest.raises(ConfigError, match=r"rank=17 is more than half .*hidden_size=32.*\n.*rank 4"):
        dense_config(adapter=AdapterShape(rank=17))
    assert dense_config(adapter=AdapterShape(rank=16)).adapter.is_used


def test_a_stabilized_scale_falls_with_the_root_of_the_rank():
    assert AdapterShape(rank=16, alpha=8.0).scale == 0.5
    assert AdapterShape(rank=16, alpha=8.0, rank_stabilized=True).scale == 2.0


@both_ways
@pytest.mark.parametrize("chunk_tokens", [0, 7])
def test_bfloat16_is_trained_in_both_ways_to_multiply(products, chunk_tokens):
    config = dense_config(adapter=ADAPTER)
    wanted = adapted(config)
    backward(wanted)
    lm = adapted(config, Execution("attention", chunk_tokens=chunk_tokens, matmul_mode=products)).bfloat16()
    backward(lm)
    for (name, p), q in zip(wanted.named_parameters(), lm.parameters(), strict=True):
        if is_adapter(name):
            assert (q.grad - p.grad).norm() <= 0.1 * p.grad.norm(), name
