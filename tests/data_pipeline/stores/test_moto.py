"""The whole road through moto, the field's own S3 server, where it is installed."""

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
from tests.data_pipeline.stores.moto_server import empty_bucket


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty bucket s3://shelf, and a cache of its own."""
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    with empty_bucket("shelf", monkeypatch):
        yield


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
