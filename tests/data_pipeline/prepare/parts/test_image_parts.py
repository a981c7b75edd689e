"""Builds of images in many parts: the same bytes for any number of workers, and after a kill."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.prepare.build_shards import BuildReport, build_shards
from data_pipeline.prepare.image_formats import ImageOptions, choose_format
from data_pipeline.prepare.image_source import open_images
from data_pipeline.prepare.parts import source_parts, worker_messages
from data_pipeline.prepare.parts.staging import staging_folder
from tests.data_pipeline.made_images import random_images, write_folder
from tests.data_pipeline.prepare.parts.conftest import Stop, content, stop_at
from tests.data_pipeline.prepare.parts.test_kills import finished_parts, wait_for_parts
from tests.helpers import REPOSITORY

PART_BYTES = 20_000
OPTIONS = {"validation_fraction": 0.2, "shard_tokens": 30_000}

# The command itself, with parts that a test has time for.
SCRIPT = f"""
import sys
from data_pipeline.prepare.parts import source_parts
source_parts.IMAGE_PART_BYTES = {PART_BYTES}
from launcher.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of a kilobyte each, with unreadable and empty ones among them."""
    folder = tmp_path_factory.mktemp("images")
    write_folder(folder, random_images(150, (20, 20, 3)))
    (folder / "cat" / "bad.png").write_bytes(b"no image")
    (folder / "owl" / "empty.png").write_bytes(b"")
    return folder


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_parts, "IMAGE_PART_BYTES", PART_BYTES)


def build(images: Path, output: Path, workers: int = 1, **options) -> BuildReport:
    source = open_images(images)
    tokenizer, rule = choose_format(source, ImageOptions(size=(18, 18), colors=40))
    return build_shards(source, tokenizer, output, images=rule, workers=workers, **OPTIONS, **options)


@pytest.fixture(scope="module")
def expected(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("expected") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_parts, "IMAGE_PART_BYTES", PART_BYTES)
        assert build(images, output).parts > 5
    return content(output)


def test_workers_do_not_change_a_byte(images: Path, expected: dict[str, bytes], tmp_path: Path):
    assert {"image.json", "left_out.jsonl", "validation/image.json"} <= expected.keys()
    report = build(images, tmp_path / "out", workers=2)
    assert report.skipped == {"empty": 1, "unreadable image": 1}
    assert content(tmp_path / "out") == expected


def test_a_stopped_build_keeps_its_parts(
    images: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(worker_messages, "encode_part", stop_at(worker_messages.encode_part, call=4))
        with pytest.raises(Stop):
            build(images, tmp_path / "out")
    said: list[str] = []
    report = build(images, tmp_path / "out", say=said.append)
    assert report.parts_found == 3
    assert f"resuming: 3 of {report.parts} parts are finished" in said
    assert content(tmp_path / "out") == expected


def test_a_killed_build_goes_on(images: Path, expected: dict[str, bytes], tmp_path: Path):
    words = ["data", "build", "--kind", "images", "--source", images, "--output", tmp_path / "out", "--workers", 2]
    words += ["--image-size", 18, "--palette", 40, "--validation-fraction", 0.2, "--shard-tokens", 30_000]
    command = [sys.executable, "-c", SCRIPT, *map(str, words)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_parts(process, tmp_path / "out", 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if not (tmp_path / "out").exists():
        found = len(finished_parts(tmp_path / "out"))
        assert build(images, tmp_path / "out").parts_found >= found >= 2
    assert content(tmp_path / "out") == expected
    assert not staging_folder(tmp_path / "out").exists()


def test_another_palette_does_not_take_the_parts(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from longctx.errors import DataError

    with monkeypatch.context() as patch:
        patch.setattr(worker_messages, "encode_part", stop_at(worker_messages.encode_part, call=4))
        with pytest.raises(Stop):
            build(images, tmp_path / "out")
    source = open_images(images)
    tokenizer, rule = choose_format(source, ImageOptions(size=(18, 18), colors=41))
    with pytest.raises(DataError, match=r"contains finished parts from a build of .* with another tokenizer"):
        build_shards(source, tokenizer, tmp_path / "out", images=rule, **OPTIONS)
    shutil.rmtree(staging_folder(tmp_path / "out"))
