"""The benchmark of builds at a small size: both sides get the same text, and a figure of each comes out."""

from __future__ import annotations

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
