"""Checkpoints in moto, the field's own S3 server, where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.stores import client
from launcher.checkpoint.mirror import Mirror
from launcher.checkpoint.names import folder_of
from launcher.checkpoint.retention import Retention
from launcher.checkpoint.store import check_unused, store_at
from longctx.errors import ConfigError
from tests.data_pipeline.stores.moto_server import empty_bucket
from tests.launcher.checkpoint.test_store import content, save

ADDRESS = "s3://shelf/runs/first"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty bucket s3://shelf."""
    with empty_bucket("shelf", monkeypatch):
        yield


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sent_pruned_verified_and_fetched(bucket: None, tmp_path: Path):
    store, run = store_at(ADDRESS), tmp_path / "run"
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
    assert [stored.verify() for stored in store.committed().values()] == [[], []]
    assert store.of_step(3).candidate(3).is_proved
    assert content(store.fetch(3, tmp_path / "other")) == content(folder_of(run, 3))
    client.write_object(store.of_step(3).place / "f0.safetensors", b"rubbish")
    assert any("f0.safetensors is damaged" in problem for problem in store.of_step(3).verify())
    with pytest.raises(ConfigError, match="holds checkpoints already, the newest of step 3"):
        check_unused(store)
