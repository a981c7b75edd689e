"""The record of a run: what is written is read back, a kill leaves nothing unreadable, a resume cuts cleanly."""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import sys
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from launcher.metrics.expert_load import (
    compact_record,
    idle_experts,
    idle_share,
    layer_numbers,
    load_entropy,
    max_over_mean,
    max_violation,
    mean_violation,
    steps_between_loads,
    worst_max_over_mean,
)
from launcher.metrics.metrics_console import EtaEstimator, console_line
from launcher.metrics.metrics_writer import LogSchedule, MetricsWriter, RecordWriter
from launcher.metrics.record import missing_steps, read_metrics, truncate_after
from launcher.run_folder import LOGS, start_logging
from longctx.errors import DataError
from tests.bounded import refusal

TRAIN = {
    "kind": "train",
    "step": 12,
    "loss": 5.10234,
    "balance_loss": 1.01,
    "lr": 4.9e-3,
    "grad_norm": 0.834,
    "tokens": 49152,
    "tokens_per_second": 10132.0,
    "step_seconds": 0.412,
    "data_wait_seconds": 0.001,
    "max_memory_bytes": 0,
    "model_tflops": 0.02,
    "mfu": None,
    "expert_layers": [1, 3],
    "expert_load": [[10, 10, 10, 10], [13, 9, 9, 9]],
    "expert_max_violation": [0.0, 0.3],
    "router_entropy": [1.2, 1.1],
    "time": "2025-01-01T00:00:00.000+00:00",
}
VALIDATION = {
    "kind": "validation",
    "step": 12,
    "loss": 4.8,
    "unigram_entropy": 6.1,
    "num_targets": 12288,
    "loss_by_position": [
        {"start": 0, "stop": 1, "loss": 6.5, "num_targets": 4},
        {"start": 1, "stop": 2, "loss": 6.0, "num_targets": 4},
    ],
    "time": "2025-01-01T00:00:01.000+00:00",
}


def train(step: int, **changes: object) -> dict:
    return {**TRAIN, "step": step, **changes}


def write_all(folder: Path, records: list[dict]) -> None:
    with closing(MetricsWriter(folder)) as writer:
        for record in records:
            writer.write(record)


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def no_constants(name: str) -> float:
    raise AssertionError(f"{name} in a file that should be strict JSON")


def test_what_is_written_is_read_back_as_soon_as_write_returns(tmp_path: Path) -> None:
    records = [TRAIN, VALIDATION, {"kind": "event", "event": "resume", "step": 12, "time": TRAIN["time"]}]
    with closing(MetricsWriter(tmp_path)) as writer:
        for number, record in enumerate(records, start=1):
            writer.write(record)
            assert read_metrics(tmp_path) == records[:number]


def test_a_file_that_was_removed_takes_no_more(tmp_path: Path) -> None:
    """The system would take every line, and nobody could read one."""
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(train(1))
        (tmp_path / "metrics.jsonl").unlink()
        with pytest.raises(OSError, match="the run's metrics file was removed"):
            writer.write(train(2))


def test_non_finite_numbers_survive_strict_json(tmp_path: Path) -> None:
    bins = [{"start": 0, "stop": 1, "loss": -math.inf, "num_targets": 1}]
    write_all(tmp_path, [train(1, loss=math.nan, grad_norm=math.inf), {**VALIDATION, "loss_by_position": bins}])
    raw = [json.loads(line, parse_constant=no_constants) for line in lines_of(tmp_path / "metrics.jsonl")]
    assert raw[0]["loss"] is None
    assert raw[0]["mfu"] is None
    assert raw[0]["non_finite"] == {"loss": "nan", "grad_norm": "inf"}
    assert raw[1]["non_finite"] == {"loss_by_position.0.loss": "-inf"}
    first, second = read_metrics(tmp_path)
    assert math.isnan(first["loss"])
    assert first["grad_norm"] == math.inf
    assert "non_finite" not in first
    assert second["loss_by_position"] == bins


@pytest.mark.parametrize(
    "record",
    [{"kind": "training", "step": 1}, {"kind": "train", "step": 1}, train(1.5), {"kind": "event", "step": 1}],  # type: ignore[arg-type]
)
def test_writer_refuses_a_record_no_reader_would_take(tmp_path: Path, record: dict) -> None:
    with closing(MetricsWriter(tmp_path)) as writer, pytest.raises(ValueError, match=r"kind|lacks|step"):
        writer.write(record)
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize(
    "bad", ["{", "[1]", '{"kind": "train", "step": 1}', '{"kind": "train", "step": 1, "loss": NaN}', "", '{"kind": []}']
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([json.dumps(TRAIN), bad, json.dumps(train(13))]) + "\n")
    for read in (read_metrics, lambda folder: truncate_after(folder, 0)):
        with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a metrics record"):
            read(tmp_path)
    assert len(lines_of(path)) == 3


@pytest.mark.parametrize("torn", [b'{"kind": "tra', b"\0\0\0\0", b"{"])
def test_a_torn_last_line_is_passed_over(tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json.dumps(TRAIN).encode() + b"\n" + torn)
    assert read_metrics(tmp_path) == [TRAIN]
    assert "metrics.jsonl:2" in caplog.text


def test_a_whole_last_line_without_its_end_counts(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(TRAIN))
    assert read_metrics(tmp_path) == [TRAIN]
    write_all(tmp_path, [train(13)])
    assert [record["step"] for record in read_metrics(tmp_path)] == [12, 13]


def test_truncate_moves_later_rows_of_every_kind(tmp_path: Path) -> None:
    event = {"kind": "event", "event": "resume", "step": 2, "time": "t"}
    records = [train(1), train(2), {**VALIDATION, "step": 2}, event, train(3), {**VALIDATION, "step": 3}, train(4)]
    write_all(tmp_path, records)
    before = lines_of(tmp_path / "metrics.jsonl")
    assert truncate_after(tmp_path, 2) == 3
    assert lines_of(tmp_path / "metrics.jsonl") == before[:4]
    assert lines_of(tmp_path / "metrics.discarded.jsonl") == before[4:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.discarded.jsonl", "metrics.jsonl"]


def test_truncate_appends_to_what_was_discarded_before(tmp_path: Path) -> None:
    write_all(tmp_path, [train(1), train(2)])
    truncate_after(tmp_path, 1)
    write_all(tmp_path, [train(2), train(3)])
    truncate_after(tmp_path, 1)
    discarded = [json.loads(line)["step"] for line in lines_of(tmp_path / "metrics.discarded.jsonl")]
    assert discarded == [2, 2, 3]
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]


def test_truncate_with_nothing_to_move_touches_nothing(tmp_path: Path) -> None:
    assert truncate_after(tmp_path, 5) == 0
    write_all(tmp_path, [train(1)])
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    assert truncate_after(tmp_path, 1) == 0
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before
    assert not (tmp_path / "metrics.discarded.jsonl").exists()


@pytest.mark.parametrize(("step", "moved", "left"), [(1, 2, [1, 3]), (None, 1, [1, 2, 3])])
def test_torn_text_moves_as_it_is_and_no_record_joins_it(tmp_path: Path, step, moved, left) -> None:
    write_all(tmp_path, [train(1), train(2)])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "train", "st')
    # Of itself the writer moves torn text alone.
    if step is not None:
        assert truncate_after(tmp_path, step) == moved
    write_all(tmp_path, [train(3)])
    discarded = lines_of(tmp_path / "metrics.discarded.jsonl")
    assert (len(discarded), discarded[-1]) == (moved, b'{"kind": "train", "st')
    assert [record["step"] for record in read_metrics(tmp_path)] == left


def test_rows_are_safe_before_the_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path, [train(1), train(2)])

    def die(*_: object) -> None:
        raise OSError("killed")

    monkeypatch.setattr("launcher.metrics.record.replaced_file", die)
    with pytest.raises(OSError, match="killed"):
        truncate_after(tmp_path, 1)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    assert json.loads((tmp_path / "metrics.discarded.jsonl").read_text())["step"] == 2


def test_expert_figures_by_hand() -> None:
    assert max_over_mean([6, 2, 0, 0]) == 3.0
    assert idle_share([6, 2, 0, 0]) == 0.5
    assert load_entropy([6, 2, 0, 0]) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert load_entropy([5, 5, 5, 5]) == pytest.approx(math.log(4))
    assert str(load_entropy([7, 0])) == "0.0"
    assert worst_max_over_mean([[1, 1], [3, 1], [0, 0]]) == 1.5
    assert worst_max_over_mean([]) is None
    assert max_violation([6, 2, 0, 0]) == 2.0
    assert mean_violation([6, 2, 0, 0]) == (4 + 0 + 2 + 2) / (4 * 2)
    assert max_violation([5, 5]) == mean_violation([5, 5]) == 0.0
    # Of a layer without tokens.
    assert all(math.isnan(figure([0, 0])) for figure in (max_over_mean, max_violation, mean_violation, load_entropy))
    assert idle_share([0, 0]) == 1.0


def test_a_record_of_an_earlier_release_counts_its_layers() -> None:
    assert layer_numbers(TRAIN) == [1, 3]
    assert layer_numbers({"expert_load": [[1], [1], [1]]}) == [0, 1, 2]
    assert layer_numbers({"expert_layers": [], "expert_load": []}) == []


def test_console_line_of_a_step() -> None:
    assert console_line(TRAIN, 500, seconds_left=201.0) == (
        "step  12/500   2%  loss 5.1023  grad 0.83  lr 4.9e-03  49.2k tokens  10.1k tok/s  0.41 s  data 0.00 s  "
        "experts max/mean 1.30  3 min left"
    )
    last = console_line(train(500), 500, seconds_left=0.0)
    assert last.startswith("step 500/500 100%  loss 5.1023")
    assert "left" not in last
    assert console_line(train(499), 500).startswith("step 499/500  99%"), "not done before the last step"


@pytest.mark.parametrize("columns", [60, 80, 100, 120])
def test_a_terminals_line_fits_it_and_loses_what_matters_least(columns: int) -> None:
    record = TRAIN | {"goodput": 0.9, "max_memory_bytes": 2**30, "mfu": 0.4, "expert_dropped_share": [0.25]}
    whole = console_line(record, 500, seconds_left=201.0).split("  ")
    short = console_line(record, 500, seconds_left=201.0, columns=columns)
    assert len(short) <= columns
    parts = short.split("  ")
    assert [part for part in whole if part in parts] == parts, "the order stays"
    assert {"loss 5.1023", "10.1k tok/s", "3 min left"} <= set(parts)
    assert "goodput 90.0%" not in parts


def test_a_validations_line_says_what_it_is_compared_with() -> None:
    record = {"kind": "validation", "step": 4, "loss": 8.0, "unigram_entropy": 4.9290, "num_targets": 6100}
    line = "step 4/4 100%  validation loss {}  {} the unigram entropy 4.9290  6.1k targets"
    assert console_line(record, 4) == line.format("8.0000", "3.0710 nats above")
    assert console_line(record | {"loss": 4.0}, 4) == line.format("4.0000", "0.9290 nats below")


def test_time_left_counts_validations_and_forgets_old_steps() -> None:
    pace = EtaEstimator(10, 100.0)
    assert pace.seconds_left(10, 20, 105.0) is None, "validated, no step taken"
    assert pace.seconds_left(11, 20, 107.0) == pytest.approx(9 * 7.0), "the validation before it is in the pace"
    assert pace.seconds_left(12, 20, 109.0) == pytest.approx(8 * 4.5)
    assert pace.seconds_left(20, 20, 125.0) == 0.0
    slow_then_fast = EtaEstimator(0, 0.0)
    for step in range(1, 301):
        left = slow_then_fast.seconds_left(step, 400, 1000.0 + step)
    assert left == pytest.approx(100.0)


def test_which_steps_get_a_line() -> None:
    lines = LogSchedule(total_steps=100, first_step=7, last_step=23, every=5)
    due = [step for step in range(8, 24) if lines.is_due(train(step))]
    assert due == [8, 10, 15, 20, 23], "the first and the last of this process too"
    assert lines.is_due({**VALIDATION, "step": 9})
    assert lines.is_due({"kind": "event", "event": "resume", "step": 7})
    broken = {"kind": "train", "step": 9, "loss": math.nan, "lr": 1e-3, "grad_norm": None}
    assert lines.is_due(broken), "it says why the run ends"


def test_ten_thousand_steps_of_a_large_model_stay_under_50_mb(tmp_path):
    """48 layers of 128 experts: 435 MB if every step had all its counts."""
    rng = np.random.default_rng(0)
    size = 0
    steps = [*range(1, 3), *range(1001, 1065)]  # 64 steps between two records with all counts
    with closing(MetricsWriter(tmp_path)) as writer:
        for step in steps:
            loads_LE = rng.multinomial(2_097_152, [1 / 128] * 128, size=48)
            loads_LE[:, rng.choice(128, 5)] = 0
            shares = rng.random((4, 48))
            figures = {"expert_load": loads_LE.tolist(), "expert_layers": list(range(48))}
            figures |= {"expert_max_violation": (loads_LE.max(1) / loads_LE.mean(1) - 1).tolist()}
            keys = ("expert_mean_violation", "expert_dropped_share", "router_entropy", "router_logit_rms")
            figures |= {key: row.tolist() for key, row in zip(keys, shares, strict=True)}
            writer.write(train(step, **figures, time="2026-01-01T00:00:00.000+00:00"))
            size = (tmp_path / "metrics.jsonl").stat().st_size
            if step == 2:
                first = size
    mean = (size - first) / 64
    assert mean * 10_000 < 45e6
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records if "expert_load" in record] == [1, 2, 1024]
    # What is left out of a step's counts: who was idle is exact.
    idle_LE = idle_experts(records[-1], 128)
    assert idle_LE is not None
    assert (idle_LE == (loads_LE == 0)).all()


@pytest.mark.parametrize(
    ("idle", "said"),
    [
        (base64.b64encode(zlib.compress(bytes(256 << 20), 9)).decode(), "does not cover 256 experts"),
        (base64.b64encode(zlib.compress(bytes(31))).decode(), "does not cover 256 experts"),
        (base64.b64encode(b"no zlib").decode(), "cannot be read"),
        ("A", "cannot be read"),
    ],
    ids=["a bomb", "too few", "no zlib", "no base64"],
)
def test_idle_experts_take_no_more_room_than_there_are_experts(idle: str, said: str):
    record = {"step": 7, "expert_idle": idle, "expert_layers": [0, 1]}
    message = refusal(lambda: idle_experts(record, 128))
    assert f"metrics.jsonl, step 7: expert_idle {said}" in message


def test_a_small_models_counts_stand_in_every_step():
    record = train(3)
    assert compact_record(record) == record
    assert steps_between_loads(8 * 64) == 1
    assert steps_between_loads(48 * 128) == 64


def test_gaps_between_rows_are_found(tmp_path):
    assert missing_steps(tmp_path, 3) == [range(1, 4)]
    write_all(tmp_path, [train(step) for step in (2, 3, 5, 9)])
    assert missing_steps(tmp_path, 9) == [range(1, 2), range(4, 5), range(6, 9)]
    assert missing_steps(tmp_path, 3) == [range(1, 2)]


def test_a_folder_that_goes_on_from_another_one_begins_there(tmp_path):
    resumed = {"kind": "event", "event": "resume", "step": 6, "time": TRAIN["time"]}
    write_all(tmp_path, [resumed, train(7), train(9)])
    assert missing_steps(tmp_path, 9) == [range(8, 9)]


LINES = LogSchedule(total_steps=9, first_step=0, last_step=9, every=4)


class Terminal(io.StringIO):
    """What a person watches."""

    def isatty(self) -> bool:
        return True


def record_three_steps(folder: Path, stream: io.StringIO, monkeypatch, *, is_rank_0: bool = True) -> str:
    """What a run of three steps writes to the console; its log is in ``folder``."""
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    (folder / LOGS).mkdir()
    start_logging(folder, 0 if is_rank_0 else 1)
    with RecordWriter(folder, LINES, is_rank_0=is_rank_0) as writer:
        for step in (1, 2, 3):
            writer.write(train(step))
            writer.set_activity("saving a checkpoint")
    assert sys.stdout is stream, "the terminal is given back"
    logging.getLogger("launcher").info("after")
    return stream.getvalue()


@pytest.mark.usefixtures("_own_handlers")
def test_a_terminal_sees_it_below_the_log_and_no_file_has_it(tmp_path, monkeypatch):
    said = record_three_steps(tmp_path, Terminal(), monkeypatch)
    assert "saving a checkpoint" in said
    assert "step 3/9" in said
    assert said.count("step 1/9  11%  loss 5.1023") == 1, "the line of the log stands above it"
    assert said.rstrip().endswith("after"), "the log goes on where it went before"
    text = (tmp_path / LOGS / "rank_0.log").read_text()
    assert text.count("\n") == 3, "the first step's line, where the time went, and what came after"
    assert "\x1b" not in text
    assert "saving a checkpoint" not in text
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3], "every step, whatever log_every is"


@pytest.mark.usefixtures("_own_handlers")
def test_other_ranks_draw_nothing(tmp_path, monkeypatch):
    assert record_three_steps(tmp_path, Terminal(), monkeypatch, is_rank_0=False) == ""
    assert not (tmp_path / "metrics.jsonl").exists()
