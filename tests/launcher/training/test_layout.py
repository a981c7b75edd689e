"""A run's ``parallel.layout = "auto"``: settled once, said in the log, and the same when the run goes on."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from data_pipeline.shards.reader import ShardSet
from launcher.run_folder import CONFIG_FILE
from launcher.training.run_data import leaves_remainders
from tests.data_pipeline.lengths import write_lengths
from tests.data_pipeline.preference_records import write_preferences
from tests.launcher.workers import rows, run, train, train_each

pytestmark = pytest.mark.timeout(240)

AUTO = {
    "parallel.layout": "auto",
    "parallel.context": 2,
    "train.steps": 4,
    "checkpoint.every_steps": 2,
    "validation.rows": 0,
    "validation.every_steps": 0,
}
SAID = "parallel.layout=auto is balanced: for packed documents"


def settled(folder: Path) -> str:
    return tomllib.loads((folder / CONFIG_FILE).read_text())["parallel"]["layout"]


def stop_and_go_on(shards: Path, whole: Path, named: Path, stopped: Path) -> None:
    """A run with auto, the same with its layout named, and one that stops half way and goes on."""
    half = {**AUTO, "train.stop_after": 2}
    train_each(shards, {whole: AUTO, named: {**AUTO, "parallel.layout": "balanced"}, stopped: half})
    train(shards, stopped, {**AUTO, "run.resume": "latest"})


@pytest.mark.slow
def test_auto_is_settled_and_stays_the_same_when_the_run_goes_on(shards, tmp_path):
    whole, named, stopped = (tmp_path / name for name in ("whole", "named", "stopped"))
    run(stop_and_go_on, 2, shards, whole, named, stopped)
    assert [settled(folder) for folder in (whole, named, stopped)] == ["balanced"] * 3
    assert rows(whole) == rows(named) == rows(stopped), "to the last bit"
    logs = {folder: (folder / "logs" / "rank_0.log").read_text() for folder in (whole, named, stopped)}
    assert [logs[folder].count(SAID) for folder in (whole, named, stopped)] == [1, 0, 2]


@pytest.mark.parametrize(
    ("lengths", "seq_len", "expected"),
    [
        ([8, 16, 24], 8, False),
        ([8, 16, 23], 8, True),  # so is the sum
        ([8, 12, 12], 8, True),  # the sum is a multiple
        ([4, 4], 8, True),  # two documents share a row
        ([64] * 9, 32, False),
        ([64] * 9, 128, True),
    ],
)
def test_rows_are_packed_where_a_document_is_no_multiple_of_them(lengths, seq_len, expected, shards, tmp_path):
    tokenizer = ShardSet.open(shards, verify=False).tokenizer()
    written = write_lengths(tmp_path / "data", tokenizer, lengths)
    assert leaves_remainders([written], seq_len) is expected


def test_rows_of_preferences_are_packed(shards, tmp_path):
    tokenizer = ShardSet.open(shards, verify=False).tokenizer()
    assert leaves_remainders([write_preferences(tmp_path / "data", tokenizer, [(8, 8, 8)])], 8)


def test_rows_are_judged_by_the_first_documents(shards, tmp_path, monkeypatch):
    tokenizer = ShardSet.open(shards, verify=False).tokenizer()
    written = write_lengths(tmp_path / "data", tokenizer, [8] * 50 + [12, 12])
    assert leaves_remainders([written], 8)
    monkeypatch.setattr("launcher.training.run_data._MAX_DOCUMENTS_READ", 50)
    assert not leaves_remainders([written], 8)
