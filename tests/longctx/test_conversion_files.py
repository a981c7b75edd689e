"""Folders from strangers: an index that lies, links that lead away, pickles, damage; and disks that lie."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longctx.conversion import files as files_module
from longctx.conversion import load_hf, save_hf
from longctx.conversion.files import INDEX, WEIGHTS, ShardWriter, read_json, staged_folder
from longctx.errors import CheckpointError
from longctx.model.decoder import Decoder
from tests.longctx.samples import tiny_config

CONFIG = tiny_config(num_layers=1, tie_embeddings=False)


@pytest.fixture
def sharded(tmp_path) -> Path:
    return save_hf(CONFIG, Decoder(CONFIG).state_dict(), tmp_path / "hf", shard_bytes=8_000)


def rewrite_index(folder: Path, **changes) -> None:
    index = json.loads((folder / INDEX).read_text())
    weight_map = {k: v for k, v in (index["weight_map"] | changes).items() if v is not None}
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": weight_map}))


def test_shards_and_their_index(sharded):
    index = json.loads((sharded / INDEX).read_text())
    sizes = [sum(t.nbytes for t in load_file(f).values()) for f in sharded.glob("*.safetensors")]
    assert len(sizes) > 3
    assert index["metadata"]["total_size"] == sum(sizes)
    largest_tensor = 97 * 32 * 4
    assert max(sizes) <= max(8_000, largest_tensor)
    tensors = load_hf(sharded)[1]
    assert all(torch.equal(tensors[name], value) for name, value in Decoder(CONFIG).state_dict().items())


@pytest.mark.parametrize(
    "file",
    ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "..", "", "a\\b.safetensors", "x.bin"],
)
def test_an_index_cannot_name_files_elsewhere(sharded, file):
    save_file({"model.norm.weight": torch.zeros(32)}, sharded.parent / "secret.safetensors")
    rewrite_index(sharded, **{"model.norm.weight": file})
    with pytest.raises(CheckpointError, match="no safetensors file of its own folder"):
        load_hf(sharded)


@pytest.mark.parametrize("link", ["file", "folder of the file"])
def test_links_must_stay_in_the_folder(sharded, link):
    shard = sorted(sharded.glob("*.safetensors"))[0]
    outside = sharded.parent / "outside"
    outside.mkdir()
    shard.rename(outside / shard.name)
    shard.symlink_to(Path("..") / "outside" / shard.name if link == "file" else outside / shard.name)
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        load_hf(sharded)


def test_the_layout_of_the_hugging_face_cache_is_fine(sharded, tmp_path):
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "rev", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    assert load_hf(snapshot)[0] == CONFIG


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.norm.weight": None}, "only in the file .*model.norm.weight"),
        ({"model.ghost": "SAME"}, "only in the index model.ghost"),
        ({"model.norm.weight": "OTHER"}, "disagree"),
        ({"model.norm.weight": "absent.safetensors"}, r"absent\.safetensors is missing"),
        ({"model.norm.weight": 3}, "no weight_map"),
    ],
)
def test_an_index_must_say_what_the_files_hold(sharded, change, said):
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    same = weight_map["model.norm.weight"]
    other = next(f for f in weight_map.values() if f != same)
    rewrite_index(sharded, **{k: {"SAME": same, "OTHER": other}.get(v, v) for k, v in change.items()})
    with pytest.raises(CheckpointError, match=said):
        load_hf(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded):
    first, second, *_ = sorted(sharded.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor + 1}, second)
    with pytest.raises(CheckpointError, match="disagree"):
        load_hf(sharded)


def test_a_name_twice_in_the_index_is_refused(sharded):
    text = (sharded / INDEX).read_text()
    line = next(line for line in text.splitlines() if "norm.weight" in line)
    (sharded / INDEX).write_text(text.replace(line, line + "\n" + line))
    with pytest.raises(CheckpointError, match="twice"):
        load_hf(sharded)


def test_index_and_single_file_together_are_refused(sharded):
    save_file(dict(Decoder(CONFIG).state_dict()), sharded / WEIGHTS)
    with pytest.raises(CheckpointError, match="both"):
        load_hf(sharded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused(sharded, name):
    for file in [*sharded.glob("*.safetensors"), sharded / INDEX]:
        file.unlink()
    torch.save(Decoder(CONFIG).state_dict(), sharded / name)
    with pytest.raises(CheckpointError, match=r"pickle.*any code"):
        load_hf(sharded)


@pytest.mark.parametrize("damage", ["truncate", "empty", "garbage", "huge header"])
def test_damaged_shards_are_named(sharded, damage):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(
        {
            "truncate": content[:-5],
            "empty": b"",
            "garbage": b"\x10" + content[1:],
            "huge header": (2**62).to_bytes(8, "little") + content[8:],
        }[damage]
    )
    with pytest.raises(CheckpointError, match=shard.name):
        load_hf(sharded)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="no folder"):
        load_hf(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    with pytest.raises(CheckpointError, match=f"neither {WEIGHTS}"):
        load_hf(tmp_path)
    for text in ("{", "[]", '{"a": 1, "a": 2}', "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_json(tmp_path / "config.json")


def test_a_shard_that_does_not_come_back_is_found(tmp_path, monkeypatch):
    def forgetful_save(tensors, path, metadata):
        save_file({n: torch.zeros_like(t) for n, t in tensors.items()}, path, metadata=metadata)

    monkeypatch.setattr(files_module, "save_file", forgetful_save)
    writer = ShardWriter(tmp_path, "model", 10**6)
    writer.add("a", torch.ones(3))
    with pytest.raises(CheckpointError, match="did not come back"):
        writer.finish()


def test_memory_holds_one_shard(tmp_path):
    writer = ShardWriter(tmp_path, "model", 1_000)
    held = []
    for i in range(40):
        writer.add(f"t{i}", torch.full((100,), float(i)))
        held.append(writer._pending_bytes)
    assert max(held) <= 1_000
    assert len(set(writer.finish().values())) == 20
    assert not list(tmp_path.glob("*.partial"))


def test_a_failed_write_leaves_nothing(tmp_path):
    target = tmp_path / "deep" / "out"
    with pytest.raises(KeyboardInterrupt), staged_folder(target) as staging:
        _interrupt((staging / "half").write_text("x"))
    with pytest.raises(CheckpointError, match="could not be written"), staged_folder(target):
        raise OSError(28, os.strerror(28))
    assert list((tmp_path / "deep").iterdir()) == []
    with staged_folder(target) as staging:
        (staging / "whole").write_text("x")
    assert (target / "whole").read_text() == "x"
    (tmp_path / "link").symlink_to(target)
    for taken in (target, tmp_path / "link", target / "whole"):
        with pytest.raises(CheckpointError, match="already exists"), staged_folder(taken):
            pass


def _interrupt(_) -> None:
    raise KeyboardInterrupt
