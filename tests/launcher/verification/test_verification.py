"""``verify``: right configurations agree with one process, and faults are found."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import launcher.verification.verify_run as verification
from launcher.config.config_sections import RunConfig
from launcher.config.load_config import load_run_config
from launcher.config.run_config_rules import check_run
from launcher.config.tokens_per_rank_rules import with_context
from launcher.recipes.find import recipes
from launcher.verification.choices import RouterState, unexplained_share
from launcher.verification.compare import part_of
from launcher.verification.shrink import TOKENS_A_RANK, VOCABULARY, shrink
from longctx.kernels.processor import MATMUL_MODES
from tests.helpers import run_distributed
from tests.launcher.runs import TINY_MODEL, recipe_flags, resolved
from tests.launcher.verification.mutants import MUTANTS
from tests.longctx.samples import tiny_config

EXPERTS = {
    **TINY_MODEL,
    "model.residual_dropout": 0.1,
    "data.seq_len": 128,
    "train.tokens_per_step": 256,
    "train.clip_norm": 0.1,
    "train.dtype": "float32",
    "train.lr": 1e-3,
    "parallel.context": 2,
    "parallel.expert": 2,
    "zero.stage": 2,
    "run.hostfile": "none",
}
MASKED = {"model.causal": "false", "train.objective": "masked"}
ALBERT = {
    "model.shared_layers": "true",
    "model.embedding_size": 24,
    "model.embedding_norm": "true",
    "model.segments": 2,
    "model.activation": "gelu",
    "model.head_transform": "true",
    "model.head_bias": "true",
    "model.position": "learned",
    "model.norm": "layernorm",
    "model.norm_order": "post",
}
FEWER_OUTPUTS = {"model.tie_embeddings": "false", "model.output_vocab_size": 100}
CHUNKS = {"train.chunk_tokens": 20, "train.keep": "attention"}


def flags(changed: dict[str, Any]) -> list[str]:
    return [word for key, value in {**EXPERTS, **changed}.items() for word in (f"--{key}", *str(value).split())]


def verify(changed: dict[str, Any], mutant: str = "") -> str:
    """What is said; ends with whether the two agree."""
    fault: Any = contextlib.nullcontext
    if mutant:
        fault = MUTANTS[mutant][0]
    with fault():
        found = verdict(load_run_config(flags(changed)))
    assert ("They agree" in found.text) == found.held
    return found.text


def verdict(config: RunConfig) -> verification.VerifyResult:
    return verification.verify_run(config, torch.device("cpu"))


def agree(ways: list[dict[str, Any]]) -> None:
    for changed in ways:
        text = verify(changed)
        assert "They agree" in text, text


def find(mutants: list[str], changed: dict[str, Any]) -> None:
    for name in mutants:
        text = verify({**CHUNKS, **changed}, name)
        assert "They differ" in text, name
        assert MUTANTS[name][1] in text.split("They differ")[1], f"{name}: {text}"
        assert len(text.splitlines()) < 25, text


@pytest.mark.timeout(200)
def test_right_configurations_agree():
    ways = [CHUNKS, {"zero.stage": 3, "train.dtype": "bfloat16"}, {**MASKED, "model.position": "t5"}]
    ways.append({**FEWER_OUTPUTS, **CHUNKS, "zero.stage": 3})
    run_distributed(agree, 2, ways, timeout=180)


TOGETHER = {"parallel.context": 1, "parallel.layout": "auto", "parallel.expert": 1, "parallel.tokens_per_rank": 100}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_rows_side_by_side_agree():
    """Two rows and then one on three ranks that they do not divide, with dropout."""
    ways = [{**TOGETHER, "train.tokens_per_step": 128 * 9}, {**TOGETHER, **CHUNKS, "train.tokens_per_step": 128 * 3}]
    run_distributed(agree, 3, ways, timeout=180)


def test_a_small_run_has_the_rows_of_a_large_one():
    changed = {**TOGETHER, "parallel.tokens_per_rank": 16384, "data.seq_len": 8192, "train.tokens_per_step": 8192 * 13}
    config = resolved(load_run_config(flags(changed)), ranks=4)
    assert config.micro_batches(4).sizes == (7, 6)
    small = with_context(shrink(config, 4).config, 4)
    check_run(small, 4)
    assert small.micro_batches(4).sizes == (7, 6)
    assert small.parallel.tokens_per_rank <= TOKENS_A_RANK
    assert 7 * small.data.seq_len <= 4 * TOKENS_A_RANK


@pytest.mark.parametrize(("outputs", "shrunk"), [(0, 0), (100, 100), (49_999, VOCABULARY - 1)])
def test_a_small_run_has_fewer_outputs_too(outputs, shrunk):
    changed = {**FEWER_OUTPUTS, "model.vocab_size": 50_000, "model.output_vocab_size": outputs}
    small = shrink(resolved(load_run_config(flags(changed)), ranks=4), 4).config
    assert (small.model.vocab_size, small.model.output_vocab_size) == (VOCABULARY, shrunk)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_of_them_do():
    dense = {"model.num_experts": 0, "model.shared_ffn_size": 0, "model.ffn_size": 48, "parallel.expert": 1}
    adapters = {"model.adapter.rank": 4, "train.optimizer": "adamw"}
    ways = [
        {**dense, "zero.stage": 0},
        {**dense, "parallel.ulysses": 2, "model.num_kv_heads": 2, "train.keep": "inputs"},
        {**dense, "model.layers": "full window", "model.window": 20, "parallel.layout": "balanced"},
        {"parallel.context": 1, "train.tokens_per_step": 512, "parallel.transport": "all_gather"},
        {"train.dtype": "bfloat16", "train.z_loss": 1e-4, **CHUNKS},
        {**MASKED, "parallel.layout": "balanced", "train.keep": "inputs", "zero.stage": 3},
        {**MASKED, **dense, "model.layers": "sparse full", "model.window": 20, "model.sparse_stride": 8, **CHUNKS},
        {**MASKED, **dense, "model.layers": "linear window", "model.window": 20, "parallel.ulysses": 1},
        {**MASKED, **dense, **ALBERT, "zero.stage": 3, "train.keep": "attention"},
        {**MASKED, **dense, **ALBERT, "model.pair_head": "sop", "zero.stage": 3, "train.chunk_tokens": 9},
        {**MASKED, "model.segments": 2, "model.pair_head": "nsp", "zero.stage": 2},
        {**adapters, "zero.stage": 3, **CHUNKS},
        {**dense, **adapters, "model.adapter.targets": "q_proj mlp.down_proj", "zero.stage": 2},
        {**adapters, "model.adapter.quantize_base": "nf4", "zero.stage": 3, "train.dtype": "bfloat16", **CHUNKS},
        {**adapters, "model.adapter.quantize_base": "fp8", "zero.stage": 1},
        {**MASKED, **dense, **ALBERT, "zero.stage": 1, **CHUNKS},
    ]
    run_distributed(agree, 2, ways, timeout=550)


SHORT = {"train.dtype": "bfloat16", "data.seq_len": 256, "train.tokens_per_step": 512}
"""Rows of 256 tokens in bfloat16: a choice of experts that rounding turns is one of few hundred."""


def short_rows(products: str, seeds: int) -> list[dict[str, Any]]:
    return [{**CHUNKS, **SHORT, "train.products": products, "run.seed": seed} for seed in range(seeds)]


@pytest.mark.few(1)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("products", MATMUL_MODES)
def test_short_rows_agree_in_bfloat16(products):
    run_distributed(agree, 2, short_rows(products, 1), timeout=180)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("products", MATMUL_MODES)
def test_short_rows_of_the_quickstart_agree_whatever_the_weights(products):
    """Errors are seven seeds' chance: a bound that rounding can break is broken by one of them."""
    whole = ["--config", "quickstart", "--data.seq_len", "256", "--train.tokens_per_step", "256"]
    whole += ["--train.dtype", "bfloat16", "--train.products", products, "--run.hostfile", "none"]
    run_distributed(agree_whole, 2, [[*whole, "--run.seed", str(seed)] for seed in range(7)], timeout=850)


def agree_whole(ways: list[list[str]]) -> None:
    for words in ways:
        text = verdict(load_run_config(words)).text
        assert "They agree" in text, text


@pytest.mark.timeout(200)
def test_a_fault_is_found():
    run_distributed(find, 2, ["ring, backward", "chunks", "router"], {}, timeout=180)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("changed", [{}, *(SHORT | {"train.products": products} for products in MATMUL_MODES)], ids=str)
def test_every_fault_is_found(changed):
    run_distributed(find, 2, list(MUTANTS), changed, timeout=850)


def test_a_choice_between_experts_that_score_alike_is_explained_and_no_other():
    model = tiny_config(num_experts=4, experts_per_token=2)
    logits_NE = torch.tensor([[3.0, 2.0, 1.95, 0.0], [3.0, 2.0, 1.95, 0.0], [3.0, 2.0, 1.0, 0.0]])
    chosen_Nk = torch.tensor([[0, 1], [2, 0], [0, 1]])
    state = RouterState(logits_NE, None, chosen_Nk)
    # each of the two logits may be off by the slack
    assert unexplained_share(state, 0.026, model) == 0
    assert unexplained_share(state, 0.024, model) == pytest.approx(1 / 3)


@pytest.mark.parametrize("recipe", ["llama-3.1-8b-128k", "qwen3-30b-a3b-128k"])
def test_a_recipe_made_small_keeps_what_is_verified(recipe):
    asked = load_run_config(recipe_flags(recipes()[recipe]))
    ranks = 8 * asked.parallel.context
    config = resolved(asked, native_bfloat16=True, device_type="cuda", ranks=ranks)
    small = shrink(config, ranks).config
    check_run(small, ranks)
    assert (small.parallel.context, small.parallel.ulysses, small.zero) == (
        config.parallel.context,
        config.parallel.ulysses,
        config.zero,
    )
    model, whole = small.model, config.model
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (
        whole.num_heads,
        whole.num_kv_heads,
        whole.head_dim,
    )
    assert small.data.seq_len == TOKENS_A_RANK * config.parallel.context


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "layer 3, attention"),
        ("model.layers.3.cross_attn.k_proj.weight", "layer 3, cross attention"),
        ("model.layers.3.cross_layernorm.weight", "layer 3, norms"),
        ("encoder.layers.12.mlp.up_proj.weight", "encoder layer 12, FFN"),
        ("encoder.norm.weight", "encoder.norm"),
        ("model.embed_tokens.weight", "embed_tokens"),
    ],
)
def test_a_weight_belongs_to_a_part_of_its_stack(name, part):
    assert part_of(name) == part
