"""moto, the field's own S3 server, on loopback. Whatever imports this is skipped where moto is not installed.

It brings 22 packages and is no part of the tools of the tests. Without it our own small server alone has answered
Arrow's client: `pip install 'moto[server]'`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from data_pipeline.stores import client

moto = pytest.importorskip(
    "moto.server", reason="moto is not installed: S3 is tested with our own server alone (pip install 'moto[server]')"
)


@contextmanager
def empty_bucket(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server with one bucket, and the environment that leads there."""
    import pyarrow.fs as pafs

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "of-the-test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client._connected.cache_clear()
    address = {"endpoint_override": f"{host}:{port}", "scheme": "http", "region": "us-east-1", "request_timeout": 60}
    pafs.S3FileSystem(allow_bucket_creation=True, **address).create_dir(name)
    yield
    server.stop()
    client._connected.cache_clear()
