"""``data plan`` and ``data sample``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.launcher.cli.calls import call, flip_a_byte, refused, succeed
from tests.launcher.runs import TINY_MODEL

RUN = {
    **TINY_MODEL,
    "data.seq_len": 256,
    "train.tokens_per_step": 2048,
    "parallel.context": 1,
    "parallel.expert": 1,
    "run.hostfile": "none",
}
FLAGS = [word for key, value in RUN.items() for word in (f"--{key}", value)]


def test_a_plan_says_what_packing_costs_and_how_even_ranks_are(capsys, shards: Path):
    out = succeed(capsys, "data", "plan", *FLAGS, "--data.train", shards, "--ranks", 2)
    for words in ("on 2 data ranks, 4 rows per step on each", "padding", "busiest rank, rows data.balance"):
        assert words in out
    assert "about" not in out, "a small corpus is counted"


def test_where_ranks_meet_in_each_micro_batch_it_is_that_ones_busiest_rank(capsys, shards: Path):
    """Stage 2, which ``auto`` is on GPUs."""
    words = ["--data.train", shards, "--ranks", 2, "--run.device", "cuda"]
    out = succeed(capsys, "data", "plan", *FLAGS, *words)
    assert "busiest rank per micro-batch, rows data.balance" in out


def test_json_has_the_factors_of_each_step(capsys, shards: Path):
    out = succeed(capsys, "data", "plan", *FLAGS, "--data.train", shards, "--ranks", 2, "--json")
    found = json.loads(out)
    assert len(found["work"]["in_order"]) == len(found["work"]["balanced"]) > 0
    assert min(found["work"]["balanced"]) >= 1
    assert found["packing"]["truncated_tokens"] == 0


def test_ranks_are_those_of_the_hostfile(capsys, shards: Path, tmp_path):
    (tmp_path / "hostfile").write_text("a slots=2\nb slots=2\n")
    words = ["--data.train", shards, "--run.hostfile", tmp_path / "hostfile"]
    assert "on 4 data ranks" in succeed(capsys, "data", "plan", *FLAGS, *words)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--data.train", "nowhere"], 1, "nowhere is not a shard folder"),
        (["--ranks", "3"], 2, "is not a multiple of 768"),
        (["--ranks", "-1"], 2, "--ranks -1 must be at least 1"),
    ],
)
def test_bad_input_is_refused_on_one_screen(capsys, words, code, said):
    err = refused(capsys, code, "data", "plan", *FLAGS, *words)
    assert said in err


def test_a_sample_is_the_rows_as_text(capsys, shards: Path, tmp_path):
    written = tmp_path / "rows.txt"
    words = ("data", "sample", shards, "--seq-len", 128, "--rows", 3)
    out = succeed(capsys, *words)
    assert [line.split(" (")[0] for line in out.splitlines() if line.startswith("════")] == [
        *("════ row 0", "════ row 1", "════ row 2")
    ]
    said = succeed(capsys, *words, "--output", written)
    assert f"Written to {written}" in said
    assert written.read_text().split() == out.split()


def test_a_sample_ends_with_the_epoch(capsys, shards: Path):
    out = succeed(capsys, "data", "sample", shards, "--seq-len", 4096, "--rows", 10**6)
    assert 1 < out.count("════ row") < 10**6


@pytest.fixture
def mixture(shards: Path, tmp_path: Path) -> Path:
    """The tiny corpus twice, under two names."""
    tables = [
        f'[[sources]]\nname = "{name}"\npath = "{shards}"\nweight = {weight}\n' for name, weight in (("a", 1), ("b", 3))
    ]
    path = tmp_path / "mixture.toml"
    path.write_text("".join(tables) + "[[stages]]\nfrom_tokens = 1024\nrow_tokens = 64\nweights = { a = 3 }\n")
    return path


def test_a_mixture_is_shown_planned_sampled_and_verified(capsys, mixture: Path, shards: Path):
    out = succeed(capsys, "data", "inspect", mixture)
    assert [line.split()[-2:] for line in out.splitlines()[1:3]] == [["25.0%", "50.0%"], ["75.0%", "50.0%"]]
    assert "rows of 64 tokens" in out
    assert json.loads(succeed(capsys, "data", "inspect", mixture, "--json"))["shares"] == [[0.25, 0.75], [0.5, 0.5]]
    out = succeed(capsys, "data", "plan", *FLAGS, "--data.train", mixture, "--ranks", 2)
    assert "tokens in the run" in out
    out = succeed(capsys, "data", "sample", mixture, "--seq-len", 256, "--rows", 3, "--first-row", 3)
    assert "════ row 3 " in out
    assert out.count("════ row") == 3
    out = succeed(capsys, "data", "verify", mixture)
    assert "mixture.toml is intact: " in out


def test_a_damaged_source_of_a_mixture_is_named(capsys, mixture: Path, shards: Path, tmp_path: Path):
    copy = Path(shutil.copytree(shards, tmp_path / "copy"))
    mixture.write_text(mixture.read_text().replace(f'name = "b"\npath = "{shards}"', f'name = "b"\npath = "{copy}"'))
    shard = next(copy.glob("*.arrow"))
    flip_a_byte(shard)
    code, out, _ = call(capsys, "data", "verify", mixture)
    assert code == 1
    assert str(shard) in out
