"""The benchmark of builds at a small size: both sides get the same text, and a figure of each comes out."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from benchmarks import build


@pytest.mark.slow
def test_both_encode_the_same_text(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "LONG_BYTES", 100_000)
    monkeypatch.setattr(build, "VOCABULARY", 1000)
    monkeypatch.setattr(build, "SAMPLE_BYTES", 200_000)
    monkeypatch.setattr(build, "run_ranks", lambda function, _, *arguments, preload: [function(*arguments)])
    result = build.measure(tmp_path, 300_000)
    assert result["alone"]["text_bytes"] == result["built"]["text_bytes"] > 500_000
    # Each document has a begin and an end beside what SentencePiece gives.
    assert result["built"]["tokens"] > result["alone"]["tokens"]
    assert 20 < result["built"]["peak_mb"] < 3000
    assert {bound.what for bound in build.bounds_of(result)} == {
        "text a second of CPU over SentencePiece's",
        "text a second over SentencePiece's",
        "MB of all processes",
    }


def test_memory_is_that_of_all_processes_together():
    held = "import time; held = bytearray(64 << 20); held[::4096] = b'x' * (1 << 14); time.sleep(60)"
    parent = (
        f"import subprocess, sys; {held.replace('time.sleep(60)', '')}subprocess.run([sys.executable, '-c', {held!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    try:
        with build._Watch(process.pid) as watch:
            deadline = time.monotonic() + 30
            while watch.most < 130e6 and time.monotonic() < deadline:
                time.sleep(0.1)
        assert watch.processes == 2
        assert 130e6 < watch.most < 300e6
    finally:
        os.killpg(process.pid, 9)
        process.wait()
