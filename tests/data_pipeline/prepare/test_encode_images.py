"""Builds of images: every pixel and label, splits, formats, and images that do not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from data_pipeline.inspect import find_problems
from data_pipeline.prepare import image_formats
from data_pipeline.prepare.build_shards import BuildReport, build_shards
from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule
from data_pipeline.prepare.image_formats import ImageOptions, choose_format
from data_pipeline.prepare.image_source import open_images
from data_pipeline.prepare.images.image_rule import ImageRule
from data_pipeline.prepare.sources import TextSource
from data_pipeline.shards.reader import ShardSet
from longctx.chat.chat_rule import ChatRule
from longctx.errors import DataError
from longctx.images.image_format import ImageFormat, to_units
from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.image_tokenizer import ImageTokenizer
from tests.data_pipeline.made_images import CLASSES, png, random_images, write_folder, write_idx, write_table


def build(
    source: Path,
    output: Path,
    *,
    reused: Path | None = None,
    strict: bool = False,
    label_field: str = "label",
    options: dict | None = None,
    **choices,
) -> BuildReport:
    found = open_images(source, strict=strict, label_field=label_field)
    tokenizer, rule = choose_format(
        found, ImageOptions(**choices), reused=None if reused is None else load_tokenizer(reused)
    )
    return build_shards(found, tokenizer, output, images=rule, **(options or {}))


def images_of(folder: Path) -> dict[str, tuple[np.ndarray, int]]:
    """Every image's pixels and label, by name, read as a run reads them."""
    shards = ShardSet.open(folder)
    found = shards.image_format
    return {
        shards.name(number): (found.pixels_of(shards.document(number)), shards.label(number))
        for number in range(shards.num_documents)
    }


def both_splits(folder: Path) -> dict[str, tuple[np.ndarray, int]]:
    return images_of(folder) | images_of(folder / "validation")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "source", random_images(30))
    return tmp_path / "source"


class TestImagesComeBack:
    def test_every_pixel_and_label(self, tmp_path: Path):
        made = write_folder(tmp_path / "source", random_images(30))
        report = build(tmp_path / "source", tmp_path / "out", options={"validation_fraction": 0.3})
        assert report.validation is not None
        assert report.training.documents + report.validation.documents == 30
        found = both_splits(tmp_path / "out")
        assert found.keys() == made.keys()
        for name, (pixels, label) in found.items():
            assert (pixels == made[name]).all()
            assert CLASSES[label] == name.split("/")[0]
        shards = ShardSet.open(tmp_path / "out")
        assert shards.image_format == ImageFormat(height=5, width=7, channels=3, classes=CLASSES)
        assert shards.document(0).dtype == np.uint8
        assert shards.manifest.bytes_per_token is None
        assert find_problems(tmp_path / "out") == []

    def test_idx_files_and_tables_give_the_same_images(self, tmp_path: Path):
        images, labels = random_images(9, (4, 4)), [0, 1, 2] * 3
        write_idx(tmp_path / "idx", images, labels)
        contents = [png(pixels[..., None]) for pixels in images]
        write_table(tmp_path / "table" / "a.parquet", contents, pa.array(labels), names=("0", "1", "2"))
        for name in ("idx", "table"):
            build(tmp_path / name, tmp_path / f"{name}.out", options={"validation_fraction": 0})
            found = list(images_of(tmp_path / f"{name}.out").values())
            assert all((pixels[..., 0] == image).all() for (pixels, _), image in zip(found, images, strict=True))
            assert [label for _, label in found] == labels
        fingerprints = {ShardSet.open(tmp_path / f"{name}.out").manifest.tokenizer for name in ("idx", "table")}
        assert len(fingerprints) == 1

    def test_without_classes_labels_are_minus_one(self, folder: Path, tmp_path: Path):
        build(folder, tmp_path / "out", label_field="")
        assert {label for _, label in images_of(tmp_path / "out").values()} == {-1}
        assert ShardSet.open(tmp_path / "out").image_format.classes == ()
        assert find_problems(tmp_path / "out") == []

    def test_the_palette_is_applied_and_the_split_stays(self, tmp_path: Path):
        made = write_folder(tmp_path / "source", random_images(20))
        options = {"validation_fraction": 0.3}
        build(tmp_path / "source", tmp_path / "raw", options=options)
        build(tmp_path / "source", tmp_path / "out", colors=9, options=options)
        shards = ShardSet.open(tmp_path / "out")
        palette = np.array(shards.image_format.palette)
        assert palette.shape == (9, 3)
        for number in range(shards.num_documents):
            distances = ((to_units(made[shards.name(number)])[:, :, None] - palette) ** 2).sum(axis=3)
            assert shards.document(number).tolist() == distances.argmin(axis=2).reshape(-1).tolist()
        assert images_of(tmp_path / "raw").keys() == images_of(tmp_path / "out").keys()
        assert find_problems(tmp_path / "out") == []

    def test_equal_pixels_are_in_one_split_whatever_their_file(self, tmp_path: Path):
        images = np.repeat(random_images(8), 5, axis=0)
        for number, pixels in enumerate(images):
            path = tmp_path / "source" / f"{number:02d}.{'png' if number % 2 else 'bmp'}"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(pixels).save(path)
        build(tmp_path / "source", tmp_path / "out", options={"validation_fraction": 0.4})
        held_out = {int(name[:2]) // 5 for name in images_of(tmp_path / "out" / "validation")}
        assert held_out
        assert not held_out & {int(name[:2]) // 5 for name in images_of(tmp_path / "out")}


class TestFormats:
    def test_sizes_and_channels_are_converted(self, tmp_path: Path):
        (tmp_path / "source").mkdir()
        for number, shape in enumerate([(20, 30, 3), (31, 16, 1), (12, 12, 3)]):
            (tmp_path / "source" / f"{number}.png").write_bytes(png(random_images(1, shape)[0]))
        build(tmp_path / "source", tmp_path / "out", size=(8, 10), channels=1, options={"validation_fraction": 0})
        found = images_of(tmp_path / "out")
        with Image.open(tmp_path / "source" / "0.png") as image:
            # 20 x 30 covers 8 x 10 as 8 x 12, of which one column on either side is cut off.
            scaled = np.array(image.convert("L").resize((12, 8), Image.Resampling.BICUBIC))
        assert (found["0.png"][0][..., 0] == scaled[:, 1:11]).all()
        assert {pixels.shape for pixels, _ in found.values()} == {(8, 10, 1)}
        assert ShardSet.open(tmp_path / "out").manifest.options["image_size"] == [8, 10]

    def test_the_first_readable_image_sets_the_shape(self, folder: Path, tmp_path: Path):
        (folder / "cat" / "000.png").write_bytes(b"rubbish")
        build(folder, tmp_path / "out")
        assert ShardSet.open(tmp_path / "out").image_format.shape == (5, 7, 3)

    @pytest.mark.parametrize(
        ("shape", "message", "choices"),
        [
            (
                (6, 7, 3),
                r"dog/x\.png has 6 x 7 pixels, but cat/000\.png has 5 x 7: .*\n.*--image-size 5x7",
                {"size": (5, 7)},
            ),
            (
                (5, 7, 1),
                r"dog/x\.png has 1 channel \(grey\), but cat/000\.png has 3.*\n.*--channels 3",
                {"channels": 3},
            ),
        ],
    )
    def test_another_shape_is_refused_with_both_names(
        self, folder: Path, tmp_path: Path, shape: tuple[int, ...], message: str, choices: dict
    ):
        (folder / "dog" / "x.png").write_bytes(png(random_images(1, shape)[0]))
        with pytest.raises(DataError, match=message):
            build(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        # What the message suggests works.
        assert build(folder, tmp_path / "out", **choices).training.documents

    @pytest.mark.parametrize(
        ("choices", "message"),
        [
            ({"size": (0, 4)}, "--image-size 0x4: both sides must be from 1"),
            ({"channels": 2}, "--channels 2 must be 1"),
            ({"colors": 1}, "--palette 1 must be from 2"),
            ({"colors": 2000}, "--palette 2000 needs as many distinct colors.*Try --palette 1050"),
        ],
    )
    def test_choices_that_cannot_be(self, folder: Path, tmp_path: Path, choices: dict, message: str):
        with pytest.raises(DataError, match=message):
            build(folder, tmp_path / "out", **choices)

    def test_a_reused_format_keeps_classes_size_and_palette(self, folder: Path, tmp_path: Path):
        build(folder, tmp_path / "first", colors=7)
        write_folder(tmp_path / "more", random_images(6, seed=1), classes=("dog", "owl"))
        build(tmp_path / "more", tmp_path / "out", reused=tmp_path / "first")
        first, out = ShardSet.open(tmp_path / "first"), ShardSet.open(tmp_path / "out")
        assert first.manifest.tokenizer == out.manifest.tokenizer
        for name, (_, label) in images_of(tmp_path / "out").items():
            assert CLASSES[label] == name.split("/")[0]

    def test_a_format_without_classes_takes_the_sources(self, folder: Path, tmp_path: Path):
        build(folder, tmp_path / "first", colors=7, label_field="")
        build(folder, tmp_path / "out", reused=tmp_path / "first")
        first, out = (ShardSet.open(tmp_path / name).image_format for name in ("first", "out"))
        assert out == dataclasses.replace(first, classes=CLASSES)

    def test_numbers_are_indices_into_reused_classes(self, folder: Path, tmp_path: Path):
        build(folder, tmp_path / "first")
        contents = [png(pixels) for pixels in random_images(4)]
        write_table(tmp_path / "more" / "a.parquet", contents, pa.array([2, 0, 1, 1]))
        build(tmp_path / "more", tmp_path / "out", reused=tmp_path / "first", options={"validation_fraction": 0})
        assert [label for _, label in images_of(tmp_path / "out").values()] == [2, 0, 1, 1]

    @pytest.mark.parametrize(
        ("choices", "message"),
        [
            ({"size": (9, 9)}, "--image-size 9x9 differs from the format in .*set --image-size 5x7"),
            ({"channels": 1}, "--channels 1 differs .*set --channels 3"),
            ({"colors": 8}, "--palette 8 differs from the format in .*, which has 7 colors"),
        ],
    )
    def test_choices_against_a_reused_format(self, folder: Path, tmp_path: Path, choices: dict, message: str):
        build(folder, tmp_path / "first", colors=7)
        with pytest.raises(DataError, match=message):
            build(folder, tmp_path / "out", reused=tmp_path / "first", **choices)

    def test_labels_beyond_reused_classes(self, folder: Path, tmp_path: Path):
        build(folder, tmp_path / "first")
        write_folder(tmp_path / "more", random_images(6), classes=("dog", "wolf"))
        with pytest.raises(DataError, match=r"has 1 classes beyond the 3 of the format in .*: wolf"):
            build(tmp_path / "more", tmp_path / "out", reused=tmp_path / "first")
        contents = [png(pixels) for pixels in random_images(4)]
        write_table(tmp_path / "table" / "a.parquet", contents, pa.array([0, 1, 2, 3]))
        with pytest.raises(DataError, match=r"has 1 classes beyond the 3 of the format in .*: 3"):
            build(tmp_path / "table", tmp_path / "out", reused=tmp_path / "first")
        with pytest.raises(DataError, match=r"has no labels, but the format in .* has 3 classes"):
            build(folder, tmp_path / "out", reused=tmp_path / "first", label_field="")

    def test_a_label_beyond_the_names_of_its_own_table(self, tmp_path: Path):
        contents = [png(pixels) for pixels in random_images(3)]
        write_table(tmp_path / "a.parquet", contents, pa.array([0, 1, 2]), names=("a", "b"))
        with pytest.raises(DataError, match=r"a\.parquet:2 has label 2, which is beyond the 2 classes \(a, b\)"):
            build(tmp_path, tmp_path / "out")

    def test_a_text_tokenizer_and_a_format_are_not_exchanged(
        self, folder: Path, source: TextSource, tokenizer: Tokenizer, tmp_path: Path
    ):
        found = open_images(folder)
        with pytest.raises(DataError, match=r"is a text tokenizer. Name a folder built with --kind images"):
            choose_format(found, reused=tokenizer)
        with pytest.raises(DataError, match=r"is a text tokenizer, but .* is read as images"):
            build_shards(found, tokenizer, tmp_path / "out", images=ImageRule())
        image_tokenizer = ImageTokenizer.of(ImageFormat(height=1, width=1, channels=1), Path("f"))
        with pytest.raises(DataError, match=r"is an image format, but .* is read as text"):
            build_shards(source, image_tokenizer, tmp_path / "out")

    @pytest.mark.parametrize("options", [{"exact": True}, {"duplicates": DuplicateRule(kind="exact")}])
    def test_options_of_texts_are_refused(self, folder: Path, tmp_path: Path, options: dict):
        with pytest.raises(DataError, match="apply to texts, not to images"):
            build(folder, tmp_path / "out", options=options)
        with pytest.raises(DataError, match="contains no conversations"):
            build(folder, tmp_path / "out", options={"chat": ChatRule()})


class TestSampledColors:
    def test_the_sample_does_not_depend_on_how_images_are_stored(self, tmp_path: Path):
        """Image files are chosen before they are read, tables row by row: the rule is the same."""
        images = random_images(60, (6, 5, 3))
        names = [f"{number}.png" for number in range(60)]
        (tmp_path / "files").mkdir()
        for name, pixels in zip(names, images, strict=True):
            (tmp_path / "files" / name).write_bytes(png(pixels))
        found = open_images(tmp_path / "files")
        rule = ImageRule(shape_from="0.png")
        image_format = ImageFormat(height=6, width=5, channels=3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(image_formats, "_SAMPLED_IMAGES", 7)
            patch.setattr(image_formats, "_SAMPLED_PIXELS", 70)
            sample = image_formats._sample_pixels(found, rule, image_format, lambda _: None)
        chosen = sorted(range(60), key=lambda number: image_formats._hash(names[number]))[:7]
        assert sample.shape == (70, 3)
        for place, number in enumerate(chosen):
            pixels = {tuple(pixel) for pixel in images[number].reshape(-1, 3).tolist()}
            part = [tuple(pixel) for pixel in sample[10 * place : 10 * place + 10].tolist()]
            assert len(set(part)) == 10
            assert set(part) <= pixels

    def test_few_images_give_all_their_pixels(self, tmp_path: Path):
        write_folder(tmp_path, random_images(3))
        found = open_images(tmp_path)
        image_format = ImageFormat(height=5, width=7, channels=3)
        sample = image_formats._sample_pixels(found, ImageRule(), image_format, lambda _: None)
        assert sorted(map(tuple, sample.tolist())) == sorted(map(tuple, random_images(3).reshape(-1, 3).tolist()))


class TestUnreadable:
    @pytest.fixture
    def faulty(self, folder: Path) -> Path:
        (folder / "cat" / "a.png").write_bytes(png(random_images(1)[0])[:60])
        (folder / "cat" / "b.jpg").write_bytes(b"no image")
        (folder / "owl" / "c.png").write_bytes(b"")
        return folder

    def test_they_are_counted_and_listed(self, faulty: Path, tmp_path: Path):
        report = build(faulty, tmp_path / "out", options={"validation_fraction": 0})
        assert report.training.documents == 30
        assert report.skipped == {"empty": 1, "unreadable image": 2}
        lines = [json.loads(line) for line in (tmp_path / "out" / "left_out.jsonl").read_text().splitlines()]
        assert [(line["name"], line["reason"]) for line in lines] == [
            ("cat/a.png", "unreadable image"),
            ("cat/b.jpg", "unreadable image"),
            ("owl/c.png", "empty"),
        ]
        assert lines[1]["detail"].startswith("it is no image in the formats PNG")

    @pytest.mark.parametrize(("name", "reason"), [("cat/b.jpg", "unreadable image"), ("owl/c.png", "empty")])
    def test_strict_builds_end_there(self, faulty: Path, tmp_path: Path, name: str, reason: str):
        for other in {"cat/a.png", "cat/b.jpg", "owl/c.png"} - {name}:
            (faulty / other).unlink()
        with pytest.raises(DataError, match=f"{name}: {reason}"):
            build(faulty, tmp_path / "out", strict=True)

    def test_no_readable_image_at_all(self, tmp_path: Path):
        for name in ("a.png", "b.png"):
            (tmp_path / name).write_bytes(b"rubbish")
        with pytest.raises(DataError, match=r"no usable image:\n  2 unreadable image: a\.png"):
            build(tmp_path, tmp_path / "out")


def test_a_built_folder_is_up_to_date_until_the_choices_change(folder: Path, tmp_path: Path):
    assert not build(folder, tmp_path / "out", colors=5).up_to_date
    assert build(folder, tmp_path / "out", colors=5).up_to_date
    with pytest.raises(DataError, match="built from another tokenizer"):
        build(folder, tmp_path / "out", colors=6)
    with pytest.raises(DataError, match="built from another options"):
        build(folder, tmp_path / "out", colors=5, size=(5, 7))
    shutil.rmtree(folder / "owl")
    with pytest.raises(DataError, match="built from another source and tokenizer"):
        build(folder, tmp_path / "out", colors=5)
