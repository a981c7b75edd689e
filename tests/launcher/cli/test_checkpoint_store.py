"""``checkpoint list|verify|prune|export`` of checkpoints in a store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.stores import client
from launcher.checkpoint.checkpoint_store import store_at
from longctx.checkpoint_format import MANIFEST, list_checkpoints
from longctx.conversion import load_hf
from tests.data_pipeline.stores.s3_server import S3Server, Store
from tests.launcher.cli.calls import call, succeed

ADDRESS = "s3://corpora/first"


@pytest.fixture
def objects(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store that holds a run's checkpoints, of steps 20 and 100, and one that was never finished."""
    server = S3Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-the-test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client._connected.cache_clear()
    store = store_at(ADDRESS)
    for folder in list_checkpoints(run):
        store.send(folder)
    server.store.objects["corpora/first/checkpoints/step_000010/master.safetensors"] = b"begun"
    server.store.objects["corpora/first/checkpoints/step_000120/master.safetensors"] = b"under way"
    yield server.store
    server.stop()


def test_list_and_verify(capsys, objects: Store, run: Path):
    code, out, _ = call(capsys, "checkpoint", "list", ADDRESS, "--check")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, ["step", "20", "100"])
    there = json.loads(call(capsys, "checkpoint", "list", ADDRESS, "--json")[1])
    here = json.loads(call(capsys, "checkpoint", "list", run, "--json")[1])
    for ours, theirs in zip(there, here, strict=True):
        assert ours["folder"] == f"{ADDRESS}/checkpoints/step_{ours['step']:06d}"
        keys = ("step", "bytes", "health", "ranks", "dtype", "problem")
        assert [ours[key] for key in keys] == [theirs[key] for key in keys]
    assert call(capsys, "checkpoint", "verify", ADDRESS)[0] == 0
    path = "corpora/first/checkpoints/step_000100/master.safetensors"
    objects.objects[path] = objects.objects[path][:-1] + b"?"
    assert call(capsys, "checkpoint", "list", ADDRESS)[0] == 0, "its size is right"
    code, out, _ = call(capsys, "checkpoint", "list", ADDRESS, "--check")
    assert (code, "damaged" in out) == (1, True)
    code, out, _ = call(capsys, "checkpoint", "verify", ADDRESS)
    assert code == 1
    assert f"{ADDRESS}/checkpoints/step_000020 is intact." in out
    assert f"{ADDRESS}/checkpoints/step_000100/master.safetensors is damaged" in out
    assert call(capsys, "checkpoint", "verify", f"{ADDRESS}/checkpoints/step_000020")[0] == 0


def test_prune(capsys, objects: Store):
    code, out, _ = call(capsys, "checkpoint", "prune", ADDRESS, "--keep-last", "1", "--dry-run")
    assert (code, "Would remove" in out, len(store_at(ADDRESS).steps())) == (0, True, 4)
    out = succeed(capsys, "checkpoint", "prune", ADDRESS, "--keep-last", "1")
    assert f"Removed {ADDRESS}/checkpoints/step_000010, 5 B: never finished." in out
    assert sorted(store_at(ADDRESS).steps()) == [100, 120], "the newest that is not finished may be under way"
    objects.objects[f"corpora/first/checkpoints/step_000100/{MANIFEST}"] = b"{}"
    assert call(capsys, "checkpoint", "prune", f"{ADDRESS}/checkpoints/step_000100", "--keep-last", "1")[0] == 1


def test_export(capsys, objects: Store, run: Path, tmp_path: Path):
    assert call(capsys, "checkpoint", "export", ADDRESS, tmp_path / "there")[0] == 0
    assert call(capsys, "checkpoint", "export", run, tmp_path / "here")[0] == 0
    (_, there), (_, here) = load_hf(tmp_path / "there"), load_hf(tmp_path / "here")
    assert all((there[name] == here[name]).all() for name in here.keys() | there.keys())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"], "no copy is left"
    shutil.rmtree(tmp_path / "there")
