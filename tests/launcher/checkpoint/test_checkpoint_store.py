"""Checkpoints in an object store: sent whole or not at all, read back, pruned, fetched; none that fails stops a run."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data_pipeline.stores import client
from launcher.checkpoint import mirror as mirror_module
from launcher.checkpoint.checkpoint_store import check_unused, store_at
from launcher.checkpoint.mirror import Mirror
from launcher.checkpoint.names import folder_of, step_of
from launcher.checkpoint.resume import find_resume, problems_of
from launcher.checkpoint.retention import Proof, Retention, write_proof
from launcher.config.run_config_rules import store_place
from launcher.metrics.record import read_metrics
from launcher.training.trainer import Trainer
from longctx.checkpoint_format import MANIFEST, PROOF_FILE, CheckpointReader, canonical_hash, list_checkpoints
from longctx.errors import CheckpointError, ConfigError, DataError
from tests.data_pipeline.stores.s3_server import S3Server
from tests.data_pipeline.stores.s3_server import Store as Objects
from tests.launcher.workers import build, end_guarded, train
from tests.launcher.workers import run as run_workers
from tests.longctx.test_checkpoint_format import write_model

pytestmark = pytest.mark.timeout(120)
ADDRESS = "s3://corpora/runs/first"
KEY = "corpora/runs/first/checkpoints"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "the-key-of-the-test",
    "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-test",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    found = S3Server()
    yield found
    found.stop()


@pytest.fixture
def objects(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """An empty store, and the environment that leads there."""
    for name, value in {"AWS_ENDPOINT_URL": server.url, **ENVIRONMENT}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(client, "_ATTEMPTS", 1)
    monkeypatch.setattr(mirror_module, "_FIRST_PAUSE_SECONDS", 0.05)
    client._connected.cache_clear()
    server.store.objects.clear()
    server.store.requests.clear()
    server.store.fault = lambda method, path: ""
    return server.store


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def save(run: Path, step: int, *, is_proved: bool = False, loss: float | None = None) -> Path:
    """A committed checkpoint of a tiny model in the run's folder."""
    folder = write_model(folder_of(run, step), step=step, training={"step": step, "validation_loss": loss})
    if is_proved:
        write_proof(folder, CheckpointReader(folder).manifest["hash"], Proof("step", step + 1, 2.0))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def there(objects: Objects, step: int) -> dict[str, bytes]:
    return objects.under(f"{KEY}/step_{step:06d}")


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.01)


def test_what_is_sent_is_fetched_again(objects: Objects, run: Path, tmp_path: Path):
    folder, store = save(run, 7, is_proved=True), store_at(ADDRESS)
    order = []
    objects.fault = lambda method, path: order.append(path.rpartition("/")[2]) or "" if method == "PUT" else ""
    store.send(folder)
    store.send_proof(folder)
    assert order == ["f0.safetensors", "f1.safetensors", MANIFEST, PROOF_FILE], (
        "what makes it a checkpoint comes after all"
    )
    assert there(objects, 7) == content(folder)
    assert objects.requests[f"GET {KEY}/step_000007/f0.safetensors"] >= 1, "it was read back"
    fetched = store.fetch(7, tmp_path / "other")
    assert fetched == folder_of(tmp_path / "other", 7)
    assert content(fetched) == content(folder)
    # Nothing is sent twice.
    objects.requests.clear()
    store.send(folder)
    assert not any(request.startswith("PUT") for request in objects.requests)


def test_another_history_of_a_step_takes_its_place(objects: Objects, run: Path):
    store = store_at(ADDRESS)
    store.send(save(run, 7, loss=3.0))
    shutil.rmtree(folder_of(run, 7))
    store.send(save(run, 7, loss=2.0))
    assert there(objects, 7) == content(folder_of(run, 7))


@pytest.mark.parametrize("what", ["flipped", "cut short", "gone"])
def test_damage_here_is_not_sent(objects: Objects, run: Path, what: str):
    folder = save(run, 7)
    path = folder / "f1.safetensors"
    whole = path.read_bytes()
    damaged = {"flipped": whole[:-3] + b"\x01" + whole[-2:], "cut short": whole[:-1], "gone": None}[what]
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"f1\.safetensors"):
        store_at(ADDRESS).send(folder)
    assert MANIFEST not in there(objects, 7)
    assert store_at(ADDRESS).checkpoints() == {}


def test_what_the_store_made_of_a_file_is_seen_before_it_counts(objects: Objects, run: Path):
    """The store keeps other bytes than it was given, once: the next sending goes on with what is right."""
    folder, store = save(run, 7), store_at(ADDRESS)
    bad = f"{KEY}/step_000007/f1.safetensors"

    def spoil(method: str, path: str) -> str:
        if method == "GET" and path == bad and len(objects.objects[bad]) > 10:
            objects.objects[bad] = objects.objects[bad][:-1] + b"?"
        return ""

    objects.fault = spoil
    with pytest.raises(DataError, match=r"f1\.safetensors is damaged.* It was just uploaded"):
        store.send(folder)
    assert store.checkpoints() == {}
    objects.fault = lambda method, path: ""
    objects.requests.clear()
    store.send(folder)
    assert there(objects, 7) == content(folder)
    assert objects.requests[f"PUT {KEY}/step_000007/f0.safetensors"] == 0, "what was right is not sent again"


@pytest.mark.parametrize("name", ["f0.safetensors", MANIFEST, PROOF_FILE])
def test_every_damage_there_is_found(objects: Objects, run: Path, tmp_path: Path, name: str):
    store, folder = store_at(ADDRESS), save(run, 7, is_proved=True)
    store.send(folder)
    store.send_proof(folder)
    assert store.of_step(7).verify() == []
    path = f"{KEY}/step_000007/{name}"
    whole = objects.objects[path]
    for spoiled in (whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], whole[:-1], whole + b" x", None):
        objects.objects[path] = spoiled or b""
        if spoiled is None:
            del objects.objects[path]
        if name == PROOF_FILE and spoiled is None:
            # It is whole without.
            continue
        assert any(name in problem for problem in store.of_step(7).verify()), spoiled
        if name != PROOF_FILE:
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                store.fetch(7, tmp_path / "other")
            assert list_checkpoints(tmp_path / "other") == []
    objects.objects[path] = whole
    objects.objects[f"{KEY}/step_000007/stray"] = b"x"
    assert store.of_step(7).verify() == ["stray is not in the manifest: remove it"]


def test_a_manifest_that_is_too_large_is_not_read(objects: Objects, run: Path, tmp_path: Path):
    store = store_at(ADDRESS)
    store.send(save(run, 7))
    objects.objects[f"{KEY}/step_000007/{MANIFEST}"] = b" " * (17 << 20)
    assert "too large for a longctx manifest" in store.of_step(7).verify()[0]
    with pytest.raises(CheckpointError, match="too large for a longctx manifest"):
        store.fetch(7, tmp_path)
    assert not store.checkpoints()[7].candidate(7).is_stable


def mirrored(run: Path, *, keep: int = 2, step: int = 0, best: int = 0) -> Mirror:
    found = Mirror(run, store_at(ADDRESS), Retention(last=keep, best=best), step=step)
    found.start()
    return found


def test_the_same_rule_holds_there(objects: Objects, run: Path):
    found = mirrored(run, keep=1, best=1)
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.5], start=1):
        folder = save(run, step, loss=loss, is_proved=step == 3)
        found.add(folder)
        if step == 3:
            found.add_proof(folder)
        wait_until(lambda: not found.held())
    found.finish(20)
    assert sorted(store_at(ADDRESS).checkpoints()) == [2, 3, 4], "the best, the proved and the last one"
    assert PROOF_FILE in there(objects, 3)
    assert {path.split("/")[-2] for path in objects.under("corpora")} == {f"step_00000{n}" for n in (2, 3, 4)}


def test_a_store_that_fails_is_told_once_and_tried_again(objects: Objects, run: Path, caplog):
    caplog.set_level(logging.INFO)
    objects.fault = lambda method, path: "InternalError"
    found = mirrored(run)
    found.add(save(run, 1))
    wait_until(lambda: found._failures >= 3)
    assert found.held() == {1}, "it has to stay here"
    assert caplog.text.count("Training continues, the upload is retried") == 1
    assert "the-secret-of-the-test" not in caplog.text
    objects.fault = lambda method, path: ""
    assert found.finish(20)
    assert there(objects, 1) == content(folder_of(run, 1))
    assert "accepts checkpoints again" in caplog.text
    assert "is not in s3" not in caplog.text


def test_what_is_not_there_at_the_end_is_said_and_sent_by_the_next_start(objects: Objects, run: Path, caplog):
    objects.fault = lambda method, path: "InternalError"
    found = mirrored(run)
    found.add(save(run, 1))
    began = time.monotonic()
    assert not found.finish(60)
    assert time.monotonic() - began < 30
    assert "checkpoint step_000001 is not in s3://corpora/runs/first" in caplog.text
    assert "The run's next start sends it." in caplog.text
    objects.fault = lambda method, path: ""
    again = mirrored(run, step=1)
    assert again.finish(20)
    assert there(objects, 1) == content(folder_of(run, 1))


def test_a_slow_store_holds_up_nobody(objects: Objects, run: Path, caplog):
    """While one is sent, saves go on: the newest of those that wait is sent next, and only these stay for it."""
    caplog.set_level(logging.INFO)
    slow = [True]

    def wait(method: str, path: str) -> str:
        while slow and method == "PUT":
            time.sleep(0.01)
        return ""

    objects.fault = wait
    found = mirrored(run)
    began = time.monotonic()
    for step in (1, 2, 3):
        found.add(save(run, step))
        if step == 1:
            wait_until(lambda: found._waiting is None)
    assert time.monotonic() - began < 15
    assert found.held() == {1, 3}
    assert "step_000002 was not sent to s3://corpora/runs/first: the newer step_000003 replaces it" in caplog.text
    slow.clear()
    found.finish(20)
    assert sorted(store_at(ADDRESS).checkpoints()) == [1, 3]


def test_a_run_that_has_to_end_does_not_wait(objects: Objects, run: Path, caplog):
    objects.fault = lambda method, path: time.sleep(0.3) or "" if method == "PUT" else ""
    found = mirrored(run)
    found.add(save(run, 1))
    began = time.monotonic()
    found.finish(0.1)
    assert time.monotonic() - began < 10
    assert "is not in s3" in caplog.text
    assert store_at(ADDRESS).checkpoints() == {}


def test_a_run_that_went_back_leaves_its_later_checkpoints_there_too(objects: Objects, run: Path):
    store = store_at(ADDRESS)
    for step in (2, 4, 6):
        store.send(save(run, step))
    for step in (4, 6):
        shutil.rmtree(folder_of(run, step))
    found = mirrored(run, step=2, keep=0)
    found.finish(20)
    assert sorted(store.steps()) == [2]


# Resuming.


def test_the_newest_of_both_is_found(objects: Objects, run: Path, tmp_path: Path, caplog):
    store = store_at(ADDRESS)
    for step in (2, 4):
        store.send(save(run, step))
    newest = content(folder_of(run, 4))
    for resume in ("latest", "newest-good"):
        assert find_resume(run, resume, store) == folder_of(run, 4)
        shutil.rmtree(folder_of(run, 4))
        assert find_resume(run, resume, store) == folder_of(run, 4), "it comes from the store"
        assert content(folder_of(run, 4)) == newest
        # On another machine, without anything.
        assert find_resume(tmp_path / resume, resume, store) == folder_of(tmp_path / resume, 4)
        assert content(folder_of(tmp_path / resume, 4)) == newest
    assert find_resume(run, "no", store) is None
    # Damaged here, whole there.
    (folder_of(run, 4) / "f0.safetensors").write_bytes(b"damaged")
    assert find_resume(run, "newest-good", store) == folder_of(run, 4)
    assert problems_of(folder_of(run, 4)) == []
    # Damaged on both sides: the one before.
    (folder_of(run, 4) / "f0.safetensors").write_bytes(b"damaged")
    objects.objects[f"{KEY}/step_000004/f0.safetensors"] = b"damaged"
    assert find_resume(run, "newest-good", store) == folder_of(run, 2)
    assert "Skipped step_000004 of s3://corpora/runs/first: " in caplog.text


def test_a_store_that_holds_damaged_ones_alone_is_said_to(objects: Objects, run: Path, tmp_path: Path):
    store = store_at(ADDRESS)
    for step in (2, 4):
        store.send(save(run, step))
        objects.objects[f"{KEY}/step_{step:06d}/f0.safetensors"] = b"damaged"
    for resume in ("latest", "newest-good", "auto"):
        with pytest.raises(CheckpointError, match="can be resumed") as caught:
            find_resume(tmp_path / resume, resume, store)
        said = str(caught.value)
        assert f"step_000004 of {ADDRESS}: " in said
        assert f"step_000002 of {ADDRESS}: " in said
        assert "holds no committed checkpoint" not in said


def test_without_its_store_a_run_resumes_from_its_folder(objects: Objects, run: Path, tmp_path: Path, caplog):
    save(run, 2)
    objects.fault = lambda method, path: "InternalError"
    assert find_resume(run, "latest", store_at(ADDRESS)) == folder_of(run, 2)
    assert "Only the run's folder is searched" in caplog.text
    with pytest.raises(CheckpointError, match=r"holds no committed checkpoint\. s3://corpora/runs/first holds none"):
        find_resume(tmp_path / "empty", "latest", store_at(ADDRESS))


def test_one_that_somebody_made_up_there_is_passed_over_before_it_is_copied(objects: Objects, run: Path, caplog):
    store = store_at(ADDRESS)
    for step in (2, 4):
        store.send(save(run, step))
    shutil.rmtree(run)
    place = f"{KEY}/step_000004/{MANIFEST}"
    body = json.loads(objects.objects[place])
    del body["hash"]
    body["model"]["num_layers"] = 4000
    objects.objects[place] = json.dumps(body | {"hash": canonical_hash(body)}).encode()
    objects.requests.clear()
    assert find_resume(run, "auto", store) == folder_of(run, 2)
    assert "step_000004 of s3://" in caplog.text
    assert "4,000 layers, but only" in caplog.text
    assert not objects.requests[f"GET {KEY}/step_000004/f0.safetensors"]


def test_an_address_can_be_resumed_from(objects: Objects, run: Path, tmp_path: Path):
    for step in (2, 4):
        store_at(ADDRESS).send(save(run, step))
    assert find_resume(tmp_path / "a", f"{ADDRESS}/checkpoints/step_000002") == folder_of(tmp_path / "a", 2)
    assert find_resume(tmp_path / "b", ADDRESS) == folder_of(tmp_path / "b", 4)
    with pytest.raises(CheckpointError, match="step_000003"):
        find_resume(tmp_path / "c", f"{ADDRESS}/checkpoints/step_000003")
    with pytest.raises(CheckpointError, match="no checkpoint in "):
        find_resume(tmp_path / "c", "s3://corpora/nothing")


def test_a_new_run_takes_no_store_of_another(objects: Objects, run: Path):
    check_unused(store_at(ADDRESS))
    store_at(ADDRESS).send(save(run, 2))
    with pytest.raises(ConfigError, match=r"already holds checkpoints, the newest at step 2"):
        check_unused(store_at(ADDRESS))
    with pytest.raises(ConfigError, match=r"checkpoint\.store: s3://nowhere/runs/checkpoints/\.writable"):
        check_unused(store_at("s3://nowhere/runs"))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("runs/first", "is not a store URL"),
        ("file:///mnt/runs", "is a local folder"),
        ("http://host/run", "http:// is not known"),
        ("s3://bucket/", "is a bucket"),
    ],
)
def test_addresses_that_are_none(address: str, said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        store_place(address)
    assert "checkpoint.store" in str(caught.value)
    assert "Try s3://" in str(caught.value) or "Write it out" in str(caught.value)


def test_a_key_in_an_address_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        store_place("s3://AKIA:wJalrXUtn@bucket/run")
    assert "wJalr" not in str(caught.value)


# Runs.


def begin(endpoint: str) -> None:
    """The environment of a worker, which a server forked that knows nothing of the test's."""
    os.environ.update({"AWS_ENDPOINT_URL": endpoint, **ENVIRONMENT})


def train_and_go_on_elsewhere(endpoint: str, shards: Path, folder: Path) -> None:
    """A run whose machine is lost with its disk, gone on with on another one; and the same run unbroken."""
    begin(endpoint)
    kept = {"checkpoint.store": ADDRESS, "checkpoint.keep_last": 1, "run.resume": "auto"}
    train(shards, folder / "lost", {**kept, "train.stop_after": 4})
    train(shards, folder / "found", kept)
    train(shards, folder / "unbroken", {})


@pytest.mark.slow
def test_a_run_goes_on_from_its_store_as_if_it_had_never_stopped(objects, server, shards, tmp_path):
    run_workers(train_and_go_on_elsewhere, 2, server.url, shards, tmp_path)
    assert [step_of(path) for path in list_checkpoints(tmp_path / "found")] == [8], "keep_last is 1"
    found, unbroken = (list_checkpoints(tmp_path / name)[-1] for name in ("found", "unbroken"))
    assert CheckpointReader(found).manifest["files"] == CheckpointReader(unbroken).manifest["files"]
    assert sorted(store_at(ADDRESS).steps()) == [8]
    assert there(objects, 8) == content(found)
    losses = [
        {row["step"]: row["loss"] for row in read_metrics(tmp_path / name) if row["kind"] == "train"}
        for name in ("lost", "found", "unbroken")
    ]
    assert losses[0] | losses[1] == losses[2]
    said = (tmp_path / "lost/logs/rank_0.log").read_text()
    assert said.count("Sent step_00000") == 2
    assert "the-secret-of-the-test" not in said + (tmp_path / "lost/config.toml").read_text()


def train_beside_a_store_that_is_gone(shards: Path, folder: Path, words: list[str]) -> None:
    """Nobody listens there: a new run is refused, and one that goes on trains on."""
    begin("http://127.0.0.1:9")
    client._ATTEMPTS = 1
    store = {"checkpoint.store": ADDRESS}
    end_guarded(shards, folder / "new", store, 2, words)
    # It may hold checkpoints of this very run.
    end_guarded(shards, folder / "new", {**store, "run.resume": "auto"}, 2, words)
    train(shards, folder / "run", {"train.stop_after": 2})
    run = build(shards, folder / "run", {**store, "run.resume": "latest"})
    trainer = Trainer(run)
    trainer.train()
    assert not trainer.is_in_store
    # Nothing is left to do but to send it.
    again = Trainer(build(shards, folder / "run", {**store, "run.resume": "latest"}))
    again.train()
    assert not again.is_in_store


@pytest.mark.slow
def test_a_store_that_is_gone_stops_no_run_that_goes_on(shards, tmp_path):
    words = ["ConfigError", "checkpoint.store: s3://corpora/runs/first", "AWS_ENDPOINT_URL"]
    run_workers(train_beside_a_store_that_is_gone, 2, shards, tmp_path, words)
    assert not (tmp_path / "new/checkpoints").exists()
    assert step_of(list_checkpoints(tmp_path / "run")[-1]) == 8
    said = (tmp_path / "run/logs/rank_0.log").read_text()
    assert said.count("Training continues, the upload is retried") == 1
    assert said.count("checkpoint step_000008 is not in s3://corpora/runs/first") == 2
