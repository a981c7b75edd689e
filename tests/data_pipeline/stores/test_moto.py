"""The whole road through moto, the field's own S3 server.

It brings 22 packages and is no part of the tools of the tests. Where it is missing, nothing here runs, and our own
small server alone has answered Arrow's client: `pip install 'moto[server]'`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.inspect import verify
from data_pipeline.prepare.build import build_shards
from data_pipeline.prepare.publish import pack
from data_pipeline.prepare.sources import open_source
from data_pipeline.shards.reader import ShardSet
from data_pipeline.stores import client
from data_pipeline.stores.urls import ObjectPath, locate
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer

moto = pytest.importorskip(
    "moto.server", reason="moto is not installed: S3 is tested with our own server alone (pip install 'moto[server]')"
)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty bucket s3://shelf."""
    import pyarrow.fs as pafs

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-the-test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    client._connected.cache_clear()
    address = {"endpoint_override": f"{host}:{port}", "scheme": "http", "region": "us-east-1", "request_timeout": 60}
    pafs.S3FileSystem(allow_bucket_creation=True, **address).create_dir("shelf")
    yield
    server.stop()
    client._connected.cache_clear()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_a_corpus_in_a_store_to_packed_shards_in_a_store(
    bucket: None, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
):
    (tmp_path / "corpus").mkdir()
    for path in sorted(corpus.iterdir())[:9]:
        shutil.copy(path, tmp_path / "corpus")
        place = locate(f"s3://shelf/corpus/{path.name}")
        assert isinstance(place, ObjectPath)
        client.upload(path, place)
    options = {"validation_fraction": 0.2, "shard_tokens": 10_000}
    built = tmp_path / "built"
    build_shards(open_source(tmp_path / "corpus"), tokenizer, built, **options)
    build_shards(open_source("s3://shelf/corpus"), tokenizer, "s3://shelf/data", **options)
    assert verify("s3://shelf/data") == []
    pack(built, "s3://shelf/packed", overwrite=False, say=lambda message: None)
    here = ShardSet.open(built)
    for url in ("s3://shelf/data", "s3://shelf/packed"):
        there = ShardSet.open(url)
        assert there.manifest.hash == here.manifest.hash
        assert all(np.array_equal(there.document(n), here.document(n)) for n in range(here.num_documents))
    place = locate("s3://shelf/data")
    assert isinstance(place, ObjectPath)
    client.remove(place / "00000.arrow")
    client.write_object(place / "00001.arrow", b"rubbish")
    problems = "\n".join(verify("s3://shelf/data"))
    assert "s3://shelf/data/00000.arrow is missing" in problems
    assert "s3://shelf/data/00001.arrow is damaged" in problems
    with pytest.raises(DataError, match="has no bytes"):
        build_shards(open_source("s3://shelf/corpus"), tokenizer, "s3://shelf/data", **options)
    build_shards(open_source("s3://shelf/corpus"), tokenizer, "s3://shelf/data", overwrite=True, **options)
    assert verify("s3://shelf/data") == []
