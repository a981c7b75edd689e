"""A pickle that runs a command, in the place of every file that is read: nothing ever runs it."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline.inspect import find_problems as verify_shards
from data_pipeline.shards.file_states import cache_folder
from data_pipeline.shards.shard_verification import open_validated
from launcher.checkpoint.resume import find_resume
from launcher.metrics.record import read_metrics
from launcher.report.page import write_report
from launcher.training.routing_files import RoutingFiles
from longctx.checkpoint_format import MANIFEST, CheckpointReader, canonical_hash, find_checkpoint, list_checkpoints
from longctx.conversion import export_checkpoint, load_hf
from longctx.conversion.checkpoint_checks import open_verified_checkpoint
from longctx.errors import LongCtxError
from longctx.files import hash_file
from longctx.tokenizer import load_tokenizer
from tests.bounded import refusal
from tests.longctx.samples import tiny_config


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def plain(touch: Touch) -> bytes:
    return pickle.dumps(touch)


def saved_by_torch(touch: Touch) -> bytes:
    content = io.BytesIO()
    torch.save({"model.norm.weight": touch, "lr": 1.0}, content)
    return content.getvalue()


def saved_by_numpy(touch: Touch) -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([touch], dtype=object), allow_pickle=True)
    return content.getvalue()


KINDS: dict[str, Callable[[Touch], bytes]] = {"plain": plain, "torch": saved_by_torch, "numpy": saved_by_numpy}


@pytest.fixture
def payload(tmp_path: Path) -> Iterator[Callable[[Path, str], None]]:
    """Puts a payload in the place of a file; at the end nothing has run it, and somebody who unpickles does."""
    touched, written = tmp_path / "executed", []

    def put(path: Path, kind: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(KINDS[kind](Touch(touched)))
        written.append(kind)

    yield put
    assert written
    assert not touched.exists()
    pickle.loads(plain(Touch(touched)))
    assert touched.exists()


def attempt(*actions: Callable[[], object]) -> int:
    """Run each; how many ended in an error of ours. Any other error is a fault."""
    refused = 0
    for action in actions:
        try:
            action()
        except LongCtxError:
            refused += 1
    return refused


def reseal(folder: Path, name: str) -> None:
    """Have the manifest vouch for what a file holds now."""
    body = json.loads((folder / MANIFEST).read_text())
    body["files"][name] = {"bytes": (folder / name).stat().st_size, "hash": hash_file(folder / name)}
    (folder / MANIFEST).write_text(json.dumps(body | {"hash": canonical_hash(body)}))


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_checkpoint(finished, tmp_path: Path, payload, kind: str):
    original = list_checkpoints(finished.folder)[-1]
    names = sorted(path.name for path in original.iterdir())
    for number, name in enumerate([*names, "optimizer.pt", "model.bin", "pytorch_model.bin", "rng_state.pth"]):
        run = tmp_path / str(number)
        folder = Path(shutil.copytree(original, run / "checkpoints" / original.name))
        payload(folder / name, kind)
        if name != MANIFEST:
            reseal(folder, name)
        refused = attempt(
            lambda folder=folder: open_verified_checkpoint(folder),
            lambda folder=folder, run=run: export_checkpoint(folder, run / "hf"),
            lambda folder=folder: load_tokenizer(folder),
            lambda run=run: find_resume(run, "newest-good"),
            lambda folder=folder: CheckpointReader(folder).read("model.norm.weight"),
        )
        if name in names:
            assert refused, name


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_shard_folder_and_its_cache(shards: Path, tmp_path: Path, payload, kind: str, monkeypatch):
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("data_pipeline.shards.shard_verification._MIN_AGE_NANOSECONDS", -(10**12))
    for number, name in enumerate(sorted(path.name for path in shards.iterdir() if path.is_file())):
        folder = Path(shutil.copytree(shards, tmp_path / f"{number}"))
        payload(folder / name, kind)
        assert verify_shards(folder), name
    folder = Path(shutil.copytree(shards, tmp_path / "cached"))
    open_validated(folder, whole=True)
    (stamps,) = (cache_folder() / "shards").iterdir()
    payload(stamps, kind)
    open_validated(folder, whole=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("torch", "numpy"))]
)
def test_in_a_run_folder(finished, tmp_path: Path, payload, kind: str):
    names = sorted(path.name for path in finished.folder.iterdir() if path.is_file())
    assert {"metrics.jsonl", "environment.json", "config.toml"} <= set(names)
    for number, name in enumerate(names):
        run = tmp_path / str(number)
        run.mkdir()
        for path in names:
            shutil.copyfile(finished.folder / path, run / path)
        payload(run / name, kind)
        attempt(lambda run=run: read_metrics(run), lambda run=run: write_report(run, run / "out.html"))


@pytest.mark.parametrize("kind", KINDS)
def test_in_routing_files(tmp_path: Path, payload, kind: str):
    payload(tmp_path / "routing/step_000001.safetensors", kind)
    routing = RoutingFiles("no", str(tmp_path / "routing"), tiny_config(), 64)
    routing.prepare(range(1, 2), resumes=False)
    assert attempt(lambda: routing.begin(1, {}, [torch.arange(64)])) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_hugging_face_folder(finished, tmp_path: Path, payload, kind: str):
    original = export_checkpoint(find_checkpoint(finished.folder), tmp_path / "hf").folder
    names = sorted(path.name for path in original.iterdir())
    for number, name in enumerate([*names, "pytorch_model.bin", "training_args.bin", "optimizer.pt"]):
        folder = Path(shutil.copytree(original, tmp_path / str(number)))
        if name == "pytorch_model.bin":
            (folder / "model.safetensors").unlink()
        payload(folder / name, kind)
        refused = attempt(lambda folder=folder: load_hf(folder), lambda folder=folder: load_tokenizer(folder))
        if name in ("config.json", "model.safetensors", "pytorch_model.bin"):
            assert refused, name


class TestDeepSpeed:
    """Checkpoints that DeepSpeed wrote are known by their names, and none of their files is opened."""

    @pytest.fixture
    def folder(self, tmp_path: Path, payload) -> Path:
        payload(tmp_path / "ds/global_step3/mp_rank_00_model_states.pt", "torch")
        payload(tmp_path / "ds/global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "torch")
        (tmp_path / "ds/latest").write_text("global_step3")
        return tmp_path / "ds"

    @pytest.mark.parametrize("below", ["", "global_step3"])
    def test_every_door_says_whose_it_is_and_what_to_do(self, folder: Path, below: str):
        folder = folder / below
        for action in (
            lambda: CheckpointReader(folder),
            lambda: find_checkpoint(folder),
            lambda: find_resume(folder.parent, str(folder)),
            lambda: export_checkpoint(folder, folder.parent / "out"),
            lambda: load_hf(folder),
        ):
            message = refusal(action)
            assert "is a DeepSpeed checkpoint" in message
            assert "longctx convert --from deepspeed DIR OUT --execute-pickles" in message
