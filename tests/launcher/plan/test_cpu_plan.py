"""Plans for CPUs: seconds beside arithmetic by hand, memory that is the machine's, and what a measured profile adds."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from launcher.config.load_config import load_run_config
from launcher.metrics.throughput import matmul_parameters, source_parameters
from launcher.plan.attention_cost import AttentionWork, attention_of_rank
from launcher.plan.compute_cost import embedding_projections, weights_in
from launcher.plan.estimate import RunEstimate, estimate_run
from launcher.plan.hardware import FOLDER, Hardware, hardware_from_values, load_hardware
from launcher.plan.parameters import build_shapes, num_parameters
from launcher.plan.plan_search import variants
from launcher.plan.planned_world import World
from longctx.architecture.mixers.softmax_mixer import SoftmaxMixer
from longctx.batch import PackedDocuments
from longctx.config import PRESETS
from longctx.errors import ConfigError

M, F, V, LAYERS, TOKENS = 64, 160, 512, 3, 256
DENSE = {
    "model.preset": "none",
    "model.hidden_size": M,
    "model.num_layers": LAYERS,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 32,
    "model.ffn_size": F,
    "model.vocab_size": V,
    "data.seq_len": TOKENS,
    "train.tokens_per_step": TOKENS,
    "train.dtype": "float32",
    "parallel.context": 1,
    "zero.stage": 1,
}
PRODUCTS_OF_LAYER = 4 * M * M + 3 * M * F
HUGE = 1e30


def profile(**figures: Any) -> Hardware:
    """A CPU on which everything takes no time but what ``figures`` say."""
    values = tomllib.loads((FOLDER / "cpu.toml").read_text())
    for name, section in values.items():
        if isinstance(section, dict):
            values[name] = {"value": HUGE, "source": "nothing takes time"}
    for name in ("message_seconds", "layer_seconds"):
        values[name]["value"] = 1e-30
    values["hidden_share"]["value"] = 1.0
    values["memory_bytes"]["value"] = 1e9
    for name, value in figures.items():
        if not isinstance(value, dict):
            value = {"value": value}
        values[name] = {"source": "by hand", **value}
    return hardware_from_values(values, "mine")


def config_of(**changed: Any):
    keys = DENSE | {name.replace("__", "."): value for name, value in changed.items()}
    return load_run_config([word for key, value in keys.items() for word in (f"--{key}", str(value))])


def plan(hardware: Hardware, ranks: int = 1, document_tokens: int = 0, **changed: Any) -> RunEstimate:
    return estimate_run(
        config_of(**changed), World(ranks=ranks, ranks_per_node=ranks), hardware, document_tokens=document_tokens
    )


@pytest.mark.parametrize(
    ("changed", "forwards_of_layers", "skipped"),
    [
        ({}, 1, 0),
        ({"train__keep": "attention"}, 2, 0),
        # By chunks the last product of a layer is not formed again.
        ({"train__keep": "attention", "train__chunk_tokens": 64}, 2, M * F),
    ],
)
def test_seconds_of_products_by_hand(changed, forwards_of_layers, skipped):
    run = plan(profile(product_flops=1e9), **changed)
    weights = LAYERS * ((forwards_of_layers + 2) * PRODUCTS_OF_LAYER - skipped) + 3 * V * M
    assert run.seconds.products == pytest.approx(2 * TOKENS * weights / 1e9)
    assert run.seconds.total == pytest.approx(run.seconds.products)


def test_backward_has_a_rate_of_its_own():
    run = plan(profile(product_flops=HUGE, product_backward_flops=1e9))
    assert run.seconds.products == pytest.approx(4 * TOKENS * (LAYERS * PRODUCTS_OF_LAYER + V * M) / 1e9)


def test_a_product_takes_the_rate_of_its_shape():
    # Rates fall with width: the head's is the widest.
    table = {"tokens": [TOKENS], "width": [M, 1e6], "value": [[1e9, 1e3]]}
    faster = plan(profile(product_flops=1e9)).seconds.products
    assert plan(profile(product_flops=table)).seconds.products > 1.5 * faster


# A stage's weights meet a share of the tokens (``metrics/test_throughput.py``).
@pytest.mark.few(6)
@pytest.mark.parametrize("preset", sorted(name for name, config in PRESETS.items() if not config.image.depths))
def test_weights_are_all_that_tokens_are_multiplied_by(preset):
    config = load_run_config(["--config", "quickstart", "--model.preset", preset, "--parallel.expert", "1"])
    model = config.model.config()
    blocks = build_shapes(config).model.layers
    counted = model.head_rows * model.embedding_dim
    counted += sum(weight.outer * weight.inner for weight in embedding_projections(model, 1.0))
    of_source = 0
    for weight, count in weights_in(blocks).items():
        share = 1.0
        if weight.num_experts:
            share = model.experts_per_token / weight.num_experts
        products = model.num_layers // len(blocks) * count * share * weight.outer * weight.inner
        if weight.of_source:
            of_source += products
        else:
            counted += products
    assert counted == pytest.approx(matmul_parameters(model), rel=1e-6)
    if model.encoder_layers:
        encoder = load_run_config(["--config", "quickstart", "--model.preset", preset, "--model.encoder_layers", "0"])
        assert of_source == 2 * model.num_layers * model.hidden_size * model.num_kv_heads * model.head_dim
        assert of_source < source_parameters(model) <= of_source + matmul_parameters(encoder.model.config())


def test_short_documents_take_their_own_rate():
    table = {"length": [64, 256], "value": [1e9, 4e9]}
    hardware = profile(attention_flops=table, attention_backward_flops=table)
    for length, rate in ((64, 1e9), (256, 4e9)):
        run = plan(hardware, document_tokens=length)
        flops = LAYERS * 4 * M * (TOKENS // length) * (length * (length + 1) // 2)
        assert run.seconds.attention == pytest.approx(3.5 * flops / rate)


@pytest.mark.parametrize(("context", "ulysses"), [(2, 1), (3, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("lengths", [(768,), (100, 300, 368), (1,) * 48 + (720,)])
def test_slices_of_all_ranks_are_the_attention_of_the_row(context, ulysses, lengths):
    config = config_of(parallel__context=context, parallel__ulysses=ulysses, parallel__layout="zigzag")
    model, documents = config.model.config(), PackedDocuments.of([sum(lengths[:n]) for n in range(len(lengths) + 1)])
    world = World(ranks=context, ranks_per_node=context)
    if documents.num_tokens % (2 * context // ulysses):
        pytest.skip("zigzag cuts even chunks")
    total = sum(
        sum(attention_of_rank(model, config.parallel, 4, world, rank, documents).flops.values())
        for rank in range(context)
    )
    assert total == pytest.approx(LAYERS * SoftmaxMixer().flops(model, lengths))


def test_a_ring_meets_whole_squares_and_its_own_diagonal():
    config = config_of(parallel__context=2, parallel__layout="contiguous")
    world, documents = World(ranks=2, ranks_per_node=2), PackedDocuments.of([0, 256])
    first, last = (
        attention_of_rank(config.model.config(), config.parallel, 4, world, rank, documents).flops for rank in (0, 1)
    )
    assert set(first) == {AttentionWork("causal", 128)}
    assert set(last) == {AttentionWork("causal", 128), AttentionWork("full", 128.0)}
    assert last[AttentionWork("full", 128.0)] == LAYERS * 4 * M * 128 * 128


@pytest.mark.parametrize(("hidden", "waited"), [(1.0, 0.0), (0.0, 1.0), (0.25, 0.75)])
def test_what_computing_does_not_hide_is_waited_for(hidden, waited):
    slow = {"node_bandwidth": 1e6, "attention_flops": 1.0, "attention_backward_flops": 1.0}
    run = plan(profile(**slow, hidden_share=hidden), ranks=2, parallel__context=2, train__dtype="float32")
    # Zigzag: the last quarter of the row, on rank 0, needs both quarters of rank 1; keys and values of two heads, once
    # forward, and backward once more with their gradients.
    moved = LAYERS * 128 * (2 * 2 * 32 * 4) * (1 + 2)
    assert run.seconds.hops == pytest.approx(waited * moved / 1e6)


def test_a_measured_profile_says_what_parameters_take():
    stages = {"stage": [1, 2, 3, 4]}
    hardware = profile(
        gradient_parameters=stages | {"value": [1e6, 2e6, 3e6, 4e6]},
        reduction_parameters=stages | {"value": [1e5, 2e5, 3e5, 4e5]},
        update_parameters=stages | {"value": [1e4, 2e4, 3e4, 4e4]},
        micro_batch_seconds=stages | {"value": [1.0, 2.0, 3.0, 4.0]},
        step_seconds=stages | {"value": [10.0, 20.0, 30.0, 40.0]},
        layer_seconds=0.5,
    )
    parameters = num_parameters(config_of())
    for stage in (0, 1, 2, 3):
        run = plan(hardware, zero__stage=stage, train__tokens_per_step=3 * TOKENS)
        assert run.seconds.zero == pytest.approx(parameters / (stage + 1) * (2 / 1e6 + 1 / 1e5))
        assert run.seconds.optimizer == pytest.approx(parameters / (stage + 1) / 1e4)
        assert run.seconds.host == pytest.approx(3 * (LAYERS * 0.5 + stage + 1) + 10 * (stage + 1))


def test_norms_and_sums_move_what_they_read_and_write():
    run = plan(profile(norm_bandwidth=1e9))
    assert run.seconds.elementwise == pytest.approx(LAYERS * 2 * 2 * TOKENS * M * 4 / 1e9, rel=1e-6)
    # Two forward; two and one for each further reader of a norm's output backward: q, k, v and gate, up.
    run = plan(profile(memory_bandwidth=1e9, **dict.fromkeys(_ELEMENTWISE, HUGE)))
    sums = LAYERS * (2 + 5) * 3 * TOKENS * M * 4
    assert run.seconds.elementwise == pytest.approx(sums / 1e9, rel=1e-6)


_ELEMENTWISE = (
    *("copy_bandwidth", "norm_bandwidth", "norm_backward_bandwidth", "rotary_bandwidth", "activation_bandwidth"),
    *("activation_backward_bandwidth", "loss_bandwidth", "routing_bandwidth", "routing_backward_bandwidth"),
)


def test_what_is_stored_on_the_host_takes_the_same_memory():
    hardware = profile()
    stored = plan(hardware, train__keep="attention", train__store="host")
    assert stored.host_bytes == 0
    assert stored.ranks[0].bytes.kept_on_host == 0
    on_device = plan(hardware, train__keep="attention")
    assert stored.ranks[0].bytes.kept == pytest.approx(on_device.ranks[0].bytes.kept, rel=0.05)


def test_what_needs_gpus_is_refused_and_what_cpus_do_is_not():
    with pytest.raises(ConfigError, match="needs GPUs"):
        plan(profile(), zero__stage=3, zero__quantized_weights="true")
    # On a GPU nobody trains in float32 by accident; a CPU does in this stage.
    run = plan(profile(), zero__stage=0, train__dtype="auto")
    assert run.config.train.dtype == "float32"


def test_the_shipped_core_has_a_source_for_everything_and_plans():
    hardware = load_hardware("cpu")
    assert hardware.device_type == "cpu"
    assert all(source.startswith(("assumed", "not known")) for source in hardware.sources.values())
    run = plan(hardware)
    assert 0 < run.seconds.total < 10
    assert run.utilisation(run.model_flops) is None


@pytest.mark.parametrize(
    ("document_tokens", "layout"),
    [(0, "zigzag"), (64, "balanced"), (100, "balanced"), (256, "zigzag"), (512, "zigzag")],
)
def test_the_layout_is_that_of_a_run_on_such_documents(document_tokens, layout):
    """As ``launcher.training.run_data.leaves_remainders`` says of them: short ones share rows, whole "
    "multiples do not."""
    changed = {"parallel__context": 2, "parallel__layout": "auto"}
    run = plan(profile(), ranks=2, document_tokens=document_tokens, **changed)
    assert run.config.parallel.layout == layout


def test_what_a_profile_leaves_out_is_like_what_it_has():
    """Also where that is a table by other sizes than a plan would ask for by itself."""
    values = tomllib.loads((FOLDER / "h100.toml").read_text())
    values["memory_bandwidth"] = {"bytes": [1, 1e12], "value": [1e9, 1e12], "source": "by hand"}
    values["attention_flops"] = {
        "length": [1, 1e6],
        "head_dim": [1, 512],
        "value": [[1e9] * 2] * 2,
        "source": "by hand",
    }
    values["product_flops"] = {"tokens": [1, 1e6], "float32": [1e9, 2e9], "bfloat16": [1e9, 2e9], "source": "by hand"}
    hardware = hardware_from_values(values, "mine")
    assert hardware.loss_bandwidth is hardware.memory_bandwidth
    layers = {"model__layers": "window", "model__window": 64}
    experts = {"model__num_experts": 4, "model__experts_per_token": 2, "model__expert_ffn_size": 32}
    for changed in ({}, layers, experts, {"train__chunk_tokens": 64, "train__keep": "inputs"}):
        assert plan(hardware, **changed).seconds.total > 0


def test_a_search_moves_nothing_to_the_memory_that_it_is_in():
    tried = list(variants(config_of(), World(ranks=1, ranks_per_node=1), set(), "cpu"))
    assert {(one.zero.offload, one.train.store) for one in tried} == {("none", "device")}
    assert {one.zero.offload for one in variants(config_of(), World(ranks=1, ranks_per_node=1), set())} > {"none"}
