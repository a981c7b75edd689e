"""Folders from strangers: an index that lies, links that lead away, headers that lie, damage; and disks that lie."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from longctx.conversion import load_hf, save_hf
from longctx.conversion.weights.weights_folder import INDEX, WEIGHTS
from longctx.errors import CheckpointError
from longctx.files import staged_folder
from longctx.model.decoder import Decoder
from longctx.storage import safetensors
from longctx.storage.safetensors import SafetensorsFile, SafetensorsShardWriter
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


@pytest.mark.parametrize("link", ["file", "folder of the file"])
def test_links_must_stay_in_the_folder(sharded, link):
    shard = sorted(sharded.glob("*.safetensors"))[0]
    outside = sharded.parent / "outside"
    outside.mkdir()
    shard.rename(outside / shard.name)
    shard.symlink_to(Path("..") / "outside" / shard.name if link == "file" else outside / shard.name)
    with pytest.raises(CheckpointError, match="links outside of its folder"):
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
    ],
)
def test_an_index_must_say_what_the_files_hold(sharded, change, said):
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    same = weight_map["model.norm.weight"]
    other = next(f for f in weight_map.values() if f != same)
    rewrite_index(sharded, **{k: {"SAME": same, "OTHER": other}.get(v, v) for k, v in change.items()})
    with pytest.raises(CheckpointError, match=said):
        load_hf(sharded)


def test_index_and_single_file_together_are_refused(sharded):
    save_file(dict(Decoder(CONFIG).state_dict()), sharded / WEIGHTS)
    with pytest.raises(CheckpointError, match="both"):
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
    with pytest.raises(CheckpointError, match="not a folder"):
        load_hf(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    with pytest.raises(CheckpointError, match=f"neither {WEIGHTS}"):
        load_hf(tmp_path)


def test_a_shard_that_does_not_come_back_is_found(tmp_path, monkeypatch):
    writer = SafetensorsShardWriter(tmp_path, "model", 16)
    writer.add("a", torch.ones(3))
    monkeypatch.setattr(safetensors.xxhash.xxh3_128, "digest", lambda self: os.urandom(4))
    with pytest.raises(CheckpointError, match="reads back differently"):
        writer.finish()


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=12),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), min_size=12, max_size=12),
    shard_bytes=st.integers(1, 400),
    spread=st.booleans(),
)
def test_what_we_write_the_safetensors_library_reads(shapes, dtypes, shard_bytes, spread):
    tensors = {f"ü\n{i}": torch.randn(shape).to(dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes))}  # noqa: B905
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors, "SMALL_BYTES", 100 if spread else 2**24)  # whether header room is left over
        writer = SafetensorsShardWriter(Path(name), "model", shard_bytes)
        for key, tensor in tensors.items():
            writer.add(key, tensor.T if tensor.dim() == 2 else tensor)  # contiguous or not
        file_of = writer.finish()
        assert set(file_of) == set(tensors)
        for file in Path(name).iterdir():
            theirs, ours = load_file(file), SafetensorsFile(file)
            assert set(theirs) == set(ours.names()) == {key for key in tensors if file_of[key] == file.name}
            assert sum(t.nbytes for t in theirs.values()) <= shard_bytes or len(theirs) - _num_empty(theirs) == 1
            for key, tensor in theirs.items():
                wanted = tensors[key].T if tensors[key].dim() == 2 else tensors[key]
                assert torch.equal(tensor, wanted)
                assert tensor.dtype == wanted.dtype
                assert torch.equal(ours.read(key), wanted)


def _num_empty(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() == 0 for tensor in tensors.values())


def test_a_shard_closes_when_its_header_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "RESERVED_BYTES", 2_000)
    writer = SafetensorsShardWriter(tmp_path, "model", 10**9)
    for i in range(40):
        writer.add(f"t{i}", torch.full((100,), float(i)))
    file_of = writer.finish()
    assert len(set(file_of.values())) == 5
    assert all(float(load_file(tmp_path / file)[name][7]) == int(name[1:]) for name, file in file_of.items())
    assert not list(tmp_path.glob("*.partial"))


# ------------------------------------------------------------------------------------------- headers made by strangers


def entry(start: int, stop: int, shape: object = None, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


def write_header(path: Path, header: object, data: int = 16) -> Path:
    text = header if isinstance(header, str) else json.dumps(header)
    path.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + bytes(data))
    return path


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": entry(0, 20)}, "a is at bytes .*past the end"),
        ({"a": entry(0, 2**63)}, "past the end"),
        ({"a": entry(8, 0, [0])}, "a is at bytes"),
        ({"a": entry(0, 12), "b": entry(8, 16)}, "a and b overlap"),
        ({"a": entry(0, 4), "b": entry(8, 16)}, "leave a gap between them"),
        ({"a": entry(4, 16)}, "the header and a leave"),
        ({"a": entry(0, 8)}, "8 bytes after a belong to no tensor"),
        ({"a": entry(0, 16, [5])}, "which is not 16 bytes"),
        ({"a": entry(0, 16, [-4])}, "describes a by"),
        ({"a": entry(0, 16, [True])}, "describes a by"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "does not describe a"),
        ({"a": {"dtype": 7, "shape": [4], "data_offsets": [0, 16]}}, "describes a by"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 16]}}, "describes a by"),
        ({"a": 5}, "does not describe a"),
        ([], "not a JSON object"),
        ("[" * 50_000, "cannot be read"),
        ('{"a": {"dtype":"F32","shape":[4],"data_offsets":[0,16]}, "a": 1}', "has the key 'a' twice"),
        ('{"a": {"dtype":"F32","shape":[4],"shape":[2],"data_offsets":[0,16]}}', "has the key 'shape' twice"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, header, said):
    path = write_header(tmp_path / "x.safetensors", header)
    with pytest.raises(CheckpointError, match=said) as refusal:
        SafetensorsFile(path)
    assert str(path) in str(refusal.value)
    assert len(str(refusal.value).splitlines()) <= 3


def test_a_file_cut_after_it_was_opened_is_named(tmp_path):
    # More than the blocks that are read ahead of the header.
    size = 16 << 20
    path = write_header(tmp_path / "x.safetensors", {"a": entry(0, size)}, size)
    opened = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"a in .*x\.safetensors cannot be read"):
        opened.read("a")


# ------------------------------------------------------------------------------------------------ which file is meant


def keep_only(folder: Path, *, index: str | None = None, single: str | None = None) -> None:
    """Rename the index, or join all shards into one file of this name."""
    if index:
        (folder / INDEX).rename(folder / index)
        return
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    save_file(tensors, folder / str(single))


@pytest.mark.parametrize("names", [{"index": "weights.safetensors.index.json"}, {"single": "my weights.safetensors"}])
def test_other_names_are_found(sharded, names):
    keep_only(sharded, **names)
    assert load_hf(sharded)[0] == CONFIG


def test_the_usual_name_is_meant_among_others(sharded):
    save_file({"a": torch.zeros(3)}, sharded / "consolidated.safetensors")
    torch.save({"a": torch.zeros(3)}, sharded / "pytorch_model.bin")
    assert load_hf(sharded)[0] == CONFIG
    keep_only(sharded, single="one.safetensors")
    save_file({"a": torch.zeros(3)}, sharded / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"several weight files.*one\.safetensors, two\.safetensors"):
        load_hf(sharded)


def test_a_folder_or_a_pipe_in_a_files_place_is_named(sharded):
    first = min(sharded.glob("*.safetensors"))
    first.unlink()
    first.mkdir()
    with pytest.raises(CheckpointError, match=f"{first.name} is a folder"):
        load_hf(sharded)
    first.rmdir()
    os.mkfifo(first)
    with pytest.raises(CheckpointError, match=f"{first.name} is not a plain file"):
        load_hf(sharded)
    first.unlink()
    first.symlink_to(first.name)
    with pytest.raises(CheckpointError, match=first.name):
        load_hf(sharded)


def test_a_failed_write_leaves_nothing(tmp_path):
    target = tmp_path / "deep" / "out"
    with pytest.raises(KeyboardInterrupt), staged_folder(target, error=CheckpointError) as staging:
        _interrupt((staging / "half").write_text("x"))
    with pytest.raises(CheckpointError, match="could not be written"), staged_folder(target, error=CheckpointError):
        raise OSError(28, os.strerror(28))
    assert list((tmp_path / "deep").iterdir()) == []
    with staged_folder(target, error=CheckpointError) as staging:
        (staging / "whole").write_text("x")
    assert (target / "whole").read_text() == "x"
    (tmp_path / "link").symlink_to(target)
    for taken in (target, tmp_path / "link", target / "whole"):
        with pytest.raises(CheckpointError, match="already exists"), staged_folder(taken, error=CheckpointError):
            pass


def _interrupt(_) -> None:
    raise KeyboardInterrupt
