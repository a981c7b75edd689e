"""Plans of models of images: images per second, work of windows by rank, and bytes beside those that were traced."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.image_plan import MODELS, WAYS, planned
from benchmarks.machine import KINDS, RESULTS
from benchmarks.plan_bytes import LEAST, MOST, errors
from launcher.metrics.throughput import training_flops
from launcher.plan.attention_cost import attention_of_rank
from launcher.plan.estimate import estimate_run, max_row_tokens
from launcher.plan.hardware import load_hardware
from launcher.plan.plan_search import search_settings
from launcher.plan.planned_world import World
from launcher.plan.rates import Rate
from launcher.plan.screen import headline, plan_summary
from launcher.plan.seconds import attention_of_stages
from launcher.plan.stages import stage_documents, stage_runs
from launcher.plan.synthetic_documents import synthetic_batch, uniform_documents
from longctx.architecture.image_stages import stage_configs
from longctx.architecture.layer_specs import mixers_of
from longctx.architecture.mixers.image_window_mixer import ImageWindowMixer
from longctx.architecture.size import document_head_size, unread_size
from longctx.batch import IGNORED_TARGET
from longctx.errors import ConfigError
from longctx.model.attention.image_windows import window_order
from parallel.layout.token_placement import TokenPlacement
from parallel.schedule.relayout_plan import plan_relayout
from tests.launcher.image_runs import image_run
from tests.launcher.runs import resolved
from tests.longctx.image_samples import igpt_config, swin_config, vit_config

H100 = load_hardware("h100")
DENSE: dict[str, Any] = {"num_experts": 0, "shared_ffn_size": 0}
PLANNED = {
    "vit": vit_config(**DENSE),
    "experts": vit_config(class_pool="mean"),
    "swin": swin_config(),
    "igpt": igpt_config(**DENSE, classes=5, class_pool="mean"),
}


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.parametrize(
    "way", [{}, {"train__chunk_tokens": 16, "train__keep": "attention"}, {"train__keep": "inputs"}]
)
def test_a_plan_names_its_images(name: str, way: dict[str, Any]):
    model = PLANNED[name]
    run = estimate_run(image_run(model, parallel__context=2, **way), World(ranks=2, ranks_per_node=2), H100)
    assert run.images_per_step == 4
    assert f"4 images of {model.image.num_tokens} tokens per row" in headline(run)
    assert any(line.startswith("4 images per step, ") for line in plan_summary(run, 0, None))
    found = run.to_json()
    assert found["images_per_second"] == pytest.approx(4 / run.seconds.total)
    for rank in run.ranks:
        assert min(rank.bytes.kept, rank.bytes.passing, rank.seconds.products, rank.seconds.attention) > 0


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_products_are_those_of_the_models_flops(name):
    """In stages, each weight multiplies its own stage's tokens."""
    model, rate = PLANNED[name], Rate.plain(1e9)
    hardware = replace(H100, product_flops=rate, product_backward_flops=rate)
    run = estimate_run(image_run(model), World(ranks=1, ranks_per_node=1), hardware)
    lengths = [model.image.num_tokens] * 4
    attention = sum(attention_of_stages(run.config, run.world, 0, uniform_documents(run.config)).flops.values())
    of_heads = 2 * document_head_size(model) * len(lengths)
    # A plan multiplies all tokens in the last layer: compiled layers do.
    of_heads -= 2 * unread_size(model) * (sum(lengths) - len(lengths))
    assert run.seconds.products * 1e9 == pytest.approx(training_flops(model, lengths) - 3 * (attention + of_heads))


def test_texts_have_no_images():
    run = planned("decoder", "attention")
    assert run.images_per_step == 0
    assert "images_per_second" not in run.to_json()


def test_longer_documents_are_for_texts():
    config = image_run(vit_config(**DENSE))
    with pytest.raises(ConfigError, match=r"--document-tokens 8 is for texts: an image .* has 16 tokens"):
        estimate_run(config, World(ranks=1, ranks_per_node=1), H100, document_tokens=8)


def test_rows_of_windows_that_fit_have_complete_images():
    run = estimate_run(image_run(swin_config(), parallel__context=2), World(ranks=2, ranks_per_node=2), H100)
    assert max_row_tokens(run.config, run.world, H100) % 72 == 0


def test_a_search_finds_settings_for_windows():
    config = image_run(swin_config(), train__tokens_per_step=576)
    found = search_settings(config, World(ranks=2, ranks_per_node=2), H100, held={"zero.stage"})
    assert found.fastest is not None
    assert found.fastest.config.data.seq_len == 288


def test_synthetic_rows_hold_images_and_padding():
    config = resolved(image_run(vit_config(**DENSE), data__seq_len=35, train__tokens_per_step=35))
    documents = uniform_documents(config)
    assert (documents.bounds, documents.padding) == ((0, 16, 32, 35), (2,))
    stream = synthetic_batch(config)
    assert stream.pixels is not None
    assert stream.pixels.shape == (1, 35, 12)
    assert stream.labels is not None
    assert (stream.labels != IGNORED_TARGET).nonzero()[:, 1].tolist() == [0, 16]
    assert stream.num_tokens == 32


@pytest.mark.parametrize(("images", "ranks"), [(1, 2), (1, 3), (2, 3), (1, 4)])
def test_windows_of_all_ranks_are_the_models_and_rows_are_those_of_the_relayout(images, ranks):
    config = resolved(image_run(swin_config(), images, parallel__context=ranks, train__dtype="bfloat16"), ranks=ranks)
    documents, world = uniform_documents(config), World(ranks=ranks, ranks_per_node=ranks)
    works = [attention_of_stages(config, world, rank, documents) for rank in range(ranks)]
    wanted = sum(
        count * mixer.flops(stage, [stage.image.num_tokens] * images)
        for stage in stage_configs(config.model.config())
        for mixer, count in mixers_of(stage).items()
    )
    assert sum(sum(work.flops.values()) for work in works) == wanted
    assert sum(work.received_in_node for work in works) > 0, "ranks cut an image"
    for stage, of_stage in zip(stage_runs(config), stage_documents(config, documents), strict=True):
        model = stage.model.config()
        for rank in range(ranks):
            work = attention_of_rank(model, stage.parallel, 2, world, rank, of_stage)
            row = 2 * model.num_heads * model.head_dim
            assert work.received_in_node == row * count_rows(model, of_stage.num_documents, rank, ranks)
            assert work.received_from_afar == 0


def count_rows(model, images: int, rank: int, ranks: int) -> int:
    """Rows of queries, keys, values and outputs in all of a stage's layers, from the plan that moves them."""
    total = 0
    for mixer, count in mixers_of(model).items():
        assert isinstance(mixer, ImageWindowMixer)
        if not mixer.shift:
            continue
        shifted = window_order(mixer, images)
        plain = window_order(ImageWindowMixer(False, rows=mixer.rows, columns=mixer.columns, side=mixer.side), images)
        for source, target, tensors in ((plain, shifted, 3), (shifted, plain, 1)):
            moves = plan_relayout(placement(source, ranks), placement(target, ranks)).moves(rank)
            total += count * tensors * sum(moves.receive_counts)
    return total


def placement(order, ranks: int) -> TokenPlacement:
    tokens = order.indices()
    windows = len(tokens) // order.group
    cuts = [order.group * (rank * windows // ranks) for rank in range(ranks + 1)]
    return TokenPlacement.build([tokens[a:b] for a, b in pairwise(cuts)], len(tokens))


def traced_rows() -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for kind in KINDS:
        path = RESULTS / kind / "image_plan.json"
        if path.exists():
            found |= {(row["model"], row["way"]): row for row in json.loads(path.read_text())["rows"]}
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "decoder"])
def test_bytes_are_those_that_were_traced(name, way):
    traced = traced_rows().get((name, way))
    if traced is None:
        pytest.skip("no trace of this model is saved")
    for error in errors(planned(name, way), traced):
        assert LEAST <= error <= MOST, f"{name}, {way}: {error:+.1%}"
