"""``load_tokenizer`` takes every form, and says what it cannot take."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from longctx.errors import DataError
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.load_tokenizer import fingerprints
from tests.longctx.tokenizer.families import FAMILIES

Family = Callable[[str], Path]


def copy(family: Family, name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(family(name), tmp_path / name))


@pytest.mark.parametrize("name", FAMILIES)
def test_file_and_folder_are_one_tokenizer(family: Family, name: str, tmp_path: Path):
    folder = family(name)
    loaded = load_tokenizer(folder)
    file = folder / "tokenizer.json"
    if not file.exists():
        file = folder / "tokenizer.model"
    assert load_tokenizer(file).fingerprint == loaded.fingerprint
    # What travels makes the same tokenizer again, under the same fingerprint.
    loaded.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint == loaded.fingerprint
    assert again.special == loaded.special
    for path in folder.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_a_run_means_its_newest_checkpoint(family: Family, tmp_path: Path):
    for step, name in ((1, "gpt2"), (2, "own")):
        shutil.copytree(family(name), tmp_path / f"checkpoints/step_{step:06d}")
        (tmp_path / f"checkpoints/step_{step:06d}/manifest.json").write_text("{}")
    assert load_tokenizer(tmp_path).fingerprint == load_tokenizer(family("own")).fingerprint


def test_the_fingerprint_is_of_what_decides_ids(family: Family, tmp_path: Path):
    before = load_tokenizer(family("llama3")).fingerprint
    folder = copy(family, "llama3", tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    # The older spelling of merges, truncation and the decoder decide nothing.
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=1))
    assert load_tokenizer(folder).fingerprint == before
    assert len(load_tokenizer(folder).encode("word " * 50)) > 8
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|eot_id|>"}))
    assert load_tokenizer(folder).fingerprint != before
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    content["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(folder).fingerprint != before


def test_both_forms_of_a_model_are_known(family: Family):
    known = fingerprints(family("mistral"))
    assert len(set(known.values())) == 2


def test_begin_and_end_come_from_the_model_s_own_files(family: Family, tmp_path: Path):
    folder = copy(family, "gpt_oss", tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ends = [load_tokenizer(folder).document_end]
    # Without a name the numbers count: generation_config.json before config.json.
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    ends.append(load_tokenizer(folder).document_end)
    kept = load_tokenizer(folder)
    kept.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == kept.fingerprint
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    ends.append(load_tokenizer(folder).document_end)
    assert ends[1:] == [7, 9]
    assert load_tokenizer(folder).special.stop_ids == (9, 11)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
    # Of a tokenizer.json the post-processor decides, which has none here.
    assert load_tokenizer(folder).document_begin is None


def test_an_id_beyond_the_vocabulary_is_refused(family: Family, tmp_path: Path):
    folder = copy(family, "gpt2", tmp_path)
    (folder / "tokenizer_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 50256}))
    with pytest.raises(DataError, match="set id 50256"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", b'{"model": 3}', "no model"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "cannot be read by `tokenizers`"),
        ("tokenizer.json", b'{"model"', "cannot be read"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tiktoken"),
        ("tokenizer.model", b"no model", "not a SentencePiece model"),
        ("tekken.json", b"{}", "tekken.json"),
        ("vocab.json", b"{}", "save_pretrained"),
        ("readme.md", b"", "contains no tokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, file: str, content: bytes, said: str):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        load_tokenizer(tmp_path)
    assert len(str(caught.value).splitlines()) <= 3


def test_added_tokens_that_the_model_file_does_not_know_are_refused(family: Family, tmp_path: Path):
    folder = copy(family, "llama2", tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = {"600": {"content": "<call>", "special": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": added}))
    with pytest.raises(DataError, match="'<call>'"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"])
@pytest.mark.parametrize("target", ["secret", "absent"])
def test_a_file_of_a_folder_that_links_elsewhere_is_refused(family: Family, tmp_path: Path, name: str, target: str):
    (tmp_path / "secret").write_text("{}")
    folder = copy(family, "gpt2", tmp_path)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / target)
    named = [folder]
    # A tokenizer.json that the user names is his to link; its settings are not.
    if name != "tokenizer.json":
        named.append(folder / "tokenizer.json")
    for path in named:
        with pytest.raises(DataError, match=f"{name} links outside of its folder"):
            load_tokenizer(path)


def test_links_of_the_hugging_face_cache_and_of_a_user_s_own_are_followed(family: Family, tmp_path: Path):
    wanted = load_tokenizer(family("llama3")).fingerprint
    snapshot, blobs = tmp_path / "models--x/snapshots/rev", tmp_path / "models--x/blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(family("llama3"), blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    (tmp_path / "Llama").symlink_to(snapshot)
    (tmp_path / "own.json").symlink_to(blobs / "tokenizer.json")
    for path in (snapshot, snapshot / "tokenizer.json", tmp_path / "Llama"):
        assert load_tokenizer(path).fingerprint == wanted
    assert load_tokenizer(tmp_path / "own.json").vocab_size == load_tokenizer(snapshot).vocab_size
    # A file that the user names may be a link of his own, in a folder of any name.
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/tokenizer.json").symlink_to(blobs / "tokenizer.json")
    assert load_tokenizer(tmp_path / "linked/tokenizer.json").vocab_size == load_tokenizer(snapshot).vocab_size
