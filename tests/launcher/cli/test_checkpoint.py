"""``checkpoint list|verify``."""

from __future__ import annotations

import json

from tests.launcher.cli.calls import call, flip_a_byte


def test_list_is_by_step(capsys, run):
    code, out, _ = call(capsys, "checkpoint", "list", run)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["step", "20", "100"]
    code, out, _ = call(capsys, "checkpoint", "list", run, "--json")
    rows = json.loads(out)
    assert [row["step"] for row in rows] == [20, 100]
    assert rows[1]["folder"] == str(run / "checkpoints/step_000100")
    assert rows[0]["bytes"] > 100_000
    assert rows[0]["problem"] is None


def test_list_of_a_run_without_any(capsys, tmp_path):
    (tmp_path / "config.toml").touch()
    (tmp_path / "checkpoints/.step_000010.partial").mkdir(parents=True)
    assert call(capsys, "checkpoint", "list", tmp_path)[:2] == (
        0,
        f"{tmp_path} holds no committed checkpoint yet.\n",
    )
    assert json.loads(call(capsys, "checkpoint", "list", tmp_path, "--json")[1]) == []
    assert call(capsys, "checkpoint", "verify", tmp_path)[0] == 1


def test_list_goes_on_past_a_damaged_manifest(capsys, damaged_run):
    (damaged_run / "checkpoints/step_000020/manifest.json").write_text("{")
    code, out, err = call(capsys, "checkpoint", "list", damaged_run)
    assert code == 0
    assert "step_000100" in out
    assert "step_000020" in err


def test_verify_names_every_damaged_file(capsys, damaged_run):
    assert call(capsys, "checkpoint", "verify", damaged_run)[0] == 0
    newest = damaged_run / "checkpoints/step_000100"
    flip_a_byte(newest / "master.safetensors")
    (newest / "tokenizer.model").unlink()
    code, out, _ = call(capsys, "checkpoint", "verify", damaged_run)
    assert code == 1
    assert "step_000020 is whole" in out
    assert "master.safetensors is damaged" in out
    assert "tokenizer.model is missing" in out
    assert "newest-good" in out
    code, out, _ = call(capsys, "checkpoint", "verify", newest, "--json")
    assert code == 1
    assert [len(row["problems"]) for row in json.loads(out)] == [2]


def test_verify_says_when_the_manifest_is_damaged(capsys, damaged_run):
    manifest = damaged_run / "checkpoints/step_000100/manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 0', '"step": 1'))
    code, out, _ = call(capsys, "checkpoint", "verify", damaged_run)
    assert code == 1
    assert "its hash does not match" in out
    assert "step_000020 is whole" in out
