"""Checkpoints that somebody made up, their hashes consistent: refused on one screen, before anything is allocated.

Each is given to everything that opens a checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from longctx.checkpoint_format import MANIFEST, CheckpointReader, canonical_hash
from longctx.conversion.checkpoint_checks import check_checkpoint_tensors, open_verified_checkpoint
from longctx.conversion.checkpoint_writer import save_master_weights
from longctx.conversion.hf_conversion import export_checkpoint
from longctx.files import hash_file
from longctx.model.decoder import Decoder
from tests.bounded import HOSTILE_JSON, put_odd_file, put_sparse_file, refusal
from tests.longctx.samples import tiny_config

CONFIG = tiny_config()
NORM = "model.norm.weight"
FILE = "master.safetensors"

Body = dict[str, Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint of a tiny model, to copy."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoint"
    weights = Decoder(CONFIG).state_dict().items()
    return save_master_weights(
        CONFIG, weights, folder, dtype=torch.float32, training={"imported": {"dtype": "float32"}}
    )


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "checkpoint"))


def seal(folder: Path, body: Body) -> None:
    """Write a manifest with the hash that belongs to it."""
    (folder / MANIFEST).write_text(json.dumps(body | {"hash": canonical_hash(body)}))


def changed(*path: str | int, value: Any) -> Callable[[Body], None]:
    """A change of one value, by its keys."""

    def change(body: Body) -> None:
        for key in path[:-1]:
            body = body[key]  # type: ignore[index]
        body[path[-1]] = value  # type: ignore[index]

    return change


def without(*path: str) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        for key in path[:-1]:
            body = body[key]
        del body[path[-1]]

    return change


def piece(**values: Any) -> Callable[[Body], None]:
    """Changes of the piece that holds the last norm."""
    return lambda body: body["tensors"][NORM]["roles"]["master"][0].update(values)


def file_named(name: str) -> Callable[[Body], None]:
    """The file of pieces under another name, everywhere in the manifest."""

    def change(body: Body) -> None:
        body["files"][name] = body["files"].pop(FILE)
        for tensor in body["tensors"].values():
            for found in tensor["roles"]["master"]:
                found["file"] = name

    return change


def pieces_of_nothing(body: Body) -> None:
    """A tensor of 10^15 values, in a file that is said to hold them."""
    body["tensors"][NORM] = {
        "shape": [10**15],
        "roles": {"master": [{"file": FILE, "key": NORM, "start": 0, "numel": 10**15}]},
    }
    claim_bytes(5 * 10**15)(body)


def claim_bytes(count: int) -> Callable[[Body], None]:
    """A file of so many bytes, and of no block that one could count."""

    def change(body: Body) -> None:
        del body["files"][FILE]["blocks"]
        body["files"][FILE]["bytes"] = count

    return change


def more_tensors(body: Body) -> None:
    entry = body["tensors"][NORM]
    body["tensors"]["model.layers.7.of_nobody"] = json.loads(json.dumps(entry).replace(NORM, "other"))


def aliased(body: Body) -> None:
    """Two tensors in one entry of a file."""
    first, second = (name for name in body["tensors"] if "input_layernorm" in name)
    body["tensors"][second]["roles"] = body["tensors"][first]["roles"]


def cut(*bounds: tuple[int, int]) -> Callable[[Body], None]:
    """The last norm in pieces of these starts and sizes."""

    def change(body: Body) -> None:
        body["tensors"][NORM]["roles"]["master"] = [
            {"file": FILE, "key": f"{NORM}.{number}", "start": start, "numel": numel}
            for number, (start, numel) in enumerate(bounds)
        ]

    return change


def many_layers(count: int) -> Callable[[Body], None]:
    """A model of so many layers, and a tensor for each: names alone."""

    def change(body: Body) -> None:
        body["model"]["num_layers"] = count
        entry = {"shape": [0], "roles": {"master": []}}
        body["tensors"] |= {f"t{number}": entry for number in range(count)}

    return change


def model(name: str, value: Any) -> Callable[[Body], None]:
    return changed("model", name, value=value)


def rope(name: str, value: Any) -> Callable[[Body], None]:
    return changed("model", "rope", name, value=value)


PATHS = ("../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", ".hidden.safetensors", "a\\b.safetensors",
         "a\0b.safetensors", "-rf.safetensors", "a b.safetensors", "\x1b[2Jx.safetensors", "x" * 300 + ".safetensors",
         "", "C:x.safetensors")  # fmt: skip

FORGED: dict[str, tuple[Callable[[Body], None], str]] = {
    **{f"a file {path[:24]!r}": (file_named(path), "is not a plain file name") for path in PATHS},
    "the manifest as a file": (
        lambda body: body["files"].update({MANIFEST: {"bytes": 9, "hash": "0" * 32}}),
        "cannot list itself",
    ),
    "a piece in the manifest": (piece(file=MANIFEST), r"not a \.safetensors file name"),
    "a piece in a pickle": (piece(file="master.bin"), r"not a \.safetensors file name"),
    "a piece in another file": (piece(file="other.safetensors"), r"is stored in the unlisted file other\.safetensors"),
    "a piece elsewhere": (piece(file="../master.safetensors"), r"not a \.safetensors file name"),
    "a file that is a number": (piece(file=3), "file=3 is not a name"),
    "a key that is a list": (piece(key=[]), r"key=\[\] is not a printable name"),
    "a key that is not there": (piece(key="nobody"), "nobody"),
    "a key without end": (piece(key="k" * 10_000), "is not a printable name with 1 to 400 characters"),
    "a start below zero": (piece(start=-1), "start=-1 is not an integer from 0"),
    "a start in the middle": (piece(start=1), "has a gap or an overlap at value 0"),
    "a size beyond the tensor": (piece(numel=33), "ends at value 33 of 32"),
    "a size short of the tensor": (piece(numel=31), "ends at value 31 of 32"),
    "a gap": (cut((0, 8), (9, 23)), "has a gap or an overlap at value 8"),
    "a range twice": (cut((0, 16), (0, 16), (16, 16)), "has a gap or an overlap at value 16"),
    "two tensors in one place": (aliased, "with another slice"),
    "values beyond every disk": (pieces_of_nothing, "in the manifest|has shape|cannot be read|F32"),
    "a shape of 10^18 values": (changed("tensors", NORM, "shape", value=[10**9, 10**9]), "too many values for a file"),
    "a shape of many sizes": (changed("tensors", NORM, "shape", value=[1] * 10_000), "has 10000 entries; expected"),
    "a shape that is a number": (changed("tensors", NORM, "shape", value=32), "shape=32 is not a list"),
    "another shape of as many values": (changed("tensors", NORM, "shape", value=[4, 8]), "instead of"),
    "tensors of nobody": (more_tensors, "model.layers.7.of_nobody|bytes, but its slices"),
    "a tensor less": (without("tensors", NORM), "missing|lacks|model.norm.weight"),
    "no tensors": (changed("tensors", value={}), "expected at least 1"),
    "a tensor of no name": (changed("tensors", "", value={"shape": [], "roles": {}}), "is not a printable name"),
    "a tensor that paints": (changed("tensors", "\x1b[31m", value={"shape": [], "roles": {}}), "not a printable name"),
    "roles that are a list": (changed("tensors", NORM, "roles", value=[]), "is not an object"),
    "a role of another name": (changed("tensors", NORM, "roles", value={"slave": []}), "none of master"),
    "no role": (changed("tensors", NORM, "roles", value={}), "buffers have only the master"),
    "one role more": (changed("tensors", NORM, "roles", "exp_avg", value=[]), "ends at value 0|only the master"),
    "a piece with a key more": (piece(more=1), "has the unknown key 'more'"),
    "files that are a list": (changed("files", value=[FILE]), "files=.* is not an object"),
    "a file without a hash": (without("files", FILE, "hash"), "lacks hash"),
    "a hash that is none": (changed("files", FILE, "hash", value="0" * 31), "is not a checksum of 32 hex digits"),
    "bytes below zero": (changed("files", FILE, "bytes", value=-1), "is not an integer"),
    "bytes that are too few": (changed("files", FILE, "bytes", value=1000), "has 1000 bytes, but its slices"),
    "bytes that are too many": (claim_bytes(2**53), "bytes, but .* in the manifest"),
    "blocks that are too few": (changed("files", FILE, "blocks", value=""), "but 0 block hashes"),
    "blocks that are too many": (changed("files", FILE, "blocks", value="0" * 32_000), "but 1000 block hashes"),
    "blocks that are a list": (changed("files", FILE, "blocks", value=["0" * 32]), "sequence of 32-digit"),
    "blocks of another file": (changed("files", FILE, "blocks", value="0" * 32), "is damaged: bytes 0 to "),
    "a dtype that is none": (changed("dtype", value="Tensor"), "dtype='Tensor' is none of float32"),
    "an import's dtype": (changed("training", "imported", "dtype", value="nn"), "is none of float32"),
    "an import's ids": (changed("training", "imported", "token_ids", value={"eos_token_id": 10**20}), "not an integer"),
    "an import that is text": (changed("training", "imported", value="x"), "imported='x' is not an object"),
    "training that is a list": (changed("training", value=[]), r"training=\[\] is not an object"),
    "no training": (without("training"), "lacks training"),
    "a step of training below zero": (changed("training", "step", value=-1), "training.step=-1 is not an integer"),
    "a world of nobody": (changed("training", "world_size", value=0), "training.world_size=0"),
    "loads that are ragged": (changed("training", "expert_load", value=[[1], [1, 2]]), "rows of different lengths"),
    "loads that are text": (changed("training", "expert_load", value=[["a"]]), "='a' is not a number"),
    "a config that is text": (changed("training", "config", value="x"), "config='x' is not an object"),
    "a version that is true": (changed("version", value=True), "format version True"),
    "a model that is a list": (changed("model", value=[]), r"model=\[\] is not an object"),
    "10^6 layers": (model("num_layers", 10**6), r"must be at most 4,096"),
    "more layers than tensors": (model("num_layers", 4000), r"4,000 layers, but only"),
    "layers by name alone": (many_layers(4000), "parameters, but its tensors only|missing"),
    "no layers": (model("num_layers", 0), "must be at least 1"),
    "half a layer": (model("num_layers", 1.5), "must be a whole number"),
    "10^6 experts": (model("num_experts", 10**6), "must be at most 65,536"),
    "65,536 experts": (model("num_experts", 65_536), "parameters, but its tensors only"),
    "a wide model": (model("hidden_size", 2**20), "parameters, but its tensors only"),
    "a model without end": (model("hidden_size", 10**18), "must be at most"),
    "kinds of layers that are none": (model("layers", ["full" * 10_000]), "must list one or more of"),
    "kinds in kinds": (model("layers", [["full"]]), "must be a list"),
    "dense layers beyond": (model("dense_layers", list(range(100_000))), "lists 100000 layers"),
    "an activation of a megabyte": (model("activation", "a" * 2**20), "is unknown"),
    "a key of another release": (model("num_wings", 2), "unknown model keys"),
    "many keys of another release": (
        lambda body: body["model"].update({f"{n}" * 100: 1 for n in range(10_000)}),
        "unknown model keys",
    ),
    "a rope that is a list": (model("rope", []), "model.rope"),
    "a rope of nobody": (rope("kind", "noose"), "is unknown"),
    "a base below one": (rope("theta", -1.0), "must be a number above 1"),
    "a base beyond powers": (rope("theta", 1e300), "must be at most"),
    "a stretch beyond powers": (
        lambda body: body["model"]["rope"].update(kind="ntk", factor=1e300),
        "must be at most",
    ),
}  # fmt: skip


def open_in_every_way(folder: Path, output: Path) -> list[Callable[[], object]]:
    """What opens a checkpoint: to look at it, to convert it, and to read it."""

    def read_all() -> None:
        reader = CheckpointReader(folder)
        check_checkpoint_tensors(reader)
        for name in reader.names():
            reader.read(name)

    return [
        lambda: open_verified_checkpoint(folder),
        lambda: export_checkpoint(folder, output, tokenizer="none"),
        read_all,
    ]


@pytest.mark.few(31)
@pytest.mark.parametrize("forgery", FORGED)
def test_a_sealed_manifest_that_cannot_be_right_is_refused(folder: Path, tmp_path: Path, forgery: str):
    change, said = FORGED[forgery]
    body = json.loads((folder / MANIFEST).read_text())
    change(body)
    seal(folder, body)
    messages = [refusal(action) for action in open_in_every_way(folder, tmp_path / "hf")]
    assert any(re.search(said, message) for message in messages), messages
    assert all(str(folder) in message or "model" in message for message in messages), messages
    assert not (tmp_path / "hf").exists()


# --------------------------------------------------------------------------------------- what is no manifest at all


TEXTS = HOSTILE_JSON | {
    "a million keys": (b"{" + b",".join(b'"%d":0' % n for n in range(1_400_000)) + b"}", "values; the limit is"),
    "text": (b'"longctx-checkpoint"', "not a longctx checkpoint"),
    "a list": (b"[]", "not a longctx checkpoint"),
    "a format that is a list": (b'{"format": ["longctx-checkpoint"]}', "not a longctx checkpoint"),
}


@pytest.mark.parametrize("content", TEXTS)
def test_what_is_no_strict_json_is_refused(folder: Path, tmp_path: Path, content: str):
    (folder / MANIFEST).write_bytes(TEXTS[content][0])
    for action in open_in_every_way(folder, tmp_path / "hf"):
        assert re.search(TEXTS[content][1], refusal(action))


class TestOtherFiles:
    """Files that are not what their names say."""

    def test_a_manifest_of_ten_gigabytes_is_not_read(self, folder: Path, tmp_path: Path):
        put_sparse_file(folder / MANIFEST, 10 * 2**30)
        for action in open_in_every_way(folder, tmp_path / "hf"):
            assert "10,737,418,240 bytes; the limit is" in refusal(action)

    def test_a_manifest_may_be_larger_where_it_has_files_to_describe(self, folder: Path):
        body = json.loads((folder / MANIFEST).read_text())
        seal(folder, body | {"training": {"note": "x" * 2**25}})
        assert "; the limit is" in refusal(lambda: CheckpointReader(folder))
        put_sparse_file(folder / "rank_00001.safetensors", 2**24)
        CheckpointReader(folder)

    @pytest.mark.parametrize("name", [MANIFEST, FILE])
    def test_a_link_out_of_the_folder(self, folder: Path, tmp_path: Path, name: str):
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        for action in open_in_every_way(folder, tmp_path / "hf"):
            assert "links outside of its folder" in refusal(action)

    @pytest.mark.parametrize("name", [MANIFEST, FILE])
    @pytest.mark.parametrize("kind", ["pipe", "folder", "itself", "nothing"])
    def test_what_is_no_plain_file(self, folder: Path, tmp_path: Path, name: str, kind: str):
        if kind == "nothing":
            (folder / name).unlink()
            (folder / name).symlink_to("nobody")
        else:
            put_odd_file(folder / name, kind)
        for action in open_in_every_way(folder, tmp_path / "hf"):
            refusal(action)

    @pytest.mark.parametrize("header_bytes", [2**63, 10**8, 2**24, 3])
    def test_a_header_of_any_size(self, folder: Path, tmp_path: Path, header_bytes: int):
        body = json.loads((folder / MANIFEST).read_text())
        path = folder / FILE
        path.write_bytes(header_bytes.to_bytes(8, "little") + path.read_bytes()[8:])
        if header_bytes < 2**30:
            with path.open("r+b") as file:
                file.truncate(8 + header_bytes + path.stat().st_size)
        body["files"][FILE] = {"bytes": path.stat().st_size, "hash": hash_file(path)}
        seal(folder, body)
        for action in open_in_every_way(folder, tmp_path / "hf"):
            assert FILE in refusal(action)

    def test_a_tensor_of_integers(self, folder: Path, tmp_path: Path):
        with safe_open(folder / FILE, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors | {NORM: tensors[NORM].view(torch.int32)}, folder / FILE)
        body = json.loads((folder / MANIFEST).read_text())
        body["files"][FILE] = {"bytes": (folder / FILE).stat().st_size, "hash": hash_file(folder / FILE)}
        seal(folder, body)
        for action in open_in_every_way(folder, tmp_path / "hf"):
            assert "the manifest lists F32 [32]" in refusal(action)
