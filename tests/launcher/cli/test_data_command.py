"""``data build|inspect|verify``."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from data_pipeline import inspect
from data_pipeline.rows import epoch_blocks
from longctx.errors import DataError
from tests.launcher.cli.calls import call, flip_a_byte, refused, succeed


def test_build_json_is_all_of_stdout(capsys, world, tmp_path):
    corpus = world / "corpus"
    two = sorted(path.name for path in corpus.iterdir())[:2]
    words = ["data", "build", "--source", corpus, "--tokenizer", world / "tokenizer.model", "--json"]
    code, out, err = call(
        capsys, *words, "--output", tmp_path / "d", "--exclude", two[0], "--exclude", two[1], "nope/*"
    )
    found = json.loads(out)
    assert code == 0
    assert found["skipped"] == {"excluded": 2}
    assert found["training"]["documents"] + (found["validation"] or {"documents": 0})["documents"] == 22
    assert found["training"]["bytes_per_token"] > 1
    assert "'nope/*' matches no file" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--without", "1"], "'1' is not a shard in"),
        (["--without", "00001.arrow", "--source", "stdlib"], "no other option except --output"),
        (["--without", "00001.arrow", "--overwrite"], "no other option except --output"),
        (["--tokenizer", "runs/tokenizer.model"], "--source is missing"),
        (["--source", "stdlib"], "--tokenizer is missing"),
    ],
)
def test_build_without_what_it_needs_is_refused(capsys, world, words, said):
    before = (world / "data/manifest.json").read_bytes()
    given = [word.replace("runs/", f"{world}/") for word in words]
    err = refused(capsys, 2, "data", "build", "--output", world / "data", *given)
    assert said in err
    assert (world / "data/manifest.json").read_bytes() == before


def test_build_without_shards_says_what_is_left_out(capsys, world, tmp_path):
    folder = shutil.copytree(world / "data", tmp_path / "d")
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = manifest["shards"][1]
    flip_a_byte(folder / entry["file"])
    assert call(capsys, "data", "verify", folder)[0] == 1
    out = succeed(capsys, "data", "build", "--without", entry["file"], "--output", folder)
    assert f"{entry['file']} left out, {entry['tokens']:,} tokens in {entry['documents']} document" in out
    out = succeed(capsys, "data", "verify", folder)
    assert f"{manifest['tokens'] - entry['tokens']:,} tokens." in out


def test_build_joins_the_files_of_a_directory(capsys, world, tmp_path):
    (tmp_path / "corpus/a").mkdir(parents=True)
    for name in ("a/x.py", "a/y.py", "top.py"):
        (tmp_path / "corpus" / name).write_text(f"# of {name}")
    words = ["data", "build", "--source", tmp_path / "corpus", "--tokenizer", world / "tokenizer.model"]
    words += ["--validation-fraction", "0", "--join-header", r"== {path}\n", "--output"]
    # Of a/ both files, of which each has 11 bytes, or one.
    for most_bytes, documents in ((24, 2), (12, 3)):
        options = ["--join", "directory", "--join-bytes", most_bytes, "--json"]
        code, out, _ = call(capsys, *words, tmp_path / str(most_bytes), *options)
        assert (code, json.loads(out)["training"]["documents"]) == (0, documents)
    code, out, _ = call(capsys, "data", "sample", tmp_path / "24", "--seq-len", "512", "--rows", "1")
    assert "== a/x.py\n# of a/x.py\n== a/y.py\n# of a/y.py" in out
    assert "they need --join directory" in refused(capsys, 2, *words, tmp_path / "none", "--join-depth", "1")


def test_what_comes_next_is_a_run_of_this_vocabulary(capsys, world, tmp_path):
    words = ["data", "build", "--source", world / "corpus", "--tokenizer", world / "tokenizer.model", "--output"]
    out = succeed(capsys, *words, tmp_path / "d")
    (following,) = [line for line in out.splitlines() if line.startswith("Next: ") and " train " in line]
    ids = json.loads((tmp_path / "d" / "manifest.json").read_text())["vocab_size"]
    assert following.endswith(f"--data.train {tmp_path / 'd'} --model.vocab_size {ids}")


def test_build_asks_for_what_it_was_asked(capsys, world, tmp_path, monkeypatch):
    asked: dict[str, object] = {}

    def build(source, *_: object, **options: object) -> None:
        asked.update(options, strict=source.read_as.strict, kind=options["duplicates"].kind)
        raise DataError("enough")

    monkeypatch.setattr("data_pipeline.prepare.build_shards.build_shards", build)
    words = ["data", "build", "--source", world / "corpus", "--tokenizer", world / "tokenizer.model"]
    words += ["--output", tmp_path / "d", "--workers", 3, "--strict", "--exact", "--overwrite", "--duplicates", "near"]
    assert call(capsys, *words)[0] == 1
    found = {"workers": 3, "strict": True, "exact": True, "overwrite": True, "kind": "near"}
    assert {name: asked[name] for name in found} == found


def test_build_by_a_cluster_that_is_not_there_ends_before_anything_is_read(capsys, world, tmp_path, monkeypatch):
    words = ["data", "build", "--source", world / "corpus", "--tokenizer", world / "tokenizer.model"]
    words += ["--output", tmp_path / "out"]
    assert "ConfigError: --ray-address is a Ray cluster's address: it needs --engine ray." in refused(
        capsys, 2, *words, "--ray-address", "auto"
    )
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = call(capsys, *words, "--engine", "ray")
    assert (code, 'Install it with `pip install "longctx-train[scale]"`' in err) == (2, True)
    assert "checking" not in err
    assert not list(tmp_path.iterdir())
    assert call(capsys, *words, "--engine", "dask")[0] == 2


def test_inspect_json_parses(capsys, world):
    out = succeed(capsys, "data", "inspect", world / "data", "--json", "--seq-len", 512, "--row", 1)
    found = json.loads(out)
    assert found["split"] == "training"
    assert found["validation"]["split"] == "validation"
    assert found["packing"]["truncated_tokens"] == 0
    assert found["row"]["tokens"] + found["row"]["padding_tokens"] == 512
    assert "row" not in json.loads(call(capsys, "data", "inspect", world / "data", "--json")[1])


def test_a_row_is_found_by_epoch_seed_and_block(capsys, world):
    words = ["data", "inspect", world / "data", "--seq-len", 512, "--json", "--row", 1]
    shown = {}
    for options in ([], ["--epoch", 1], ["--seed", 5], ["--block", 0]):
        out = succeed(capsys, *words, *options)
        shown[tuple(options)] = json.loads(out)["row"]
    first = shown[()]
    assert shown["--block", 0] == first
    assert first["pieces"] not in (shown["--epoch", 1]["pieces"], shown["--seed", 5]["pieces"])
    assert "rows 0 to" in refused(capsys, 2, "data", "inspect", world / "data", "--seq-len", 512, "--row", 10**6)
    assert "block=1 is out of range: an epoch has blocks 0 to 0" in refused(capsys, 2, *words, "--block", 1)
    assert "they need --row" in refused(capsys, 2, "data", "inspect", world / "data", "--seq-len", 512, "--block", 0)


def test_a_corpus_of_many_blocks_is_described_by_some_of_them(capsys, world, monkeypatch):
    monkeypatch.setattr(epoch_blocks, "MIN_DOCUMENTS", 3)
    monkeypatch.setattr(epoch_blocks, "MIN_ROWS", 5)
    monkeypatch.setattr(inspect, "PLANNED_DOCUMENTS", 4)
    words = ["data", "inspect", world / "data", "--seq-len", 256]
    out = succeed(capsys, *words, "--row", 2, "--block", 3)
    assert re.search(r"^rows per epoch +about [\d,]+, estimated from \d+ documents", out, re.MULTILINE)
    assert re.search(r"^row 2 of \d+ of epoch block 3 of \d+: \d+ tokens", out, re.MULTILINE)
    packing = json.loads(call(capsys, *words, "--json")[1])["packing"]
    monkeypatch.setattr(inspect, "PLANNED_DOCUMENTS", 10**6)
    exact = json.loads(call(capsys, *words, "--json")[1])["packing"]
    assert (packing["exact"], exact["exact"]) == (False, True)
    assert packing["planned_documents"] < exact["planned_documents"]
    assert abs(packing["rows"] - exact["rows"]) < 0.1 * exact["rows"]


def test_verify_names_every_damaged_shard(capsys, world, tmp_path):
    assert call(capsys, "data", "verify", world / "data")[0] == 0
    folder = Path(shutil.copytree(world / "data", tmp_path / "d"))
    flip_a_byte(folder / "00000.arrow")
    (folder / "validation" / "00000.arrow").unlink()
    code, out, _ = call(capsys, "data", "verify", folder)
    assert code == 1
    assert str(folder / "00000.arrow") in out
    assert str(folder / "validation" / "00000.arrow") in out
    code, out, _ = call(capsys, "data", "verify", folder, "--json")
    assert code == 1
    assert len(json.loads(out)["problems"]) == 2
