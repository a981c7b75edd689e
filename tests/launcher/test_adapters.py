"""Runs that train adapters: from a base to a checkpoint, on, merged, as a PEFT folder, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.cli import cli_commands
from launcher.config.load_config import load_run_config
from launcher.config.objective import check_objective
from launcher.training.run_origin import find_origin
from launcher.training.setup import build_run
from launcher.training.train_step import TrainStep
from launcher.training.trainer import Trainer
from longctx.architecture.adapter import is_adapter
from longctx.checkpoint_format import MANIFEST, CheckpointReader, canonical_hash, list_checkpoints
from longctx.errors import CheckpointError, ConfigError
from longctx.generation.load_decoder import load_model
from tests.launcher.runs import TINY_RUN, tiny_config, tiny_start
from tests.launcher.workers import leave_out_pictures, rows, run, train

pytestmark = pytest.mark.timeout(240)

ADAPTED: dict[str, Any] = {"model.adapter.rank": 4, "train.lr": 1e-2, "train.steps": 4, "validation.rows": 0}


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "base"
    run(train, 2, shards, folder, {"train.steps": 2, "validation.rows": 0})
    return folder


@pytest.fixture(scope="module")
def adapters(shards, base) -> Path:
    folder = base.with_name("adapters")
    run(train_adapters, 2, shards, folder, {**ADAPTED, "run.start_from": base, "zero.stage": 2})
    return folder


def train_adapters(shards: Path, output: Path, changed: dict[str, Any]) -> None:
    """A run with another run's model."""
    leave_out_pictures()
    run = build_run(tiny_start(shards, output, changed), torch.device("cpu"))
    Trainer(run, train_step=TrainStep(run)).train()


def test_a_checkpoint_holds_adapters_alone_and_is_read_with_its_base(base, adapters):
    newest = list_checkpoints(adapters)[-1]
    reader, of_base = CheckpointReader(newest), CheckpointReader(list_checkpoints(base)[-1])
    stored = json.loads((newest / MANIFEST).read_text())["tensors"]
    assert stored
    assert all(map(is_adapter, stored))
    assert set(reader.names()) == {*of_base.names(), *stored}
    for name in of_base.names():
        assert torch.equal(reader.read(name), of_base.read(name)), name
    moved = [reader.read(name).any() for name in stored if name.endswith("lora_B")]
    assert all(moved), "every adapter has moved"


def test_a_run_goes_on_as_if_it_had_not_stopped(shards, base, adapters):
    stopped = Path(shutil.copytree(adapters, adapters.with_name("stopped")))
    shutil.rmtree(list_checkpoints(stopped)[-1])
    # Other ranks, another stage, and the folder of the run has moved.
    run(
        train_adapters, 2, shards, stopped, {**ADAPTED, "run.start_from": base, "run.resume": "latest", "zero.stage": 2}
    )
    assert rows(stopped)[-2:] == rows(adapters)[-2:], "to the last bit"


def test_exports_are_the_adapted_model(adapters, tmp_path, capsys):
    assert cli_commands.main(["convert", "--to", "hf", str(adapters), str(tmp_path / "hf"), "--verify", "tensors"]) == 0
    capsys.readouterr()
    ours, merged = load_model(adapters), load_model(tmp_path / "hf")
    assert not any(map(is_adapter, merged.state_dict()))
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        got, wanted = (one.logits(one(tokens, tokens)) for one in (ours, merged))
    assert (got - wanted).abs().max() <= 1e-5
    peft, back = tmp_path / "peft", tmp_path / "back"
    assert cli_commands.main(["convert", "--to", "peft", str(adapters), str(peft)]) == 0
    base = str(CheckpointReader(list_checkpoints(adapters)[-1]).base.folder)
    assert cli_commands.main(["convert", "--from", "peft", str(peft), str(back), "--base", base]) == 0
    again = load_model(back).state_dict()
    assert all(torch.equal(again[name], x) for name, x in ours.state_dict().items())


def test_a_base_that_is_gone_or_another_is_named(adapters, tmp_path):
    newest = list_checkpoints(adapters)[-1]
    cases = (
        ({"folder": "../nowhere"}, "their base is missing"),
        ({"folder": "."}, "holds adapters itself"),
        ({"hash": "0" * 32}, "another base"),
    )
    for number, (entry, message) in enumerate(cases):
        folder = Path(shutil.copytree(newest, tmp_path / str(number)))
        manifest = json.loads((folder / MANIFEST).read_text())
        base = str(CheckpointReader(newest).base.folder.resolve())
        manifest["base"] = {**manifest["base"], "folder": base, **entry}
        (folder / MANIFEST).write_text(json.dumps(manifest | {"hash": canonical_hash(manifest)}))
        with pytest.raises(CheckpointError, match=message):
            CheckpointReader(folder)


def test_muon_is_refused(base):
    words = {**TINY_RUN, **ADAPTED, "run.start_from": base, "train.optimizer": "muon"}
    config = load_run_config([word for key, value in words.items() for word in (f"--{key}", str(value))])
    with pytest.raises(
        ConfigError, match=r"(?s)muon is not supported with model.adapter.rank=4.*Try --train.optimizer"
    ):
        check_objective(config)


def test_adapters_without_a_base_are_refused_before_anything_is_built(shards, tmp_path):
    config = tiny_config(shards, tmp_path, ADAPTED)
    with pytest.raises(ConfigError, match=r"(?s)there are none: run.start_from=no.*Try --run.start_from"):
        find_origin(config, config.model.config(), tmp_path)


def test_adapters_start_from_their_own_base_alone(shards, adapters, tmp_path):
    words = {**TINY_RUN, **ADAPTED, "run.start_from": adapters, "model.adapter.rank": 6, "data.train": shards}
    with pytest.raises(ConfigError, match=r"model.adapter"):
        load_run_config([word for key, value in words.items() for word in (f"--{key}", str(value))])
