"""The whole road through servers that others have written, where they are installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.inspect import find_problems
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.publish import pack_folder
from data_pipeline.prepare.sources import open_source
from data_pipeline.shards.reader import ShardSet
from data_pipeline.stores import client
from data_pipeline.stores.urls import ObjectPath, locate
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.stores.servers import SCHEMES, empty_bucket


@pytest.fixture(params=SCHEMES)
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket, and a cache of its own."""
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    with empty_bucket(request.param, "shelf", monkeypatch) as url:
        yield url


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_a_corpus_in_a_store_to_packed_shards_in_a_store(
    bucket: str, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
):
    (tmp_path / "corpus").mkdir()
    for path in sorted(corpus.iterdir())[:9]:
        shutil.copy(path, tmp_path / "corpus")
        client.upload(path, _object(f"{bucket}/corpus/{path.name}"))
    options = {"validation_fraction": 0.2, "shard_tokens": 10_000}
    built, there = tmp_path / "built", f"{bucket}/data"
    build_shards(open_source(tmp_path / "corpus"), tokenizer, built, **options)
    build_shards(open_source(f"{bucket}/corpus"), tokenizer, there, **options)
    assert find_problems(there) == []
    pack_folder(built, f"{bucket}/packed", overwrite=False, say=lambda message: None)
    here = ShardSet.open(built)
    for url in (there, f"{bucket}/packed"):
        fetched = ShardSet.open(url)
        assert fetched.manifest.hash == here.manifest.hash
        assert all(np.array_equal(fetched.document(n), here.document(n)) for n in range(here.num_documents))
    client.remove(_object(f"{there}/00000.arrow"))
    client.write_object(_object(f"{there}/00001.arrow"), b"rubbish")
    problems = "\n".join(find_problems(there))
    assert f"{there}/00000.arrow is missing" in problems
    assert f"{there}/00001.arrow is damaged" in problems
    with pytest.raises(DataError, match="has no bytes"):
        build_shards(open_source(f"{bucket}/corpus"), tokenizer, there, **options)
    build_shards(open_source(f"{bucket}/corpus"), tokenizer, there, overwrite=True, **options)
    assert find_problems(there) == []


def _object(url: str) -> ObjectPath:
    place = locate(url)
    assert isinstance(place, ObjectPath)
    return place
