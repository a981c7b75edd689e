"""The checkpoint reader: any cut into pieces gives the same tensor, anything damaged is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from longctx.checkpoint_format import (
    FORMAT,
    MANIFEST,
    ROLES,
    VERSION,
    CheckpointReader,
    canonical_hash,
    find_checkpoint,
    model_config,
)
from longctx.config import ModelConfig
from longctx.conversion.tensor_layouts import parameter_shapes
from longctx.errors import CheckpointError
from longctx.storage import hashed_blocks
from longctx.storage.hashed_blocks import describe_file
from tests.longctx.samples import tiny_config

SHAPES = {"a.weight": (4, 5), "b.bias": (3,), "c.experts": (2, 3, 2)}


Shapes = Mapping[str, tuple[int, ...]]


def tensor(name: str, role: str, shapes: Shapes = SHAPES) -> torch.Tensor:
    shape = shapes[name]
    offset = 1000 * ROLES.index(role) + 100 * list(shapes).index(name)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + offset


def write(
    folder: Path, cuts: dict[str, list[int]] | None = None, roles=ROLES, shapes: Shapes = SHAPES, **changes
) -> Path:
    """A checkpoint whose flattened tensors are cut at ``splits``; the pieces alternate between two files."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    table = {}
    for name, shape in shapes.items():
        table[name] = {"shape": list(shape), "roles": {role: [] for role in roles}}
        for role in roles:
            flat = tensor(name, role, shapes).flatten()
            bounds = [0, *(cuts or {}).get(name, []), len(flat)]
            for number, (a, b) in enumerate(pairwise(bounds)):
                key = f"{name}/{role}/{a}/{number}"
                files[number % 2][key] = flat[a:b].clone()
                piece = {"file": f"f{number % 2}.safetensors", "key": key, "start": a, "numel": b - a}
                table[name]["roles"][role].append(piece)
    for number, content in enumerate(files):
        save_file(content, folder / f"f{number}.safetensors")
    paths = [folder / f"f{number}.safetensors" for number in (0, 1)]
    manifest = {
        "format": FORMAT, "version": VERSION, "step": 7, "dtype": "bfloat16", "model": {"num_layers": 2},
        "tensors": table, "training": {},
        "files": {p.name: describe_file(p) for p in paths},
    }  # fmt: skip
    return seal(folder, manifest | changes)


def write_model(folder: Path, *, step: int, training: dict) -> Path:
    """A checkpoint of a tiny model, in two files."""
    sizes = {"hidden_size": 8, "ffn_size": 8, "num_heads": 2, "vocab_size": 7}
    model = tiny_config(num_layers=1, num_experts=0, shared_ffn_size=0, **sizes)
    shapes, cuts = parameter_shapes(model), {"model.norm.weight": [4]}
    return write(folder, cuts, shapes=shapes, model=asdict(model), step=step, training=training)


def seal(folder: Path, manifest: dict) -> Path:
    (folder / MANIFEST).write_text(json.dumps(manifest | {"hash": canonical_hash(manifest)}))
    return folder


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / MANIFEST).read_text())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_cut_gives_the_same_tensor(tmp_path_factory, data):
    cuts = {
        name: sorted(data.draw(st.lists(st.integers(0, torch.Size(shape).numel()), max_size=5)))
        for name, shape in SHAPES.items()
    }
    reader = CheckpointReader(write(tmp_path_factory.mktemp("ckpt"), cuts))
    for name in SHAPES:
        for role in ROLES:
            whole = tensor(name, role)
            assert torch.equal(reader.read(name, role), whole)
            a, b = sorted(data.draw(st.tuples(*[st.integers(0, whole.numel())] * 2)))
            assert torch.equal(reader.read_range(name, role, a, b - a), whole.flatten()[a:b])
    assert reader.verify() == []
    reader.close()
    assert torch.equal(reader.read("a.weight"), tensor("a.weight", "master"))


def set_block_bytes(monkeypatch, count: int) -> None:
    monkeypatch.setattr(hashed_blocks, "BLOCK_BYTES", count)


@pytest.fixture
def small_blocks(monkeypatch):
    """Files of a few hundred bytes have many blocks."""
    set_block_bytes(monkeypatch, 64)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_ranges_in_any_order_over_any_blocks(tmp_path_factory, small_blocks, data):
    cuts = {"a.weight": [7], "c.experts": [5]}
    reader = CheckpointReader(write(tmp_path_factory.mktemp("ckpt"), cuts))
    for _ in range(data.draw(st.integers(1, 12))):
        name, role = data.draw(st.sampled_from(list(SHAPES))), data.draw(st.sampled_from(ROLES))
        whole = tensor(name, role).flatten()
        a, b = sorted(data.draw(st.tuples(*[st.integers(0, whole.numel())] * 2)))
        out = torch.full((b - a,), -1.0, dtype=data.draw(st.sampled_from([torch.float32, torch.float64])))
        reader.read_into(name, role, a, out)
        assert torch.equal(out.float(), whole[a:b])
    reader.close()


def problem_of(action) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


def test_no_value_of_a_damaged_block_is_used(tmp_path, small_blocks):
    folder = write(tmp_path / "c", {"a.weight": [7]})
    path = folder / "f0.safetensors"
    content = path.read_bytes()
    for at in range(0, len(content), 29):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        reader, damaged = CheckpointReader(folder), 0
        for name, role in [(name, role) for name in SHAPES for role in ROLES]:
            out, whole = torch.full((torch.Size(SHAPES[name]).numel(),), -1.0), tensor(name, role).flatten()
            said = problem_of(partial(reader.read_into, name, role, 0, out))
            if said:
                damaged += 1
                assert f"{path} is damaged: bytes {at // 64 * 64:,} to " in said
                out = torch.where(out == -1, whole, out)
            assert torch.equal(out, whole), "what was filled is right"
        assert damaged, at
        assert CheckpointReader(folder).verify() == [
            "f0.safetensors is damaged: its xxh3-128 differs from the manifest's"
        ]


def test_blocks_without_a_hash_are_refused(tmp_path):
    folder = write(tmp_path / "c")
    manifest = manifest_of(folder)
    for hashes, said in {"": "0 block hashes", "0" * 64: "2 block hashes", "z" * 32: "sequence of"}.items():
        manifest["files"]["f0.safetensors"]["blocks"] = hashes
        with pytest.raises(CheckpointError, match=said):
            CheckpointReader(seal(folder, manifest))
    # Earlier releases wrote none: their files are hashed whole before a run reads them.
    del manifest["files"]["f0.safetensors"]["blocks"]
    assert torch.equal(CheckpointReader(seal(folder, manifest)).read("a.weight"), tensor("a.weight", "master"))


@pytest.mark.parametrize("past_cache", [True, False])
def test_files_of_many_blocks(tmp_path, monkeypatch, past_cache):
    """Real ones, of which more than memory is taken for are read ahead; one is damaged and not asked for."""
    set_block_bytes(monkeypatch, 4096)
    values = torch.arange(100_000, dtype=torch.float32)
    path = tmp_path / "file.safetensors"
    save_file({"x": values}, path)
    entry, begin = describe_file(path), path.stat().st_size - values.nbytes
    with path.open("r+b") as file:
        file.seek(80 * 4096)
        file.write(b"damaged")
    reader = hashed_blocks.BlockReader(past_cache=past_cache)
    reader.add(path, entry["bytes"], entry["blocks"])
    for start, stop in [(0, 1000), (1000, 70_000), (5, 60_000), (90_000, 100_000), (99_999, 100_000)]:
        out = torch.zeros(stop - start)
        reader.read_into(path.name, begin + 4 * start, out.view(torch.uint8))
        assert torch.equal(out, values[start:stop])
    with pytest.raises(CheckpointError, match=r"is damaged: bytes 327,680 to 331,776 "):
        reader.read_into(path.name, begin, torch.zeros(100_000).view(torch.uint8))
    reader.close()


def test_what_a_reader_tells(tmp_path):
    reader = CheckpointReader(write(tmp_path / "c"))
    assert (reader.step, reader.dtype, reader.roles) == (7, torch.bfloat16, ROLES)
    assert reader.names() == list(SHAPES)
    assert {n: reader.shape(n) for n in reader.names()} == SHAPES
    assert model_config(reader) == ModelConfig(num_layers=2)
    weights = dict(reader.state_dict())
    assert list(weights) == list(SHAPES)
    assert torch.equal(weights["b.bias"], tensor("b.bias", "master").to(torch.bfloat16))
    assert dict(reader.state_dict(torch.float32))["b.bias"].dtype == torch.float32
    with pytest.raises(ValueError, match=r"not all in b\.bias"):
        reader.read_range("b.bias", "master", 1, 3)


def test_masters_alone_are_a_checkpoint(tmp_path):
    reader = CheckpointReader(write(tmp_path / "c", roles=("master",)))
    assert reader.roles == ("master",)
    assert torch.equal(reader.read("c.experts"), tensor("c.experts", "master"))
    with pytest.raises(CheckpointError, match="no exp_avg"):
        reader.read("c.experts", "exp_avg")


@pytest.mark.parametrize("content", [torch.zeros(19), torch.zeros(20, dtype=torch.bfloat16), torch.zeros(4, 5)])
def test_a_piece_is_what_the_manifest_says(tmp_path, content):
    folder = write(tmp_path / "c", roles=("master",))
    save_file({"a.weight/master/0/0": content, "others": torch.zeros(40)}, folder / "f0.safetensors")
    manifest = manifest_of(folder)
    manifest["files"]["f0.safetensors"] = describe_file(folder / "f0.safetensors")
    seal(folder, manifest)
    with pytest.raises(CheckpointError, match=r"the manifest lists F32 \[20\]"):
        CheckpointReader(folder).read("a.weight")


def test_verify_names_every_damaged_file(tmp_path):
    folder = write(tmp_path / "c", {"a.weight": [3]})
    content = bytearray((folder / "f0.safetensors").read_bytes())
    for at in range(len(content) - 40, len(content)):  # data, not header
        flipped = content.copy()
        flipped[at] ^= 1
        (folder / "f0.safetensors").write_bytes(flipped)
        (problem,) = CheckpointReader(folder).verify()
        assert "f0.safetensors is damaged" in problem
    (folder / "f0.safetensors").write_bytes(content[:-1])
    (folder / "f1.safetensors").unlink()
    assert [p.split()[0] for p in CheckpointReader(folder).verify()] == ["f0.safetensors", "f1.safetensors"]
    assert [p.split()[0] for p in CheckpointReader(folder).verify(["f1.safetensors"])] == ["f1.safetensors"]
    with pytest.raises(CheckpointError, match="cannot be read"):
        CheckpointReader(folder).read("a.weight")


def test_damaged_manifests_are_refused(tmp_path):
    folder = write(tmp_path / "c")
    whole = (folder / MANIFEST).read_text()
    for text, said in {
        whole[:-9]: "cannot be read",
        whole.replace('"step": 7', '"step": 8'): "damaged",
        whole.replace('"version": 1', '"version": 2'): "version 2",
    }.items():
        (folder / MANIFEST).write_text(text)
        with pytest.raises(CheckpointError, match=said):
            CheckpointReader(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        CheckpointReader(folder)


def test_find_checkpoint(tmp_path):
    for step in (9, 10, 100):
        write(tmp_path / "run" / "checkpoints" / f"step_{step:06d}")
    for name in ("step_000200", ".step_000300.partial", "step_x"):
        (tmp_path / "run" / "checkpoints" / name).mkdir()
    write(tmp_path / "run" / "checkpoints" / "step_000400.discarded")
    newest = tmp_path / "run" / "checkpoints" / "step_000100"
    assert find_checkpoint(tmp_path / "run") == find_checkpoint(newest) == newest
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="gone does not exist"):
        find_checkpoint(tmp_path / "gone")
