"""``verify --probe leak``: nothing leaks in a run's layouts, kernels, chunks and mixers; planted leaks are seen."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

import launcher.verification.leak_probe as leaks
from launcher.config.load_config import load_run_config
from launcher.verification.verify_run import probe_run
from longctx.batch import PackedDocuments, Stream
from tests.helpers import run_distributed
from tests.launcher.runs import TINY_MODEL

PROBED = {
    **TINY_MODEL,
    "model.num_experts": 0,
    "model.shared_ffn_size": 0,
    "model.ffn_size": 48,
    "data.seq_len": 128,
    "train.tokens_per_step": 128,
    "train.dtype": "float32",
    "parallel.context": 2,
    "run.hostfile": "none",
}
LINEAR = {"model.layers": "linear full"}
AHEAD = {"model.mtp_layers": 2, "train.mtp_weight": 0.3}
HYBRID = {"model.layers": "gated_delta full", "model.delta_value_heads": 8, "model.attention_gate": "true"}
BOTH_SIDES = {"model.causal": "false", "train.objective": "masked"}


def probe(changed: dict[str, Any]) -> str:
    words = [word for key, value in {**PROBED, **changed}.items() for word in (f"--{key}", *str(value).split())]
    found = probe_run(load_run_config(words), torch.device("cpu"))
    assert found.held == ("Nothing leaks" in found.text)
    return found.text


def nothing_leaks(ways: list[dict[str, Any]]) -> None:
    for changed in ways:
        text = probe(changed)
        assert "Nothing leaks" in text, f"{changed}\n{text}"


@pytest.mark.timeout(200)
def test_nothing_leaks():
    ways = [{}, {**LINEAR, "train.chunk_tokens": 20}, {**HYBRID, **AHEAD}, BOTH_SIDES]
    ways.append({"model.tie_embeddings": "false", "model.output_vocab_size": 3})
    run_distributed(nothing_leaks, 2, ways, timeout=180)


WAYS: dict[str, list[dict[str, Any]]] = {
    "layouts": [{"parallel.layout": layout} for layout in ("contiguous", "striped", "zigzag", "balanced")],
    "transports": [{"parallel.transport": "all_gather"}],
    "kernels": [{"parallel.kernel": kernel} for kernel in ("reference", "blockwise", "cpu_flash")],
    "chunks": [{"train.chunk_tokens": 17}, {"train.chunk_tokens": 17, "train.keep": "attention"}],
    "mixers": [LINEAR, {"model.layers": "full window", "model.window": 20}, {"model.position": "learned"}],
    "hybrids": [
        *({**HYBRID, "parallel.layout": layout} for layout in ("contiguous", "zigzag", "balanced")),
        {**HYBRID, "train.chunk_tokens": 17, "model.num_experts": 4},
        {"model.layers": "kda full", "train.chunk_tokens": 17},
    ],
    "experts": [{"model.num_experts": 4}],
    "further ahead": [
        AHEAD,
        {**AHEAD, "train.chunk_tokens": 17, "model.layers": "gated_delta full", "parallel.layout": "balanced"},
    ],
    "both sides": [
        {**BOTH_SIDES, "parallel.layout": "balanced"},
        {**BOTH_SIDES, **LINEAR, "train.chunk_tokens": 17},
        {
            **BOTH_SIDES,
            "model.position": "t5",
            "model.layers": "sparse full",
            "model.window": 5,
            "model.sparse_stride": 3,
        },
    ],
    "rows": [
        {
            "parallel.context": 1,
            "parallel.layout": "auto",
            "parallel.tokens_per_rank": 256,
            "train.tokens_per_step": 128 * 12,
        }
    ],
    "bfloat16": [{"train.dtype": "bfloat16"}, {**LINEAR, "train.dtype": "bfloat16", "zero.stage": 3}],
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("name", WAYS)
def test_nothing_leaks_in_the_whole_matrix(name, degree):
    ways = [{"parallel.context": degree, **way} for way in WAYS[name]]
    run_distributed(nothing_leaks, degree, ways, timeout=550)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_leaks_between_heads_and_experts_of_several_ranks():
    heads = {"parallel.context": 4, "parallel.ulysses": 2, "model.num_kv_heads": 2}
    run_distributed(nothing_leaks, 4, [heads, {**heads, "model.num_experts": 4, "parallel.expert": 2}], timeout=550)


@contextlib.contextmanager
def planted(change: Callable[[Stream], Stream]) -> Iterator[None]:
    packed_rows = leaks.packed_rows
    with patch.object(leaks, "packed_rows", lambda tokens, ids: change(packed_rows(tokens, ids))):
        yield


def one_document(stream: Stream) -> Stream:
    """Attention, and the state of linear layers, go over all boundaries of a row."""
    rows, tokens = stream.tokens.shape
    return dataclasses.replace(stream, documents=PackedDocuments.of_rows(rows, tokens))


def positions_go_on(stream: Stream) -> Stream:
    return dataclasses.replace(stream, positions=torch.arange(stream.tokens.shape[1]).expand_as(stream.tokens))


def leak(change: Callable[[Stream], Stream], changed: dict[str, Any], said: str) -> None:
    with planted(change):
        text = probe(changed)
    assert said in text, text


@pytest.mark.timeout(100)
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("change", "changed", "said"),
    [
        pytest.param(one_document, {}, "leak into each other", id="mask"),
        pytest.param(one_document, {"model.layers": "linear"}, "leak into each other", id="state"),
        pytest.param(one_document, {"model.layers": "gated_delta"}, "leak into each other", id="convolution"),
        pytest.param(positions_go_on, {"model.position": "learned"}, "positions continue", id="position"),
    ],
)
def test_a_planted_leak_is_seen(change, changed, said):
    run_distributed(leak, 2, change, changed, said, timeout=90)
