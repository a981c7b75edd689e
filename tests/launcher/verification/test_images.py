"""``verify`` on models of images: they agree with one process, faults are found, and images do not leak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from launcher.config.config_sections import RunConfig
from launcher.config.image_objective import complete_images
from launcher.config.run_config_rules import check_run
from launcher.verification.compare import part_of
from launcher.verification.random_rows import micro_batch
from launcher.verification.shrink import TOKENS_A_RANK, shrink
from launcher.verification.verify_run import probe_run, verify_run
from longctx.architecture.image import ImageShape
from longctx.batch import IGNORED_TARGET
from longctx.config import ModelConfig
from longctx.model.token_pool import TokenPool
from parallel.attention.context_parallel_image_windows import ContextParallelImageWindows
from tests.helpers import run_distributed
from tests.launcher.image_runs import image_run
from tests.launcher.runs import resolved
from tests.longctx.image_samples import igpt_config, swin_config, vit_config

DENSE: dict[str, Any] = {"num_experts": 0, "shared_ffn_size": 0}
BOTH_HEADS = igpt_config(**DENSE, classes=5, class_pool="mean")
ONE_HEAD = igpt_config(**DENSE, classes=5, class_pool="mean", token_head=False, output_vocab_size=0)
WAYS: list[tuple[ModelConfig, dict[str, Any]]] = [
    (vit_config(**DENSE), {"train__chunk_tokens": 20, "train__optimizer": "muon"}),
    (swin_config(), {"train__keep": "attention", "train__dtype": "bfloat16"}),
    (BOTH_HEADS, {"train__class_weight": 0.3}),
]
MORE_WAYS: list[tuple[ModelConfig, dict[str, Any]]] = [
    (vit_config(residual_dropout=0.1), {"parallel__expert": 2, "train__keep": "inputs"}),
    (swin_config(), {"train__chunk_tokens": 30, "train__optimizer": "muon", "zero__stage": 2}),
    (swin_config(), {"parallel__context": 1, "train__micro_batch_rows": 2, "train__tokens_per_step": 8 * 288}),
    (ONE_HEAD, {"train__chunk_tokens": 16}),
    (replace(BOTH_HEADS, causal=False), {"train__objective": "masked", "parallel__layout": "balanced"}),
]


def run_of(model: ModelConfig, changed: dict[str, Any]) -> RunConfig:
    return image_run(model, **{"zero__stage": 3, "parallel__context": 2, "train__clip_norm": 0.1, **changed})


def agree(ways: list[tuple[ModelConfig, dict[str, Any]]]) -> None:
    for model, changed in ways:
        found = verify_run(run_of(model, changed), torch.device("cpu"))
        assert found.held, f"{changed}\n{found.text}"


@pytest.mark.timeout(200)
def test_models_of_images_agree():
    run_distributed(agree, 2, WAYS, timeout=180)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_more_of_them_do():
    run_distributed(agree, 2, MORE_WAYS, timeout=380)


def differ_without_relayout() -> None:
    """Shifted windows computed where the unshifted ones are."""
    with mock.patch.object(ContextParallelImageWindows, "mover", return_value=None):
        found = verify_run(run_of(swin_config(), {}), torch.device("cpu"))
    assert not found.held
    assert "stage 0" in found.text, found.text


@pytest.mark.timeout(100)
def test_patches_in_a_wrong_order_are_found():
    run_distributed(differ_without_relayout, 2, timeout=90)


def nothing_leaks() -> None:
    for model, changed in (*WAYS, (ONE_HEAD, {})):
        found = probe_run(run_of(model, changed), torch.device("cpu"))
        assert found.held, f"{changed}\n{found.text}"
        assert "one token shorter" not in found.text


@pytest.mark.timeout(200)
def test_nothing_leaks():
    run_distributed(nothing_leaks, 2, timeout=180)


def leaks_are_seen() -> None:
    """A document's mean with a part of all others' means."""
    plain = TokenPool.scaled

    def mixed(pool: TokenPool, sums_SM: Tensor) -> Tensor:
        return plain(pool, sums_SM) + plain(pool, sums_SM).mean(0)

    with mock.patch.object(TokenPool, "scaled", mixed):
        found = probe_run(run_of(swin_config(), {}), torch.device("cpu"))
    assert "leak into each other" in found.text, found.text


@pytest.mark.timeout(100)
def test_a_leak_between_images_is_seen():
    run_distributed(leaks_are_seen, 2, timeout=90)


SWIN_T = swin_config(
    ImageShape(height=448, width=224, patch=4, window=7, depths=(2, 2, 6, 2)),
    hidden_size=96,
    num_layers=12,
    num_heads=3,
    num_kv_heads=3,
    head_dim=32,
    ffn_size=384,
)
VIT_LARGE_IMAGE = ImageShape(height=4096, width=2048, patch=16, class_token=True)
LARGE: dict[str, tuple[ModelConfig, int, dict[str, Any]]] = {
    "vit": (vit_config(VIT_LARGE_IMAGE, **DENSE), 8, {"data__seq_len": 32776}),
    "swin": (SWIN_T, 8, {"data__seq_len": 6272 * 16, "parallel__layout": "zigzag"}),
    "swin on one rank": (SWIN_T, 1, {"data__seq_len": 6272 * 16}),
    "swin on 3 ranks": (SWIN_T, 3, {"data__seq_len": 6272 * 3}),
    "igpt": (
        igpt_config(**DENSE, image=ImageShape(height=64, width=48), max_positions=3072, vocab_size=513,
                    output_vocab_size=512),
        4,
        {"data__seq_len": 6144},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_a_small_run_has_images_of_every_kind_of_layer(name):
    model, ranks, changed = LARGE[name]
    config = resolved(image_run(model, **changed, parallel__context=ranks), ranks=ranks)
    small = shrink(config, ranks).config
    check_run(small, ranks)
    image = small.model.image
    assert small.data.seq_len >= 2 * image.num_tokens
    assert small.data.seq_len <= 2 * TOKENS_A_RANK * ranks
    assert (image.patch, image.class_token) == (model.image.patch, model.image.class_token)
    if image.window:
        assert small.data.seq_len % complete_images(small) == 0
        assert len(image.depths) == len(model.image.depths)
        assert max(image.depths) == 2


def tokens_of(stream_values: Tensor, ids: Tensor, number: int) -> Tensor:
    return stream_values.flatten(0, 1)[ids.flatten() == number]


def test_rows_of_random_images_are_those_of_a_loader():
    config = resolved(image_run(BOTH_HEADS, data__seq_len=64, train__micro_batch_rows=2, train__tokens_per_step=128))
    stream = micro_batch(config, 0, range(2))
    assert stream.documents.lengths == (*[15] * 4, 4, *[15] * 3, 19)
    assert stream.documents.padding == (4, 8)
    assert stream.num_labels == 7
    assert stream.next_token_ids is not None
    for number in (0, 5):
        read, target = (tokens_of(x, stream.document_ids, number) for x in (stream.tokens, stream.next_token_ids))
        assert read[0] == BOTH_HEADS.vocab_size - 1
        assert read[1:].tolist() == target[:-1].tolist()
        assert int(target.max()) < BOTH_HEADS.head_rows
    assert (tokens_of(stream.next_token_ids, stream.document_ids, -1) == IGNORED_TARGET).all()


def test_random_patches_are_zero_at_class_tokens_and_padding():
    stream = micro_batch(resolved(image_run(vit_config(), data__seq_len=35, train__tokens_per_step=35)), 0, range(1))
    assert stream.pixels is not None
    blank = (stream.pixels == 0).all(-1)
    assert blank[0].nonzero().flatten().tolist() == [0, 16, 32, 33, 34]


def test_a_weight_belongs_to_a_part_of_its_stage():
    assert part_of("model.stages.2.layers.5.self_attn.relative_bias.weight") == "stage 2, layer 5, attention"
    assert part_of("model.merges.0.reduction.weight") == "merges.0.reduction"
