"""Rules for windows and stages of images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from longctx.errors import ConfigError
from tests.longctx.image_samples import WINDOWS, swin_config

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "windows without stages": ({"image": replace(WINDOWS, depths=())}, "Try --model.image.depths 5 for one stage"),
    "stages without windows": (
        {"image": replace(WINDOWS, window=0), "layers": ("full",)},
        "depths=.2, 3. needs window layers",
    ),
    "other layers": ({"layers": ("image_window", "full")}, "Try --model.layers image_window shifted_window"),
    "class token": ({"image": replace(WINDOWS, class_token=True)}, "class_token=true is in no window"),
    "height": ({"image": replace(WINDOWS, height=18)}, "must be a multiple of 12.\nTry model.image.height=12 or 24"),
    "layers in all": ({"num_layers": 6}, "Try model.num_layers=5"),
    "experts": ({"num_experts": 4}, "not supported with experts"),
    "dropout": ({"residual_dropout": 0.1}, "residual_dropout=0.1 is not supported with stages"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_says_the_value_and_what_would_fit(name):
    values, said = REFUSED[name]
    with pytest.raises(ConfigError, match=f"(?s){said}") as refused:
        swin_config(**values)
    assert len(str(refused.value)) < 500


def test_one_stage_of_windows_is_a_model():
    assert swin_config(replace(WINDOWS, depths=(5,))).output_width == swin_config().hidden_size
