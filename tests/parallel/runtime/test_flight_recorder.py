"""What is left of the collectives of a run on GPUs: where the files lie, and what a user reads of them."""

from __future__ import annotations

import os

import pytest

from parallel.runtime import flight_recorder
from parallel.runtime.flight_recorder import dump_collectives, record_collectives, trace_hint

NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
OTHERS = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in (*NAMES, *OTHERS):
        # Set, then removed: the fixture then undoes what the product sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path):
    assert trace_hint() == ""
    dump_collectives(0)
    assert list(tmp_path.iterdir()) == []


def test_nccl_is_told_where_its_traces_go_and_the_user_how_to_read_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    record_collectives(tmp_path / "logs")
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7", "what the user has set stays"
    assert all(os.environ[name] for name in OTHERS)
    prefix = str(tmp_path / "logs" / "nccl_trace_rank_")
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == prefix
    assert f"{prefix}N" in trace_hint()
    assert f"torchfrtrace --prefix nccl_trace_rank_ {tmp_path / 'logs'}" in trace_hint()


def test_a_failing_rank_writes_its_last_collectives_where_nccl_has_not(tmp_path, monkeypatch):
    record_collectives(tmp_path / "logs")
    monkeypatch.setattr(flight_recorder.distributed_c10d, "_dump_nccl_trace", lambda: b"trace", raising=False)
    dump_collectives(3)
    path = tmp_path / "logs" / "nccl_trace_rank_3"
    assert path.read_bytes() == b"trace"
    path.write_bytes(b"of NCCL")
    dump_collectives(3)
    assert path.read_bytes() == b"of NCCL"

    def fails() -> bytes:
        raise RuntimeError("stuck")

    monkeypatch.setattr(flight_recorder.distributed_c10d, "_dump_nccl_trace", fails)
    dump_collectives(4)
    assert not (tmp_path / "logs" / "nccl_trace_rank_4").exists()
