"""Checkpoints in moto, the field's own S3 server, where it is installed (see ``tests/data_pipeline/stores``)."""

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
from tests.launcher.checkpoint.test_store import content, save

moto = pytest.importorskip(
    "moto.server", reason="moto is not installed: S3 is tested with our own server alone (pip install 'moto[server]')"
)
ADDRESS = "s3://shelf/runs/first"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty bucket s3://shelf."""
    import pyarrow.fs as pafs

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-the-test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client._connected.cache_clear()
    address = {"endpoint_override": f"{host}:{port}", "scheme": "http", "region": "us-east-1", "request_timeout": 60}
    pafs.S3FileSystem(allow_bucket_creation=True, **address).create_dir("shelf")
    yield
    server.stop()
    client._connected.cache_clear()


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
