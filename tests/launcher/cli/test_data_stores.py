"""``data`` verbs on folders in a store, and ``data pack``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data_pipeline.stores.conftest import fill, server, store  # noqa: F401  (fixtures)
from tests.data_pipeline.stores.s3_server import Store
from tests.launcher.cli.calls import call, refused, succeed

PLAN = ["data", "plan", "--data.train", "s3://corpora/data", "--data.seq_len", "256", "--train.tokens_per_step", "512"]
PLAN += ["--run.hostfile", "none", "--json"]


def test_the_verbs_take_urls(capsys, world: Path, store: Store):  # noqa: F811
    fill(store, world / "corpus", "corpora/texts")
    words = ["data", "build", "--source", "s3://corpora/texts", "--tokenizer", world / "tokenizer.model"]
    options = ["--output", "s3://corpora/data", "--validation-fraction", "0.3", "--shard-tokens", "20000"]
    out = succeed(capsys, *words, *options)
    assert "s3://corpora/data/validation" in out
    assert "--data.train s3://corpora/data" in out
    assert store.under("corpora/data")["manifest.json"] == (world / "data/manifest.json").read_bytes()
    code, out, _ = call(capsys, *words, *options, "--json")
    found = json.loads(out)
    assert (code, found["up_to_date"], found["output"]) == (0, True, "s3://corpora/data")
    out = succeed(capsys, "data", "inspect", "s3://corpora/data", "--json")
    assert json.loads(out)["validation"]["documents"] > 0
    out = succeed(capsys, "data", "verify", "s3://corpora/data")
    assert "s3://corpora/data is intact" in out
    store.objects["corpora/data/00000.arrow"] = b"rubbish"
    code, out, _ = call(capsys, "data", "verify", "s3://corpora/data")
    assert code == 1
    assert "s3://corpora/data/00000.arrow is damaged" in out
    succeed(capsys, *PLAN)
    # Whose copy is whole since it was inspected.


def test_a_shard_of_a_store_is_left_out_for_every_host(capsys, monkeypatch, world: Path, store: Store):  # noqa: F811
    fill(store, world / "data", "corpora/data")

    def tokens() -> int:
        out = succeed(capsys, *PLAN)
        return json.loads(out)["packing"]["tokens"]

    every = tokens()
    whole = store.under("corpora/data")
    entry = json.loads(whole["manifest.json"])["shards"][1]
    without = ["data", "build", "--output", "s3://corpora/data", "--without"]
    del store.objects[f"corpora/data/{entry['file']}"]
    out = succeed(capsys, *without, entry["file"], "--json")
    assert (json.loads(out)["shards"], json.loads(out)["tokens"]) == ([entry["file"]], entry["tokens"])
    changed = {name for name, content in store.under("corpora/data").items() if whole[name] != content}
    assert changed == {"manifest.json"}
    # Another host has a cache of its own.
    monkeypatch.setenv("LONGCTX_CACHE", str(world / "another"))
    assert tokens() == every - entry["tokens"]
    succeed(capsys, "data", "verify", "s3://corpora/data")
    err = refused(capsys, 2, *without, "00099.arrow")
    assert "Did you mean" in err


def test_pack(capsys, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    out = succeed(capsys, "data", "pack", world / "data", "--output", tmp_path / "packed", "--json")
    found = json.loads(out)
    assert 0 < found["packed_bytes"] < found["bytes"]
    code, out, _ = call(capsys, "data", "sample", tmp_path / "packed", "--seq-len", 256, "--rows", 1)
    assert (code, out) == call(capsys, "data", "sample", world / "data", "--seq-len", 256, "--rows", 1)[:2]
    err = refused(capsys, 1, "data", "pack", world / "data", "--output", tmp_path / "packed")
    assert "already exists" in err
    err = refused(capsys, 1, "data", "pack", tmp_path / "nothing", "--output", tmp_path / "other")
    assert "is not a shard folder" in err
