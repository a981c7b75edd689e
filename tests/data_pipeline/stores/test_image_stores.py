"""Images from a store, to a store, and in packed folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.inspect import describe, find_problems
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.image_formats import ImageOptions, choose_format
from data_pipeline.prepare.image_source import open_images
from data_pipeline.prepare.publish import pack_folder
from data_pipeline.shards.reader import ShardSet
from tests.data_pipeline.made_images import random_images, write_folder, write_idx
from tests.data_pipeline.prepare.parts.conftest import content
from tests.data_pipeline.stores.conftest import fill
from tests.data_pipeline.stores.s3_server import Store


def build(source: str | Path, output: str | Path) -> None:
    found = open_images(source)
    tokenizer, rule = choose_format(found, ImageOptions(colors=6))
    build_shards(found, tokenizer, output, images=rule, validation_fraction=0.2)


@pytest.mark.parametrize("kind", ["folder", "idx"])
def test_a_store_gives_and_takes_the_same_bytes(store: Store, tmp_path: Path, kind: str):
    if kind == "folder":
        write_folder(tmp_path / "source", random_images(30))
    else:
        write_idx(tmp_path / "source", random_images(30, (4, 5)), [0, 1, 2] * 10)
    fill(store, tmp_path / "source", "corpora/images")
    build(tmp_path / "source", tmp_path / "out")
    build("s3://corpora/images", tmp_path / "from-store")
    assert content(tmp_path / "from-store") == content(tmp_path / "out")
    build(tmp_path / "source", "s3://corpora/out")
    assert store.under("corpora/out") == content(tmp_path / "out")
    assert find_problems("s3://corpora/out") == []


def test_a_packed_folder_is_read_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    write_folder(tmp_path / "source", random_images(30))
    build(tmp_path / "source", tmp_path / "out")
    pack_folder(tmp_path / "out", tmp_path / "packed", overwrite=False, say=lambda _: None)
    plain, packed = (ShardSet.open(tmp_path / name) for name in ("out", "packed"))
    assert packed.image_format == plain.image_format
    for number in range(plain.num_documents):
        assert (packed.document(number) == plain.document(number)).all()
        assert packed.label(number) == plain.label(number)
    assert find_problems(tmp_path / "packed") == []
    assert describe(tmp_path / "packed").images == describe(tmp_path / "out").images
