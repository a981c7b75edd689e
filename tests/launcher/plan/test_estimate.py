"""``plan``: bytes beside what traces counted, seconds beside arithmetic by hand, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan_bytes import CASES, LEAST, MOST, errors, load_rows, planned
from launcher.config.load_config import load_run_config
from launcher.plan.estimate import estimate_run, max_row_tokens
from launcher.plan.hardware import load_hardware
from launcher.plan.planned_world import World
from longctx.errors import ConfigError

LLAMA = ["--config", "quickstart", "--model.preset", "llama-3.1-8b", "--parallel.expert", "1"]
MILLION = [
    *LLAMA,
    *("--parallel.context", "8", "--data.seq_len", "1048576", "--train.tokens_per_step", "1048576"),
    *("--train.keep", "attention", "--zero.stage", "3"),
]


def estimate(*flags: str, device: str = "h100"):
    config = load_run_config([*MILLION, *flags])
    return estimate_run(config, World.of(config), load_hardware(device))


def test_seconds_of_attention_are_its_flops_over_the_rates():
    run = estimate()
    n, hardware = 1048576, load_hardware("h100")
    forward = 32 * 4 * 32 * 128 * (n * (n + 1) // 2) / 8
    wanted = forward / hardware.attention_flops.at() + 2.5 * forward / hardware.attention_backward_flops.at()
    assert run.seconds.attention == pytest.approx(wanted, rel=0.01)


def test_experts_may_be_spread_over_several_sequences():
    flags = ["--config", "quickstart", "--model.preset", "qwen3-30b-a3b", "--parallel.expert", "8", "--zero.stage", "3"]
    rows = ["--parallel.context", "2", "--data.seq_len", "65536", "--train.tokens_per_step", "262144"]
    config = load_run_config([*flags, *rows])
    run = estimate_run(config, World(ranks=8, ranks_per_node=8), load_hardware("h100"))
    assert {rank.kind.rank for rank in run.ranks} == {0, 1, 7}
    first, *others = (rank.seconds.attention for rank in run.ranks)
    # Zigzag: every rank of every sequence computes as much.
    assert all(other == pytest.approx(first, rel=0.01) for other in others)


def test_muon_has_one_moment_and_products_of_its_own():
    adamw, muon = estimate(), estimate("--train.optimizer", "muon")
    sizes = {(4096, 4096): 2, (1024, 4096): 2, (4096, 14336): 3}
    values = 32 * sum(count * rows * columns for (rows, columns), count in sizes.items())
    less = adamw.ranks[0].bytes.optimizer - muon.ranks[0].bytes.optimizer
    assert less == pytest.approx(4 * values / 8, rel=1e-6)

    hardware, seconds = load_hardware("h100"), 0.0
    for (rows, columns), count in sizes.items():
        flops = 5 * (4 * rows**2 * columns + 2 * rows**3)
        sent = 2 * 4 * rows * columns / 8
        rate = hardware.product_flops.at("bfloat16", tokens=rows, width=(rows * columns) ** 0.5)
        seconds += 32 * count * (flops / rate / 8 + sent / hardware.node_bandwidth.at(bytes=sent))
    assert muon.seconds.optimizer - adamw.seconds.optimizer == pytest.approx(seconds, rel=1e-6)


def test_keeping_inputs_computes_attention_forward_twice():
    once, twice = estimate(), estimate("--train.keep", "inputs")
    assert twice.seconds.attention > 1.2 * once.seconds.attention
    assert twice.seconds.products == once.seconds.products


def test_a_million_tokens_need_chunks():
    chunks = ("--train.store", "host", "--train.chunk_tokens", "4096", "--train.head_groups", "8")
    assert not estimate().fits
    run = estimate(*chunks)
    assert run.fits
    assert run.peak_bytes < 45e9
    assert not estimate(*chunks, "--data.seq_len", "8388608", "--train.tokens_per_step", "8388608").fits


def test_utilisation_is_known_where_the_peak_is(tmp_path):
    run = estimate()
    counted, full = run.utilisation(run.model_flops), run.utilisation(run.full_flops)
    assert counted is not None
    assert full is not None
    assert 0.2 < counted < full < 1


@pytest.mark.parametrize("limit", [0, 1, 127, 128, 129, 12345, 1 << 20])
def test_the_longest_row_is_the_longest(limit, monkeypatch):
    monkeypatch.setattr("launcher.plan.estimate.fits", lambda config, *_, **__: config.data.seq_len <= limit)
    run = estimate("--data.seq_len", "128", "--train.tokens_per_step", "128", "--parallel.context", "1")
    assert max_row_tokens(run.config, run.world, run.hardware) == limit // 128 * 128


def _profile(tmp_path: Path, **changes: str) -> str:
    text = (Path(__file__).parents[3] / "launcher/plan/profiles/h100.toml").read_text()
    for old, new in changes.items():
        text = text.replace(f"[{old}]\n", new)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_flops": "[peek_flops]\n"}, "peek_flops is unknown, peak_flops is missing"),
        ({"memory_bytes": "[memory_bytes]\nvalue = -1\n[other]\n"}, "is not a valid profile"),
        ({"memory_bytes": "[[["}, "is not TOML"),
        ({"memory_bytes": '[hidden_share]\nvalue = true\nsource = "x"\n[memory_bytes]\n'}, "hidden_share is"),
        ({"memory_bytes": '[hidden_share]\nvalue = 1.5\nsource = "x"\n[memory_bytes]\n'}, "hidden_share is"),
    ],
)
def test_a_wrong_profile_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_hardware(_profile(tmp_path, **changes))


def test_a_figure_without_source_is_refused(tmp_path):
    path = Path(_profile(tmp_path))
    path.write_text(path.read_text().replace('source = "assumed: 0.75 of the peak"', 'source = ""'))
    with pytest.raises(ConfigError, match="product_flops is"):
        load_hardware(str(path))


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_every_shipped_figure_has_a_source(name):
    hardware = load_hardware(name)
    assert all(len(source) > 10 for source in hardware.sources.values())
    assert hardware.attention_flops.at() < hardware.product_flops.at() < hardware.peak_flops


TRACED = load_rows()


@pytest.mark.few(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_are_those_of_the_trace(case):
    traced = TRACED[case.name]
    run = planned(case, few=traced["few_layers"])
    for error in errors(run, traced):
        assert LEAST <= error <= MOST
    of_bytes = run.ranks[0].bytes
    assert of_bytes.kept == pytest.approx(traced["kept"], rel=0.02, abs=2**20)
    assert of_bytes.kept_on_host == pytest.approx(traced["kept_on_host"], rel=0.02, abs=2**20)
