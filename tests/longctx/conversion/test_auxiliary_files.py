"""What lies beside a model's weights: it comes along byte for byte, or is named; pointers of Git LFS are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.publish import pack_folder
from data_pipeline.prepare.sources import open_source
from longctx.conversion import export_checkpoint, import_deepspeed, import_hf
from longctx.conversion.auxiliary_files import find_auxiliary_files, read_notices
from longctx.errors import CheckpointError, DataError, LongCtxError
from longctx.tokenizer import load_tokenizer
from longctx.untrusted.git_lfs import POINTER_LINE
from tests.longctx.tokenizer.byte_level import SIZE, tokenizer_json, write_model, write_tokenizer

POINTER = POINTER_LINE + b"\noid sha256:" + b"4d7a2146" * 8 + b"\nsize 123456\n"
SIDE_FILES = {
    "special_tokens_map.json": b"{}\n",
    "added_tokens.json": b"{}",
    "vocab.json": '{"Ġa": 0}'.encode(),
    "merges.txt": b"#version: 0.2\r\n",
    "tokenizer.model": b"not ours",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/rag.jinja": b"RAG {{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"TOOLS {{ messages }}",
    "tekken.json": b'{"vocab": []}',
    "LICENSE": b"Do what you like.",
    "LICENSE-MODEL.txt": b"Do what they like.",
    "Notice.txt": b"Built with Example.",
    "USE_POLICY.md": b"No harm.",
    "README.md": b"---\nlicense: other\n---\n# Example\n",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "hf", tokenizer_json())
    for name, content in SIDE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def side_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in SIDE_FILES if (folder / name).exists()}


def test_side_files_come_back_byte_for_byte(model, tmp_path, caplog):
    done = import_hf(model, tmp_path / "in", verify="none")
    assert set(SIDE_FILES) <= set(done.auxiliary_files)
    assert "files left out" not in caplog.text
    export_checkpoint(tmp_path / "in", tmp_path / "out", verify="none")
    assert side_files(tmp_path / "out") == SIDE_FILES
    assert all((tmp_path / "out" / path.name).read_bytes() == path.read_bytes() for path in model.glob("*token*.json"))
    before, after = (
        AutoTokenizer.from_pretrained(str(folder), local_files_only=True).chat_template
        for folder in (model, tmp_path / "out")
    )
    assert before == after
    assert set(before) == {"default", "rag", "tool_use"}


def test_named_templates_travel_with_a_tokenizer(model, tmp_path):
    """Through shards, through a packed folder, and out with an export that is asked for this tokenizer."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("def main")
    source, tokenizer = open_source(tmp_path / "text"), load_tokenizer(model)
    build_shards(source, tokenizer, tmp_path / "data", validation_fraction=0)
    again = load_tokenizer(tmp_path / "data")
    assert again.files == tokenizer.files
    assert again.fingerprint == tokenizer.fingerprint
    pack_folder(tmp_path / "data", tmp_path / "packed", overwrite=False, say=lambda _: None)
    assert load_tokenizer(tmp_path / "packed").files == tokenizer.files
    import_hf(write_model(tmp_path / "plain", tokenizer_json()), tmp_path / "in", verify="none")
    export_checkpoint(tmp_path / "in", tmp_path / "out", tokenizer=tmp_path / "data", verify="none")
    assert (tmp_path / "out/additional_chat_templates/rag.jinja").read_bytes() == b"RAG {{ messages }}"


def test_what_nobody_carries_is_named(model, tmp_path, caplog):
    no_template = "additional_chat_templates/no jinja.txt"
    for name in ("vocab.txt", "modeling.py", "original/params.json", no_template, ".git/config"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("x")
    (model / "NOTICE").write_bytes(b"x" * (4 * 2**20 + 1))
    import_hf(model, tmp_path / "in", verify="none")
    (said,) = [record.getMessage() for record in caplog.records if "files left out" in record.getMessage()]
    assert said.endswith(": NOTICE, additional_chat_templates/no jinja.txt, modeling.py, original/, vocab.txt.")


def test_no_name_of_a_stranger_acts_on_a_terminal(model, tmp_path, caplog):
    (model / "\x1b[2Jgone").write_text("x")
    write_tokenizer(model, tokenizer_json(("\x1b[2J", SIZE, True)))
    import_hf(model, tmp_path / "in", verify="none")
    assert "gone" in caplog.text
    assert f"({SIZE})" in caplog.text
    assert "\x1b" not in caplog.text


def test_a_licence_goes_where_the_weights_go(model):
    """A card does not: it describes the model before it was trained."""
    assert set(read_notices(model)) == {"LICENSE", "LICENSE-MODEL.txt", "Notice.txt", "USE_POLICY.md"}


@pytest.mark.parametrize(
    "name", ["LICENSE", "tokenizer.json", "additional_chat_templates/rag.jinja", "additional_chat_templates"]
)
def test_no_link_leads_out_of_the_folder(model, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "rag.jinja").write_text("secret")
    target = outside
    if name != "additional_chat_templates":
        target = outside / "rag.jinja"
        (model / name).unlink()
    else:
        (model / name).rename(tmp_path / "moved")
    (model / name).symlink_to(target)
    with pytest.raises(LongCtxError, match="links outside of its folder"):
        find_auxiliary_files(model)


def test_links_of_the_hugging_face_cache_are_followed(model, tmp_path):
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    model.rename(snapshot)
    for number, name in enumerate(("LICENSE", "additional_chat_templates/rag.jinja")):
        (snapshot / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(os.path.relpath(blobs / str(number), (snapshot / name).parent))
    found = find_auxiliary_files(snapshot)
    assert found["additional_chat_templates.rag.jinja"].read_bytes() == b"RAG {{ messages }}"
    assert found["LICENSE"].read_bytes() == b"Do what you like."


def test_a_folder_of_templates_is_bounded(model):
    for number in range(64):
        (model / "additional_chat_templates" / f"{number}.jinja").touch()
    with pytest.raises(CheckpointError, match="66 chat templates; at most 64 are read"):
        find_auxiliary_files(model)


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "tokenizer.json",
        "tokenizer_config.json", "generation_config.json", *SIDE_FILES,
    ],
)  # fmt: skip
def test_a_pointer_of_git_lfs_is_no_file(model, tmp_path, name):
    if name in ("model.safetensors.index.json", "pytorch_model.bin"):
        (model / "model.safetensors").unlink()
    (model / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=r"is a Git LFS pointer.*git lfs pull") as caught:
        import_hf(model, tmp_path / "in", verify="none")
    assert name in str(caught.value)
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "additional_chat_templates/rag.jinja"])
def test_a_pointer_instead_of_a_tokenizer_s_file_is_refused(model, name):
    (model / name).write_bytes(POINTER)
    with pytest.raises(DataError, match=r"is a Git LFS pointer.*git lfs pull"):
        load_tokenizer(model)


@pytest.mark.parametrize("name", ["manifest.json", "master.safetensors"])
def test_a_pointer_in_a_checkpoint_is_no_damage(model, tmp_path, name):
    import_hf(model, tmp_path / "in", verify="none")
    (tmp_path / "in" / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=r"is a Git LFS pointer.*git lfs pull"):
        export_checkpoint(tmp_path / "in", tmp_path / "out", verify="none")


@pytest.mark.parametrize("name", ["latest", "global_step1/mp_rank_00_model_states.pt", "config.json", "tokenizer.json"])
def test_a_pointer_in_a_folder_of_deepspeed_is_found_before_anything_is_executed(model, tmp_path, name):
    (model / "global_step1").mkdir()
    (model / "latest").write_text("global_step1")
    (model / "global_step1" / "mp_rank_00_model_states.pt").write_bytes(b"no pickle")
    (model / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=r"is a Git LFS pointer.*git lfs pull"):
        import_deepspeed(model, tmp_path / "in", execute_pickles=True)
