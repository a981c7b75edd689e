"""Weights in pickles: tensors come out, and nothing else gets in."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from longctx.conversion import load_hf, save_hf
from longctx.conversion.weights.pickled import PickledFile
from longctx.errors import CheckpointError
from longctx.model.decoder import Decoder
from tests.longctx.samples import tiny_config

CONFIG = tiny_config(num_layers=1)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A Hugging Face folder without weights."""
    hf = save_hf(CONFIG, Decoder(CONFIG).state_dict(), tmp_path / "hf")
    (hf / "model.safetensors").unlink()
    return hf


def weights() -> dict[str, torch.Tensor]:
    return dict(Decoder(CONFIG).state_dict())


class Touch:
    """Unpickling this anywhere else runs a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_single_file_of_any_name(folder, name, kind):
    torch.save(kind(weights()), folder / name)
    torch.save({"lr": 1.0}, folder / "training_args.bin")
    config, tensors = load_hf(folder)
    assert config == CONFIG
    assert all(torch.equal(tensors[key], value) for key, value in weights().items())


def test_shards_and_their_index(folder):
    names, index = sorted(weights()), {}
    for number in range(3):
        file = f"pytorch_model-{number + 1:05d}-of-00003.bin"
        torch.save({key: weights()[key] for key in names[number::3]}, folder / file)
        index |= dict.fromkeys(names[number::3], file)
    path = folder / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    assert all(torch.equal(load_hf(folder)[1][key], value) for key, value in weights().items())
    for wrong in ("../x.bin", "/x.bin", "x.safetensors"):
        path.write_text(json.dumps({"weight_map": index | {names[0]: wrong}}))
        with pytest.raises(CheckpointError, match=r"index\.json lists .*not a \.bin file in its folder"):
            load_hf(folder)
    path.write_text(json.dumps({"weight_map": index | {names[0]: index[names[1]]}}))
    with pytest.raises(CheckpointError, match="disagree"):
        load_hf(folder)


def test_shared_and_strided_storage(tmp_path):
    whole = torch.arange(60.0).view(6, 10)
    tensors = {"tied": whole, "again": whole, "rows": whole[2:4], "turned": whole.T, "alone": torch.zeros(0, 3)}
    tensors["parameter"] = torch.nn.Parameter(whole[1])
    torch.save(tensors, tmp_path / "x.bin")
    file = PickledFile(tmp_path / "x.bin")
    for name, tensor in tensors.items():
        found = file.read(name)
        assert torch.equal(found, tensor)
        assert found.is_contiguous()
        assert found.untyped_storage().nbytes() == found.nbytes
        found.fill_(7)  # its own memory: the others do not see this
    assert torch.equal(file.read("tied"), whole)


def test_the_mapping_is_renewed_between_tensors(tmp_path):
    torch.save({f"t{i}": torch.full((40,), float(i)) for i in range(9)}, tmp_path / "x.bin")
    file = PickledFile(tmp_path / "x.bin", remap_after_bytes=100)
    assert [float(file.read(f"t{i}")[3]) for i in range(9)] == list(range(9))


@pytest.mark.parametrize("place", ["beside the tensors", "alone", "in place of a tensor", "as a plain pickle"])
def test_a_pickle_that_runs_a_command_is_refused_and_does_not_run_it(folder, tmp_path, place):
    touch, path = Touch(tmp_path / "executed"), folder / "pytorch_model.bin"
    if place == "as a plain pickle":
        path.write_bytes(pickle.dumps(touch))
    else:
        content = {"beside the tensors": weights() | {"x": touch}, "alone": touch, "in place of a tensor": {"x": touch}}
        torch.save(content[place], path)
    with pytest.raises(CheckpointError) as refusal:
        load_hf(folder)
    assert str(path) in str(refusal.value)
    assert len(str(refusal.value).splitlines()) <= 3
    assert not (tmp_path / "executed").exists()
    if place != "as a plain pickle":
        assert "posix.system" in str(refusal.value)
        torch.load(path, weights_only=False)  # the file is what it seems
        assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([torch.zeros(3)], "contains a list"),
        ({3: torch.zeros(3)}, "has the tensor name 3"),
        ({"a": "text"}, "a in .* is a str"),
        ({"state_dict": {"a": torch.zeros(3)}}, "state_dict in .* is a dict"),
        ({"a": torch.eye(3).to_sparse()}, "supported: dense"),
        ({"a": torch.zeros(3, device="meta")}, "on meta"),
    ],
)
def test_what_is_no_dict_of_tensors_is_refused(tmp_path, content, said):
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=said):
        PickledFile(tmp_path / "x.bin")


def test_dtypes_that_training_cannot_take(tmp_path):
    torch.save({"a": torch.zeros(3, dtype=torch.int8), "b": torch.zeros(3, dtype=torch.float64)}, tmp_path / "x.bin")
    file = PickledFile(tmp_path / "x.bin")
    for name in "ab":
        with pytest.raises(CheckpointError, match=f"{name} in .*supported"):
            file.read(name)


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage", "old format", "storage missing", "storage short"])
def test_damage_is_named(tmp_path, damage):
    path = tmp_path / "x.bin"
    torch.save({"a": torch.arange(64.0)}, path, _use_new_zipfile_serialization=damage != "old format")
    content = path.read_bytes()
    if damage.startswith("storage"):
        with zipfile.ZipFile(path) as old:
            parts = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
            for name, part in parts.items():
                if not name.endswith("data/0"):
                    new.writestr(name, part)
                elif damage == "storage short":
                    new.writestr(name, part[:8])
    else:
        changed = {"empty": b"", "cut": content[:-80], "garbage": b"\x80\x02garbage", "old format": content}
        path.write_bytes(changed[damage])
    with pytest.raises(CheckpointError, match=r"x\.bin") as refusal:
        PickledFile(path).read("a")
    assert len(str(refusal.value).splitlines()) <= 3


def test_no_message_advises_the_unsafe_reader(folder):
    path = folder / "pytorch_model.bin"
    torch.save(weights(), folder / "whole.bin")
    with zipfile.ZipFile(folder / "whole.bin") as whole, zipfile.ZipFile(path, "w") as broken:
        for info in whole.infolist():
            content = whole.read(info)
            if info.filename.endswith("data.pkl"):
                content = content[:2] + b"\xff" + content[2:]  # an opcode that no pickle has
            broken.writestr(info, content)
    (folder / "whole.bin").unlink()
    with pytest.raises(CheckpointError, match="cannot be read as tensors") as error:
        load_hf(folder)
    assert "weights_only" not in str(error.value)
    assert "torch.load" not in str(error.value)
