"""What ``data inspect`` says of images: counts by class, and a picture whose pixels are those of the folder."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_pipeline.image_contents import SHEET_IMAGES, _by_turns, image_contents, write_sheet
from data_pipeline.inspect import decode_rows, describe, show_row
from data_pipeline.mixture.description import describe_mixture
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.image_formats import ImageOptions, choose_format
from data_pipeline.prepare.image_source import open_images
from data_pipeline.prepare.images.contact_sheet import draw_sheet
from data_pipeline.shards.reader import Corpus, ShardSet
from longctx.errors import ConfigError, DataError
from tests.data_pipeline.made_images import CLASSES, random_images, write_folder


def build(tmp_path: Path, count: int = 40, label_field: str = "label", **choices) -> Path:
    write_folder(tmp_path / "source", random_images(count))
    source = open_images(tmp_path / "source", label_field=label_field)
    tokenizer, rule = choose_format(source, ImageOptions(**choices))
    options = {"validation_fraction": 0.2, "shard_tokens": 1000}
    build_shards(source, tokenizer, tmp_path / "out", images=rule, **options)
    return tmp_path / "out"


def test_images_are_counted_by_class(tmp_path: Path):
    found = image_contents(ShardSet.open(build(tmp_path, colors=4)))
    shards = ShardSet.open(tmp_path / "out")
    counts = Counter(shards.name(number).split("/")[0] for number in range(shards.num_documents))
    assert found.images_per_class == [counts[name] for name in CLASSES]
    assert (found.height, found.width, found.channels, found.colors, found.tokens_per_image) == (5, 7, 3, 4, 35)
    assert describe(tmp_path / "out").images == found


def test_a_folder_without_classes_counts_none(tmp_path: Path):
    found = describe(build(tmp_path, label_field=""))
    assert found.images is not None
    assert (found.images.classes, found.images.images_per_class) == ([], [])


def test_rows_of_images_are_not_shown_as_text(tmp_path: Path):
    folder = build(tmp_path)
    for show in (
        lambda: describe(folder, seq_len=64),
        lambda: show_row(folder, seq_len=64, row=0),
        lambda: next(decode_rows(folder, seq_len=64, rows=1)),
    ):
        with pytest.raises(DataError, match=f"contains images.*\n.*data inspect {folder} --picture images.png"):
            show()


def test_images_are_taken_from_all_classes_in_turn():
    labels = np.array([0, 0, 0, 0, 2, 2, 1])
    assert _by_turns(labels).tolist() == [0, 6, 4, 1, 5, 2, 3]


class TestPictures:
    def test_every_image_stands_on_it_enlarged(self, tmp_path: Path):
        folder = build(tmp_path, 12, label_field="")
        names = write_sheet(folder, tmp_path / "sheet.png")
        shards = ShardSet.open(folder)
        assert names == [shards.name(number) for number in range(shards.num_documents)]
        with Image.open(tmp_path / "sheet.png") as sheet:
            found = np.array(sheet)
        # A cell has 128 pixels, so that an image of 7 columns is enlarged by 18.
        for number in range(shards.num_documents):
            left = 8 + number % 8 * 136 + (128 - 7 * 18) // 2
            top = 28 + number // 8 * 156 + (128 - 5 * 18) // 2
            part = found[top : top + 5 * 18 : 18, left : left + 7 * 18 : 18]
            assert (part == shards.image_format.pixels_of(shards.document(number))).all()

    def test_a_large_folder_shows_all_classes(self, tmp_path: Path):
        folder = build(tmp_path, 120)
        names = write_sheet(folder, tmp_path / "sheet.png")
        assert len(names) == SHEET_IMAGES
        assert sorted(Counter(name.split("/")[0] for name in names).values()) == [21, 21, 22]
        assert names == sorted(names)

    def test_large_images_and_long_names_fit(self):
        sheet = draw_sheet([np.zeros((300, 500, 1), np.uint8)] * 3, ["a name of many words for one class"] * 3, "t")
        with Image.open(io.BytesIO(sheet)) as image:
            assert image.size == (3 * 136 + 8, 28 + 156)

    def test_texts_and_other_files_are_refused(self, built: Path, tmp_path: Path):
        with pytest.raises(DataError, match="contains no images"):
            write_sheet(built, tmp_path / "sheet.png")
        with pytest.raises(ConfigError, match=r"sheet\.jpg is written as PNG. Name it .*sheet\.png"):
            write_sheet(built, tmp_path / "sheet.jpg")
        assert not list(tmp_path.iterdir())


def test_images_and_texts_are_not_read_together(built: Path, tmp_path: Path):
    folder = build(tmp_path)
    with pytest.raises(DataError, match=r"contains images, the other texts. Read only one kind"):
        Corpus([ShardSet.open(folder), ShardSet.open(built)])


def write_mixture(path: Path, *folders: Path) -> Path:
    lines = [
        f'[[sources]]\nname = "s{number}"\npath = "{folder}"\nweight = 1\n' for number, folder in enumerate(folders)
    ]
    path.write_text("".join(lines))
    return path


def test_a_mixture_of_images_is_described(built: Path, tmp_path: Path):
    folder = build(tmp_path)
    found = describe_mixture(write_mixture(tmp_path / "mixture.toml", folder, folder / "validation"))
    with pytest.raises(DataError, match=r"s0 contains images, s1 texts. A run reads only one kind"):
        describe_mixture(write_mixture(tmp_path / "both.toml", folder, built))
    assert [source.documents for source in found.sources] == [
        ShardSet.open(folder).num_documents,
        ShardSet.open(folder / "validation").num_documents,
    ]
