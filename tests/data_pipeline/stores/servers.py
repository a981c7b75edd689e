"""Servers that others have written of the two protocols, on loopback. A test of one that is not installed is skipped.

They are no part of the tools of the tests: moto brings 22 packages. Without it our own small server alone has answered
Arrow's client of S3, and nothing its client of Google Cloud Storage.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from data_pipeline.stores import client
from tests.launcher.runs import free_port

SCHEMES = ("s3", "gs")


@contextmanager
def empty_bucket(scheme: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with one bucket, and the environment that leads there; the bucket's URL."""
    client._connected.cache_clear()
    with {"s3": _moto, "gs": _emulator}[scheme](name, monkeypatch):
        yield f"{scheme}://{name}"
    client._connected.cache_clear()


@contextmanager
def _moto(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The field's own server of S3."""
    moto = pytest.importorskip(
        "moto.server",
        reason="moto is not installed: S3 is tested with our own server alone (pip install 'moto[server]')",
    )
    import pyarrow.fs as pafs

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "of-the-test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    address = {"endpoint_override": f"{host}:{port}", "scheme": "http", "region": "us-east-1", "request_timeout": 60}
    pafs.S3FileSystem(allow_bucket_creation=True, **address).create_dir(name)
    yield
    server.stop()


@contextmanager
def _emulator(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server of Google Cloud Storage that keeps its objects in memory."""
    pytest.importorskip(
        "gcp_storage_emulator",
        reason="gcp-storage-emulator is not installed: nothing answers gs:// (pip install gcp-storage-emulator)",
    )
    port = free_port()
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host=127.0.0.1", f"--port={port}"]
    # A process of its own: Arrow's client holds Python's lock while it waits for some answers.
    with subprocess.Popen(
        [*command, "--in-memory", f"--default-bucket={name}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            _wait_for(port)
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
            yield
        finally:
            server.kill()


def _wait_for(port: int, seconds: float = 60.0) -> None:
    """Until something listens there."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"nothing listens on port {port}"
            time.sleep(0.05)
