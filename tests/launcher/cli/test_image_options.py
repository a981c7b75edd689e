"""``data build --kind images`` and what follows it, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_pipeline.rows.images import ImageRule, Images
from data_pipeline.shards.reader import ShardSet
from launcher.config.load_config import load_run_config
from launcher.config.run_config_rules import check_run
from tests.data_pipeline.made_images import png, random_images, write_folder, write_idx
from tests.launcher.cli.calls import call, flip_a_byte, refused, start, succeed


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_folder(tmp_path / "source", random_images(60))
    (tmp_path / "source" / "dog" / "bad.png").write_bytes(b"no image")
    return tmp_path / "source"


def build(capsys, source: Path, output: Path, *words: object) -> str:
    return succeed(capsys, "data", "build", "--kind", "images", "--source", source, "--output", output, *words)


def test_build_inspect_verify_and_pack(capsys, source: Path, tmp_path: Path):
    output = tmp_path / "out"
    out = build(capsys, source, output, "--workers", 1)
    assert "1 unreadable image: dog/bad.png" in out
    assert f"train --config vit-tiny --data.train {output}" in out
    shown = succeed(capsys, "data", "inspect", output, "--picture", tmp_path / "images.png")
    rows = {line[:30].strip(): line[30:].split() for line in shown.splitlines()}
    assert rows["channels"] == ["3", "3"]
    counts = [
        list(map(int, rows[f"images in class {number}, {name}"])) for number, name in enumerate(("cat", "dog", "owl"))
    ]
    assert [sum(count) for count in counts] == [20, 20, 20]
    with Image.open(tmp_path / "images.png") as sheet:
        assert sheet.format == "PNG"
    assert "is intact: 1 shard" in succeed(capsys, "data", "verify", output)
    packed = succeed(capsys, "data", "pack", output, "--output", tmp_path / "packed")
    assert "Look at it" in packed
    flip_a_byte(output / "00000.arrow")
    assert "00000.arrow is damaged" in refused_out(capsys, "data", "verify", output)


def refused_out(capsys, *words: object) -> str:
    """Standard output of a verb that ends with 1."""
    code, out, _ = call(capsys, *words)
    assert code == 1
    return out


@pytest.mark.parametrize("words", [(), ("--palette", 8), ("--validation-fraction", 0.3)])
def test_the_run_that_comes_next_fits_the_images(capsys, source: Path, tmp_path: Path, words: tuple):
    out = build(capsys, source, tmp_path / "out", *words)
    (following,) = [line for line in out.splitlines() if line.startswith("Next: ")]
    config = load_run_config(following.split(" train ")[1].split())
    check_run(config, 1)
    shards = ShardSet.open(config.data.train)
    rule = config.examples
    assert isinstance(rule, ImageRule)
    Images(rule, shards, seed=0)
    if not config.model.predicts_tokens:
        assert config.model.classes == len(shards.image_format.classes)
    assert bool(config.validation.rows) == (Path(config.data.train) / "validation").exists()


@pytest.mark.parametrize(("words", "following"), [((), ["evaluate"]), (("--palette", 4), ["generate", "evaluate"])])
def test_each_command_is_copied_from_what_the_one_before_printed(capsys, tmp_path: Path, words, following):
    write_folder(tmp_path / "source", random_images(12))
    out = build(capsys, tmp_path / "source", tmp_path / "out", *words)
    (train,) = [line.split(" train ")[1].split() for line in out.splitlines() if line.startswith("Next: ")]
    tiny = {"run.output_dir": tmp_path / "run", "train.steps": 2, "train.warmup_steps": 1}
    process = start("train", *train, *[word for key, value in tiny.items() for word in (f"--{key}", value)])
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 0, said
    commands = [line.partition("-m launcher ")[2].split() for line in said.splitlines() if line.startswith("Next: ")]
    assert [words[0] for words in commands] == [*following, "convert"]
    for words_of_one in commands:
        succeed(capsys, *words_of_one)


def test_json_has_the_format(capsys, source: Path, tmp_path: Path):
    words = ("--image-size", "4x6", "--channels", 1, "--palette", 5, "--validation-fraction", 0, "--json")
    found = json.loads(build(capsys, source, tmp_path / "out", *words))
    shape = {"height": 4, "width": 6, "channels": 1, "classes": ["cat", "dog", "owl"], "colors": 5}
    assert found["image_format"] == shape
    assert found["skipped"] == {"unreadable image": 1}
    shown = json.loads(succeed(capsys, "data", "inspect", tmp_path / "out", "--json"))
    assert shown["images"] == shape | {"tokens_per_image": 24, "images_per_class": [20, 20, 20]}
    assert ShardSet.open(tmp_path / "out").manifest.options["channels"] == 1


def test_a_format_is_reused(capsys, source: Path, tmp_path: Path):
    build(capsys, source, tmp_path / "first", "--palette", 5)
    build(capsys, source, tmp_path / "again", "--tokenizer", tmp_path / "first", "--include", "dog")
    first, again = (ShardSet.open(tmp_path / name).manifest for name in ("first", "again"))
    assert first.tokenizer == again.tokenizer
    err = refused(
        capsys, 1, "data", "build", "--kind", "images", "--source", source, "--output", tmp_path / "x",
        "--tokenizer", tmp_path / "first", "--palette", 6,
    )  # fmt: skip
    assert "--palette 6 differs from the format" in err
    err = refused(
        capsys, 2, "data", "build", "--source", source, "--output", tmp_path / "x", "--tokenizer", tmp_path / "first"
    )
    assert "is the format of images. Add --kind images" in err


def test_idx_files_without_labels(capsys, tmp_path: Path):
    write_idx(tmp_path / "source", random_images(30, (4, 4)), [0, 1] * 15)
    build(capsys, tmp_path / "source", tmp_path / "out", "--label-field", "", "--include", "*images*")
    shown = succeed(capsys, "data", "inspect", tmp_path / "out")
    assert "images in class" not in shown


def test_many_classes_are_summed(capsys, tmp_path: Path):
    write_folder(tmp_path / "source", random_images(45, (2, 2, 1)), [f"c{number:02d}" for number in range(15)])
    build(capsys, tmp_path / "source", tmp_path / "out", "--validation-fraction", 0)
    (line,) = [
        line for line in succeed(capsys, "data", "inspect", tmp_path / "out").splitlines() if "more classes" in line
    ]
    assert line.split() == ["images", "in", "3", "more", "classes", "9"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--exact",), "--exact"),
        (("--paragraphs",), "--paragraphs"),
        (("--special-tokens", "parse"), "--special-tokens"),
        (("--duplicates", "exact"), "--duplicates"),
        (("--shingle-size", 4), "--shingle-size"),
        (("--join", "directory"), "--join"),
        (("--min-bytes", 4), "--min-bytes"),
        (("--as-text", "*.png"), "--as-text"),
        (("--text-field", "x"), "--text-field"),
        (("--format", "text"), "--format"),
        (("--train-on", "all"), "--train-on"),
        (("--chat-date", "2026-01-01", "--max-bytes", 9), "--max-bytes, --chat-date"),
    ],
)
def test_options_of_texts_are_refused_by_name(capsys, source: Path, tmp_path: Path, words: tuple, said: str):
    output = tmp_path / "out"
    err = refused(capsys, 2, "data", "build", "--kind", "images", "--source", source, "--output", output, *words)
    assert f"These options have no effect on images (--kind images): {said}. Leave them out." in err
    assert not output.exists()


@pytest.mark.parametrize(
    "words",
    [("--image-size", 32), ("--channels", 3), ("--palette", 9), ("--image-field", "x"), ("--label-field", "")],
)
def test_options_of_images_are_refused_for_texts(capsys, source: Path, tmp_path: Path, words: tuple):
    err = refused(capsys, 2, "data", "build", "--source", source, "--output", tmp_path / "out", *words)
    assert f"Only images have these options: {words[0]}. Add --kind images" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--image-size", "32x"), "--image-size 32x is not N or HxW, such as 32 or 32x48"),
        (("--image-size", "0"), "--image-size 0x0: both sides must be from 1"),
        (("--channels", 4), "--channels 4 must be 1"),
        (("--palette", 0), "--palette 0 must be from 2"),
        (("--image-field", ""), "--image-field is empty"),
        (("--validation-fraction", 2), "validation_fraction=2.0 must be"),
        (("--shard-tokens", 0), "shard_tokens=0 must be at least 1"),
        (("--without", "00000.arrow"), "--without changes a built folder"),
    ],
)
def test_values_that_cannot_be(capsys, source: Path, tmp_path: Path, words: tuple, said: str):
    output = tmp_path / "out"
    code, out, err = call(capsys, "data", "build", "--kind", "images", "--source", source, "--output", output, *words)
    assert (code > 0, out) == (True, "")
    assert said in err


def test_mixed_shapes_name_both_images(capsys, source: Path, tmp_path: Path):
    (source / "dog" / "x.png").write_bytes(png(np.zeros((9, 9, 3), np.uint8)))
    words = ("data", "build", "--kind", "images", "--source", source, "--output", tmp_path / "out")
    err = refused(capsys, 1, *words)
    assert "dog/x.png has 9 x 9 pixels, but cat/000.png has 5 x 7" in err
    assert "--image-size 5x7" in err
    succeed(capsys, *words, "--image-size", "5x7")


def test_images_are_not_shown_as_rows(capsys, source: Path, tmp_path: Path):
    build(capsys, source, tmp_path / "out")
    for words in (("data", "inspect", tmp_path / "out"), ("data", "sample", tmp_path / "out")):
        assert "contains images" in refused(capsys, 1, *words, "--seq-len", 64)
    mixture = tmp_path / "mixture.toml"
    mixture.write_text(f'[[sources]]\nname = "a"\npath = "{tmp_path / "out"}"\nweight = 1\n')
    assert "a " in succeed(capsys, "data", "inspect", mixture)
    err = refused(capsys, 2, "data", "inspect", mixture, "--picture", tmp_path / "x.png")
    assert "--picture shows one folder's images" in err
