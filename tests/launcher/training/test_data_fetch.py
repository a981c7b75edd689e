"""Runs whose shards lie in a store: fetched once a host, divided among its ranks, before the first step."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import launcher.training.data_check
from data_pipeline.shards import local_copies
from data_pipeline.shards.reader import ShardSet
from launcher.metrics.record import read_metrics
from launcher.training.data_check import fetch_data
from longctx.errors import DataError
from tests.data_pipeline.stores.conftest import fill
from tests.data_pipeline.stores.s3_server import S3Server
from tests.helpers import run_distributed
from tests.launcher.workers import train

URL: Any = "s3://corpora/tiny"


@pytest.fixture
def server(shards: Path) -> Iterator[S3Server]:
    """A store that holds the tiny corpus."""
    found = S3Server()
    fill(found.store, shards, "corpora/tiny")
    yield found
    found.stop()


def begin(endpoint: str, cache: Path) -> None:
    """The environment of a worker, which a server forked that knows nothing of the test's."""
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
    os.environ.update({"AWS_ENDPOINT_URL": endpoint, "LONGCTX_CACHE": str(cache), **keys})


def train_from_both(endpoint: str, folder: Path, shards: Path) -> None:
    begin(endpoint, folder / "cache")
    changed = {"train.stop_after": 2}
    train(URL, folder / "remote", {**changed, "data.cache": folder / "copies"})
    train(shards, folder / "local", changed)


@pytest.mark.slow
def test_a_run_reads_the_same_from_a_store(server: S3Server, shards: Path, tmp_path: Path):
    run_distributed(train_from_both, 2, server.url, tmp_path, shards, timeout=120)
    rows = [read_metrics(tmp_path / name) for name in ("remote", "local")]
    losses = [[row["loss"] for row in found if "loss" in row] for found in rows]
    assert len(losses[0]) >= 2
    assert losses[0] == losses[1]
    gets = {path: count for path, count in server.store.requests.items() if re.match("GET .*arrow", path)}
    # Of both splits, each shard by one of the two ranks.
    assert len(gets) == len(list(shards.rglob("*.arrow"))) > 3
    assert set(gets.values()) == {1}
    assert len(list((tmp_path / "copies").rglob("*.arrow"))) == len(gets)


def fetch_on_two_hosts(endpoint: str, cache: Path) -> None:
    rank = dist.get_rank()
    begin(endpoint, cache / f"host{rank // 2}")
    fetched: list[str] = []
    bring = local_copies.LocalCopy.fetch

    def noted(copy: local_copies.LocalCopy, entry: Any) -> None:
        fetched.append(entry.file)
        bring(copy, entry)

    local_copies.LocalCopy.fetch = noted
    shards = ShardSet.open(URL)
    fetch_data([shards])
    of_all: list[list[str]] = [[] for _ in range(4)]
    dist.all_gather_object(of_all, fetched)
    listed = [entry.file for entry in shards.manifest.shards]
    for pair in (of_all[:2], of_all[2:]):
        assert sorted(pair[0] + pair[1]) == listed
        assert all(pair)


def test_ranks_that_share_a_cache_divide_the_shards(server: S3Server, tmp_path: Path):
    run_distributed(fetch_on_two_hosts, 4, server.url, tmp_path)


def refuse(endpoint: str, cache: Path) -> None:
    begin(endpoint, cache)
    shards = ShardSet.open(URL)
    check_room, disk_usage = launcher.training.data_check._check_free_space, shutil.disk_usage

    def little_room_on_rank_1(found: Any) -> None:
        if dist.get_rank() == 1:
            usage = disk_usage("/")
            shutil.disk_usage = lambda path: usage._replace(free=1)
        check_room(found)

    launcher.training.data_check._check_free_space = little_room_on_rank_1
    with pytest.raises(DataError, match=r"GB more on this host.*\n.*data\.cache"):
        fetch_data([shards])
    shutil.disk_usage = disk_usage
    launcher.training.data_check._check_free_space = check_room
    # Damaged for whoever fetches it: an error on every rank.
    with pytest.raises(DataError, match=r"s3://corpora/tiny/00001\.arrow is damaged"):
        fetch_data([shards])
    assert "00001.arrow" in {entry.file for entry in shards.copy.missing()}  # type: ignore[union-attr]


def test_what_one_rank_cannot_fetch_ends_all(server: S3Server, tmp_path: Path):
    body = bytearray(server.store.objects["corpora/tiny/00001.arrow"])
    body[len(body) // 2] ^= 1
    server.store.objects["corpora/tiny/00001.arrow"] = bytes(body)
    run_distributed(refuse, 2, server.url, tmp_path)
