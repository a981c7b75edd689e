"""A store on loopback for every test here, and a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.stores import client
from tests.data_pipeline.stores.s3_server import S3Server, Store


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    found = S3Server()
    yield found
    found.stop()


@pytest.fixture
def store(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store behind s3://corpora, and the environment that leads there."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-key-of-the-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-of-the-test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(client, "_ATTEMPTS", 2)
    client._connected.cache_clear()
    server.store.objects.clear()
    server.store.requests.clear()
    server.store.fault = lambda method, path: ""
    return server.store


def fill(store: Store, folder: Path, to: str) -> None:
    """Put the files of a folder into the store."""
    for path in folder.rglob("*"):
        if path.is_file():
            store.objects[f"{to}/{path.relative_to(folder)}"] = path.read_bytes()
