"""Checkpoints in servers that others have written, where they are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.stores import client
from launcher.checkpoint.checkpoint_store import check_unused, store_at
from launcher.checkpoint.mirror import Mirror
from launcher.checkpoint.names import folder_of
from launcher.checkpoint.retention import Retention
from longctx.errors import ConfigError
from tests.data_pipeline.stores.servers import SCHEMES, empty_bucket
from tests.launcher.checkpoint.test_checkpoint_store import content, save


@pytest.fixture(params=SCHEMES)
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket."""
    with empty_bucket(request.param, "shelf", monkeypatch) as url:
        yield url


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sent_pruned_verified_and_fetched(bucket: str, tmp_path: Path):
    store, run = store_at(f"{bucket}/runs/first"), tmp_path / "run"
    check_unused(store)
    mirror = Mirror(run, store, Retention(last=2), step=0)
    mirror.start()
    for step in (1, 2, 3):
        mirror.add(save(run, step, is_proved=True))
        mirror.finish(120)
        # Each in a process of its own, as after a stop.
        mirror = Mirror(run, store, Retention(last=2), step=step)
        mirror.start()
    mirror.finish(120)
    assert sorted(store.steps()) == [2, 3]
    assert [stored.verify() for stored in store.checkpoints().values()] == [[], []]
    assert store.of_step(3).candidate(3).is_stable
    assert content(store.fetch(3, tmp_path / "other")) == content(folder_of(run, 3))
    client.write_object(store.of_step(3).place / "f0.safetensors", b"rubbish")
    assert any("f0.safetensors is damaged" in problem for problem in store.of_step(3).verify())
    with pytest.raises(ConfigError, match="already holds checkpoints, the newest at step 3"):
        check_unused(store)
