"""``data exclude``, and how the other verbs tell of what is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.launcher.cli.calls import call, flip_a_byte
from tests.launcher.cli.test_data_rows import FLAGS

BAD = "00001.arrow"


@pytest.fixture
def folder(world, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(world / "data", tmp_path / "d"))
    assert (folder / BAD).exists()
    return folder


def test_a_bad_shard_is_left_out_and_brought_back(capsys, folder: Path):
    assert "no shard is excluded" in call(capsys, "data", "exclude", folder)[1]
    content = (folder / BAD).read_bytes()
    flip_a_byte(folder / BAD)
    assert call(capsys, "data", "verify", folder)[0] == 1
    code, out, err = call(capsys, "data", "exclude", folder, BAD, "--reason", "bad blocks on disk 3")
    assert code == 0, err
    assert f"EXCLUDED from {folder}: 1 of " in out
    assert f"  {BAD} (" in out
    assert "bad blocks on disk 3\n" in out
    assert "--data.changed_exclusions go_on" in out
    assert out.splitlines()[:2] == call(capsys, "data", "exclude", folder)[1].splitlines()
    code, out, _ = call(capsys, "data", "verify", folder)
    assert code == 0
    assert "is whole" in out
    assert f"EXCLUDED from {folder}: 1 of " in out
    assert "None of these was read (--all reads them)." in out
    code, out, _ = call(capsys, "data", "verify", folder, "--all")
    assert code == 1
    assert f"{folder / BAD} is damaged" in out
    (folder / BAD).write_bytes(content)
    code, out, _ = call(capsys, "data", "exclude", folder, BAD, "--undo")
    assert code == 0
    assert "no shard is excluded" in out
    assert call(capsys, "data", "verify", folder)[0] == 0


def test_a_lost_shard_is_told_what_that_means(capsys, folder: Path):
    (folder / BAD).unlink()
    code, out, _ = call(capsys, "data", "exclude", folder, BAD, "--reason", "gone")
    assert code == 0
    assert f"lengths of the documents in {BAD} could not be read any more" in out


def test_undo_without_names_brings_all_back(capsys, folder: Path):
    assert call(capsys, "data", "exclude", folder, "00000.arrow", BAD, "--reason", "a test")[0] in (0, 2)
    call(capsys, "data", "exclude", folder, BAD, "--reason", "a test")
    assert "no shard is excluded" in call(capsys, "data", "exclude", folder, "--undo")[1]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([BAD], 2, "--reason is missing"),
        ([BAD, "--reason", ""], 2, "--reason is missing"),
        ([BAD, "--reason", "a\nb"], 2, "must be a line of"),
        (["1", "--reason", "x"], 2, "'1' is no shard of"),
        ([BAD, "--undo"], 2, "is not excluded from"),
        ([BAD, "--undo", "--reason", "x"], 2, "--undo takes no --reason"),
    ],
)
def test_bad_input_is_refused_on_one_screen(capsys, folder: Path, words, code, said):
    ended, out, err = call(capsys, "data", "exclude", folder, *words)
    assert (ended, out) == (code, "")
    assert said in err
    assert not (folder / "exclusions.json").exists()


def test_what_is_no_shard_folder(capsys, tmp_path: Path):
    code, _, err = call(capsys, "data", "exclude", tmp_path, BAD, "--reason", "x")
    assert code == 1
    assert "is not a shard folder" in err


def test_every_verb_tells_of_it(capsys, folder: Path, tmp_path: Path):
    call(capsys, "data", "exclude", folder, BAD, "--reason", "a test")
    (folder / BAD).unlink()
    _, out, _ = call(capsys, "data", "inspect", folder, "--seq-len", 512, "--row", 0)
    assert f"EXCLUDED from {folder}: 1 shard, " in out
    found = json.loads(call(capsys, "data", "inspect", folder, "--json")[1])
    assert [shard["shard"] for shard in found["excluded"]] == [BAD]
    assert found["validation"]["excluded"] == []
    _, out, err = call(capsys, "data", "plan", *FLAGS, "--data.train", folder)
    assert f"EXCLUDED from {folder}: 1 of " in out, err
    found = json.loads(call(capsys, "data", "plan", *FLAGS, "--data.train", folder, "--json")[1])
    assert [shard["reason"] for shard in found["excluded"][str(folder)]] == ["a test"]
    found = json.loads(call(capsys, "data", "verify", folder, "--json")[1])
    assert [shard["shard"] for shard in found["excluded"][str(folder)]] == [BAD]
    found = json.loads(call(capsys, "data", "exclude", folder, "--json")[1])
    assert [shard["shard"] for shard in found["excluded"]] == [BAD]
    assert len(found["hash"]) == 32
    mixture = tmp_path / "mixture.toml"
    mixture.write_text('[[sources]]\nname = "d"\npath = "d"\n')
    assert f"EXCLUDED from {folder}: 1 shard, " in call(capsys, "data", "inspect", mixture)[1]
    assert f"EXCLUDED from {folder}: 1 of " in call(capsys, "data", "verify", mixture)[1]


def test_a_damaged_list_is_named(capsys, folder: Path):
    call(capsys, "data", "exclude", folder, BAD, "--reason", "a test")
    flip_a_byte(folder / "exclusions.json")
    code, out, _ = call(capsys, "data", "verify", folder)
    assert code == 1
    assert str(folder / "exclusions.json") in out
