"""Rules of runs on images: what is refused and how it is said, and that the advice works."""

from __future__ import annotations

import re
from typing import Any

import pytest

from launcher.config.run_config_rules import check_run
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from tests.launcher.image_runs import image_run
from tests.launcher.runs import resolved
from tests.longctx.image_samples import igpt_config, swin_config, vit_config

DENSE: dict[str, Any] = {"num_experts": 0, "shared_ffn_size": 0}
BOTH_WAYS: dict[str, Any] = {**DENSE, "causal": False}
ACCEPTED: dict[str, tuple[ModelConfig, int, dict[str, Any]]] = {
    "class token": (vit_config(**DENSE), 2, {"parallel__context": 2}),
    "experts": (vit_config(), 2, {"parallel__context": 2, "parallel__expert": 2}),
    "windows": (swin_config(), 2, {"parallel__context": 2, "train__keep": "attention"}),
    "windows, zigzag": (swin_config(), 4, {"parallel__context": 4, "parallel__layout": "zigzag"}),
    "pixels": (igpt_config(**DENSE), 2, {"parallel__context": 2}),
    "pixels and classes": (igpt_config(**DENSE, classes=5, class_pool="mean"), 1, {}),
    "masked pixels": (igpt_config(**BOTH_WAYS), 2, {"train__objective": "masked", "parallel__context": 2}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_run_on_images_is_accepted(name):
    model, ranks, changed = ACCEPTED[name]
    check_run(image_run(model, **changed), ranks)


CUT: list[tuple[dict[str, Any], list[int], str]] = [
    ({"data__seq_len": 100}, [72, 144], "windows need complete images of 72 tokens"),
    ({"data__seq_len": 20}, [72], "cannot hold an image of 72 tokens"),
    ({"data__seq_len": 72, "parallel__context": 5}, [360], "split into 5 equal parts .parallel.context=5, "),
    ({"data__seq_len": 72, "parallel__context": 16}, [144], "must split into 16 equal parts"),
    (
        {"data__seq_len": 288, "parallel__context": 32, "parallel__layout": "zigzag"},
        [576],
        "must split into 64 equal parts .parallel.context=32, parallel.layout=zigzag",
    ),
]


@pytest.mark.parametrize(("changed", "nearest", "said"), CUT)
def test_windows_need_complete_images_on_ranks_that_share_them(changed, nearest, said):
    ranks = changed.get("parallel__context", 1)
    with pytest.raises(ConfigError, match=said) as refused:
        check_run(image_run(swin_config(), **changed), ranks)
    advice = [
        int(n) for n in re.findall(r"\d+", re.sub(r"(?s).*Try data.seq_len=([\d or]*).*", r"\1", str(refused.value)))
    ]
    assert advice == nearest
    for seq_len in advice:
        check_run(image_run(swin_config(), **(changed | {"data__seq_len": seq_len})), ranks)


def test_rows_of_a_micro_batch_divide_together():
    """One image of 72 patches does not divide over 16 ranks, and two in two rows do."""
    changed = {"data__seq_len": 72, "parallel__context": 16, "train__micro_batch_rows": 2}
    check_run(image_run(swin_config(), **changed, train__tokens_per_step=144), 16)


def test_windows_with_tokens_per_rank_are_refused():
    with pytest.raises(
        ConfigError, match=r"(?s)tokens_per_rank=144 does not work with windows .*Try --parallel.tokens"
    ):
        check_run(image_run(swin_config(), parallel__tokens_per_rank=144), 2)


def test_windows_start_from_the_layout_that_moves_fewest_patches():
    config = image_run(swin_config(), parallel__context=2)
    assert resolved(config, ranks=2).parallel.layout == "contiguous"
    assert resolved(image_run(vit_config(), parallel__context=2), ranks=2).parallel.layout == "balanced"
