"""Traces of tiny models of images: no host waits, and windows' messages beside their plan."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config.load_config import load_run_config
from launcher.plan.planned_world import World
from launcher.plan.seconds import attention_of_stages
from launcher.plan.synthetic_documents import uniform_documents
from launcher.trace.link_traffic import WITHIN
from tests.launcher.runs import resolved
from tests.launcher.trace.test_trace import traced

pytestmark = pytest.mark.timeout(600)
WIDTH, TOKENS = 32, 72
"""Tokens: 6 × 12 patches, in windows of 3 × 3."""
SIZES = {
    "model.preset": "none",
    "model.hidden_size": WIDTH,
    "model.num_layers": 5,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 16,
    "model.ffn_size": 64,
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "parallel.context": 2,
    "parallel.layout": "contiguous",
    "zero.stage": 2,
    "train.dtype": "bfloat16",
    "data.seq_len": TOKENS,
    "train.tokens_per_step": TOKENS,
}
CLASSES = {"model.causal": "false", "model.vocab_size": 0, "train.objective": "classes", "model.classes": 5}
OF_PATCHES = {"model.image.height": 12, "model.image.width": 24, "model.image.patch": 2}
SWIN = {
    **SIZES,
    **CLASSES,
    **OF_PATCHES,
    "model.position": "none",
    "model.embedding_norm": "true",
    "model.layers": "image_window shifted_window",
    "model.class_pool": "mean",
    "model.image.window": 3,
    "model.image.depths": "2 3",
}
VIT = {**SIZES, **CLASSES, **OF_PATCHES, "model.position": "learned", "model.max_positions": 73}
VIT |= {"model.image.class_token": "true", "data.seq_len": 80, "train.tokens_per_step": 80}
IGPT = {
    **SIZES,
    "model.position": "learned",
    "model.vocab_size": 13,
    "model.output_vocab_size": 12,
    "model.tie_embeddings": "false",
    "model.max_positions": TOKENS,
    "model.image.height": 6,
    "model.image.width": 12,
    "model.classes": 5,
    "model.class_pool": "mean",
    "train.class_weight": 0.5,
}
CHUNKS = {"train.chunk_tokens": 10, "train.keep": "attention"}
TWO = {"ranks": 2, "ranks_per_node": 2}


def case(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    settings = values | {name.replace("__", "."): value for name, value in changes.items()}
    return {"flags": [word for key, value in settings.items() for word in (f"--{key}", *f"{value}".split())], **_RANK}


_RANK = {"world": TWO, "rank": 1}
CASES = {
    "windows": case(SWIN, train__keep="all"),
    "windows by chunks": case({**SWIN, **CHUNKS}),
    "patches": case(VIT),
    "patches by chunks": case({**VIT, **CHUNKS}, train__store="host"),
    "pixels": case(IGPT),
    "pixels by chunks": case({**IGPT, **CHUNKS}, train__store="host"),
}


@pytest.fixture(scope="module")
def traces(cuda_python) -> dict[str, dict[str, Any]]:
    return traced(cuda_python, CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_step_on_images_waits_for_nothing(name, traces):
    assert (traces[name]["host_waits"], traces[name]["is_whole"]) == ([], True)


def test_windows_receive_what_the_plan_says(traces):
    config = resolved(load_run_config(CASES["windows"]["flags"]), ranks=2)
    work = attention_of_stages(config, World(**TWO), 1, uniform_documents(config))
    (found,) = [x for x in traces["windows"]["links"] if x["what"] == "all-to-all over the sequence"]
    assert found["link"] == WITHIN
    # Gradients move as the values did. The first windows of each rank cover the patches that its layout gave it.
    assert found["received_bytes"] == 2 * work.received_in_node > 0


def test_recomputed_windows_send_queries_keys_and_values_again(traces):
    plain, again = (_received(traces[name]) for name in ("windows", "windows by chunks"))
    assert plain < again < 2 * plain


def _received(trace: dict[str, Any]) -> int:
    return sum(x["received_bytes"] for x in trace["links"] if x["what"].startswith("all-to-all"))
