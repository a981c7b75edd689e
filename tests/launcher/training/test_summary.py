"""What a run says before anything is built, and what it warns of: figures to lines, without ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.rows.epoch_blocks import PackReport
from launcher.config.load_config import load_run_config
from launcher.plan.memory_estimate import GIB, memory_of_rank
from launcher.training.run_origin import RunOrigin
from launcher.training.summary import Start, changed_settings, details, header, outlook, warnings
from parallel.mesh import Mesh
from tests.launcher.runs import resolved

SETTINGS: dict[str, Any] = {
    "data.seq_len": 2048,
    "train.tokens_per_step": 4096,
    "train.steps": 700,
    "train.optimizer": "adamw",
    "train.lr": 5e-3,
    "parallel.layout": "zigzag",
    "checkpoint.every_steps": 175,
    "model.tie_embeddings": True,
}
FLAGS = [word for key, value in SETTINGS.items() for word in (f"--{key}", str(value))]


def start(flags: list[str] | None = None, **figures: Any) -> Start:
    """A run of the quickstart over two ranks, with some figures changed."""
    config = resolved(load_run_config([*FLAGS, *(flags or [])]), ranks=2)
    mesh = Mesh(rank=0, world_size=2, context=2, ranks_per_node=2)
    known: dict[str, Any] = {
        "config": config,
        "model": config.model.config(),
        "mesh": mesh,
        "device": "cpu",
        "origin": RunOrigin(kind="new"),
        "memory": memory_of_rank(config, config.model.config(), 2),
        "free_bytes": 12 * GIB,
        "free_disk_bytes": 100 * GIB,
        "packing": packing(),
    }
    return Start(**(known | figures))


def packing(**figures: Any) -> PackReport:
    """Of 2,000 rows, all of them counted."""
    counted = PackReport(
        rows=2000,
        tokens=4_044_800,
        padding_tokens=51_200,
        padding_share=0.0125,
        documents_cut=3,
        truncated_tokens=0,
        planned_documents=5000,
        exact=True,
    )
    return dataclasses.replace(counted, **figures)


def test_a_run_says_what_it_is():
    begun = [
        "Model: 1.61M parameters, 1.02M active per token; 2 layers of width 128; 8 experts",
        "Ranks: 2 ranks = data 1 × context 2 on cpu, zigzag rows by p2p, ZeRO 1, float32.",
        "Memory: at least 36 MiB per rank",
        *("ZeRO 0: 25 MiB", "ZeRO 1, this run: 21 MiB", "ZeRO 2: 18 MiB", "ZeRO 3: 15 MiB"),
        "Steps: 700 steps of 4,096 tokens = 2 rows of 2,048 tokens, in 2 micro-batches per rank; rate 0.005",
        "Data: 2.87M tokens in all, 0.70 passes over 2,000 rows with 1.25 % padding",
        "Checkpoints: 4 to come, 18 MiB each; the newest 2 stay; 100.0 GiB",
    ]
    said = header(start()) + details(start())
    assert [line[: len(words)] for line, words in zip(said, begun, strict=True)] == begun
    assert warnings(start()) == []
    assert outlook(start(), 420 * 2**20, 0.19) == (
        "Plan: 700 steps of 4,096 tokens, 0.70 passes over the data; 0.19 s per step, 2 min in all; "
        "420 MiB per rank at the peak."
    )
    assert "s per step" not in outlook(start(), 420 * 2**20, None)


@pytest.mark.parametrize(
    ("flags", "step", "to_come"),
    [
        ([], 0, 4),
        ([], 350, 2),
        ([], 351, 2),
        ([], 700, 0),
        (["--checkpoint.every_steps", "0"], 0, 1),
        (["--checkpoint.every_steps", "300"], 0, 3),
        (["--train.stop_after", "200"], 0, 2),
    ],
)
def test_checkpoints_to_come(flags, step, to_come):
    origin = RunOrigin(kind="resumed", folder=Path("x"), step=step)
    assert start(flags, origin=origin).num_checkpoints == to_come


# Warnings: each of these was silent.


def only_warning(said: Start) -> str:
    (found,) = warnings(said)
    return found


@pytest.mark.parametrize(
    ("flags", "figures", "words"),
    [
        ([], {"free_bytes": 100 * 2**20}, ["Memory is tight", "116 MiB for this machine's 2 ranks, and 100 MiB are"]),
        (["--model.max_positions", "1024"], {}, ["data.seq_len=2048 exceeds", "set model.max_positions=2048"]),
        (["--train.steps", "10"], {}, ["train.warmup_steps=40 is not below train.steps=10", "0.00125"]),
        ([], {"packing": packing(rows=1)}, ["takes 2 rows and the data has 1: rows repeat"]),
        ([], {"packing": packing(rows=1, exact=False)}, ["takes 2 rows and the data has about 1: rows repeat"]),
        ([], {"free_disk_bytes": 30 * 2**20}, ["3 checkpoints take 55 MiB, and 30 MiB of disk are free"]),
    ],
)
def test_what_a_run_may_not_have_meant(flags, figures, words):
    said = only_warning(start(flags, **figures))
    assert all(word in said for word in words), said


def test_a_resume_that_changes_rate_layout_or_steps():
    before = dataclasses.asdict(start().config)
    origin = RunOrigin(kind="resumed", folder=Path("x"), step=100, settings=before)
    assert warnings(start(origin=origin)) == []
    changed = ["--train.lr", "1e-3", "--train.steps", "900", "--data.train", "moved", "--train.stop_after", "300"]
    said = only_warning(start([*changed, "--parallel.layout", "striped", "--zero.stage", "2"], origin=origin))
    assert "train.steps 700 → 900, train.lr 0.005 → 0.001, parallel.layout zigzag → striped, zero.stage 1 → 2." in said


def test_other_tokens_a_step_change_the_schedule_and_say_how():
    before = dataclasses.asdict(start().config)
    origin = RunOrigin(kind="resumed", folder=Path("x"), step=100, settings=before)
    said = only_warning(start(["--train.tokens_per_step", "8192"], origin=origin))
    assert "train.tokens_per_step 4096 → 8192." in said
    # 100 steps of 4,096 tokens and 600 of 8,192, where 700 of 4,096 were planned.
    assert "700 steps will have seen 5.32M tokens instead of 2.87M; train.steps=400 keeps the tokens." in said


def test_a_key_of_a_later_release_is_no_change():
    before = dataclasses.asdict(start().config)
    del before["train"]["z_loss"], before["zero"]
    assert changed_settings(before, start().config) == {}
