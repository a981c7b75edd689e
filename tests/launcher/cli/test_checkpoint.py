"""``checkpoint list|verify|prune|export``."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from launcher.checkpoint import names as remove
from launcher.checkpoint.retention import Proof, write_proof
from longctx.checkpoint_format import PROOF_FILE, canonical_hash, list_checkpoints
from tests.launcher.cli.calls import call, flip_a_byte, refused, succeed


def test_list_is_by_step(capsys, run):
    out = succeed(capsys, "checkpoint", "list", run)
    assert [line.split()[0] for line in out.splitlines()] == ["step", "20", "100"]
    rows = json.loads(succeed(capsys, "checkpoint", "list", run, "--json"))
    assert [row["step"] for row in rows] == [20, 100]
    assert rows[1]["folder"] == str(run / "checkpoints/step_000100")
    assert rows[0]["bytes"] > 100_000
    assert rows[0]["problem"] is None
    assert (rows[0]["health"], rows[0]["stays"]) == ("whole", None)
    assert 0 <= rows[0]["age_seconds"] < 3600


def test_list_goes_on_past_a_damaged_manifest(capsys, damaged_run):
    (damaged_run / "checkpoints/step_000020/manifest.json").write_text("{")
    code, out, err = call(capsys, "checkpoint", "list", damaged_run)
    assert code == 0
    assert "step_000100" in out
    assert "step_000020" in err


def test_list_says_what_is_proved_what_is_damaged_and_what_stays(capsys, damaged_run):
    (damaged_run / "config.toml").write_text("[checkpoint]\nkeep_last = 1\n")
    first, last = (damaged_run / f"checkpoints/step_{step:06d}" for step in (20, 100))
    write_proof(first, json.loads((first / "manifest.json").read_text())["hash"], Proof("step", 21, 2.0))
    out = succeed(capsys, "checkpoint", "list", damaged_run, "--check")
    assert "proved  newest proved" in out
    assert "whole   last 1" in out
    flip_a_byte(last / "master.safetensors")
    code, out, _ = call(capsys, "checkpoint", "list", damaged_run, "--json")
    assert (code, [row["health"] for row in json.loads(out)]) == (0, ["proved", "whole"]), "by size"
    code, out, err = call(capsys, "checkpoint", "list", damaged_run, "--check")
    assert code == 1
    assert "damaged" in out
    assert "step_000100: master.safetensors is damaged" in err
    (last / "master.safetensors").unlink()
    code, out, _ = call(capsys, "checkpoint", "list", damaged_run, "--json")
    assert json.loads(out)[1]["problem"] == "master.safetensors is missing"


def test_verify_names_every_damaged_file_and_one_that_nobody_listed(capsys, damaged_run):
    assert call(capsys, "checkpoint", "verify", damaged_run)[0] == 0
    newest = damaged_run / "checkpoints/step_000100"
    flip_a_byte(newest / "master.safetensors")
    (newest / "tokenizer.model").unlink()
    (newest / "notes.txt").write_text("{}")
    code, out, _ = call(capsys, "checkpoint", "verify", damaged_run)
    assert code == 1
    assert "step_000020 is intact" in out
    assert "master.safetensors is damaged" in out
    assert "tokenizer.model is missing" in out
    assert "notes.txt is not in the manifest" in out
    assert "newest-good" in out
    code, out, _ = call(capsys, "checkpoint", "verify", newest, "--json")
    assert code == 1
    assert [len(row["problems"]) for row in json.loads(out)] == [3]


def test_verify_names_a_ruined_proof(capsys, run, tmp_path):
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    newest = copied / "checkpoints/step_000100"
    body = {"manifest": "0" * 32, "by": "step", "step": 120, "loss": 4.2, "more": 1}
    for text in ("{", json.dumps(body), json.dumps(body | {"hash": canonical_hash(body)})):
        (newest / PROOF_FILE).write_text(text)
        code, out, _ = call(capsys, "checkpoint", "verify", newest)
        assert code == 1, text
        assert f"{PROOF_FILE}" in out
        assert "The checkpoint is whole without" in out or "Remove it: the checkpoint is complete without it" in out
    del body["more"]
    (newest / PROOF_FILE).write_text(json.dumps(body | {"hash": canonical_hash(body)}))
    assert call(capsys, "checkpoint", "verify", newest)[0] == 0, "the proof of another manifest is none"


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture
def long_run(damaged_run: Path) -> Path:
    """Checkpoints of steps 20, 40, 60, 80, 100, and what is no checkpoint any more."""
    folder = damaged_run / "checkpoints"
    for step in (40, 60, 80):
        shutil.copytree(folder / "step_000020", folder / f"step_{step:06d}")
    shutil.copytree(folder / "step_000020", folder / "step_000090.discarded")
    for name in (".step_000070.partial", ".step_000030.removed", ".step_000110.partial"):
        (folder / name).mkdir()
        (folder / name / "rank_00000.safetensors").write_bytes(b"half")
    # One save ended two hours ago without a word, the other one is under way.
    past = time.time() - 7200
    for path in (folder / ".step_000070.partial", folder / ".step_000070.partial/rank_00000.safetensors"):
        os.utime(path, (past, past))
    return damaged_run


class TestPrune:
    def test_the_newest_and_those_of_every_so_many_steps_stay(self, capsys, long_run):
        out = succeed(capsys, "checkpoint", "prune", long_run, "--keep-last", 2, "--keep-every", 40)
        assert names(long_run) == [".step_000110.partial", "step_000040", "step_000080", "step_000100"]
        for words in ("step_000020, ", "left by a killed save", "left by a killed removal", "set aside when the run"):
            assert words in out
        assert "3 checkpoints kept: 40, 80, 100." in out
        assert call(capsys, "checkpoint", "verify", long_run)[0] == 0

    def test_a_dry_run_removes_nothing(self, capsys, long_run):
        before = names(long_run)
        code, out, _ = call(capsys, "checkpoint", "prune", long_run, "--keep-last", 1, "--dry-run", "--json")
        found = json.loads(out)
        assert (code, found["kept"], found["dry_run"]) == (0, [100], True)
        assert len(found["removed"]) == 7
        assert names(long_run) == before

    @pytest.mark.parametrize("killed_at", ["rename", "first file"])
    def test_a_removal_that_is_killed_leaves_nothing_that_looks_whole(self, long_run, monkeypatch, killed_at):
        path = long_run / "checkpoints/step_000040"

        def killed(folder, **options):
            if killed_at == "first file" and Path(folder).exists():
                next(Path(folder).iterdir()).unlink()
            if Path(folder).exists() or killed_at == "rename":
                raise KeyboardInterrupt

        monkeypatch.setattr(remove.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove.remove_checkpoint(path)
        for checkpoint in list_checkpoints(long_run):
            assert (checkpoint / "master.safetensors").exists()

    def test_damaged_manifests_alone_are_not_what_stays(self, capsys, long_run):
        for step in (80, 100):
            (long_run / f"checkpoints/step_{step:06d}/manifest.json").write_text("{")
        before = names(long_run)
        err = refused(capsys, 1, "checkpoint", "prune", long_run, "--keep-last", 2)
        assert "the one at step 60 does" in err
        assert "--keep-last 3" in err
        assert names(long_run) == before
        assert call(capsys, "checkpoint", "prune", long_run, "--keep-last", 3)[0] == 0


def test_export_is_convert(capsys, run, tmp_path):
    succeed(capsys, "checkpoint", "export", run, tmp_path / "exported", "--dtype", "bfloat16")
    options = ("--to", "hf", "--dtype", "bfloat16")
    assert call(capsys, "convert", *options, run, tmp_path / "converted")[0] == 0
    exported, converted = (tmp_path / name / "model.safetensors" for name in ("exported", "converted"))
    assert exported.read_bytes() == converted.read_bytes()
