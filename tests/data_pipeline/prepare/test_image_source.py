"""Sources of images: folders by class, IDX files and tables, with their labels; what is left out, what is refused."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_pipeline.prepare.image_source import ImageSource, open_images
from data_pipeline.prepare.images.decode_image import decode_image
from data_pipeline.prepare.source_items import RawImage
from longctx.errors import DataError
from tests.data_pipeline.made_images import idx, png, random_images, write_folder, write_idx, write_table


def images_of(source: ImageSource) -> dict[str, tuple[np.ndarray, int | str | None]]:
    """Every image's pixels and label, by name."""
    found = {}
    for document in source:
        assert isinstance(document.image, RawImage)
        content = document.image.content
        pixels = decode_image(content) if isinstance(content, bytes) else content
        found[document.name] = (pixels, document.image.label)
    return found


def skips_of(source: ImageSource) -> set[tuple[str, str]]:
    found = set()
    for _ in source.read(lambda skip: found.add((skip.name, skip.reason))):
        pass
    return found


class TestFolders:
    def test_the_first_folder_is_the_class(self, tmp_path: Path):
        made = write_folder(tmp_path, random_images(7))
        (tmp_path / "dog" / "small").mkdir()
        shutil.move(tmp_path / "dog" / "001.png", tmp_path / "dog" / "small" / "1.PNG")
        made["dog/small/1.PNG"] = made.pop("dog/001.png")
        source = open_images(tmp_path)
        assert source.classes == ("cat", "dog", "owl")
        found = images_of(source)
        assert list(found) == sorted(made)
        for name, (pixels, label) in found.items():
            assert (pixels == made[name]).all()
            assert label == name.split("/")[0]

    def test_images_directly_in_the_source_have_no_class(self, tmp_path: Path):
        (tmp_path / "a.png").write_bytes(png(random_images(1)[0]))
        source = open_images(tmp_path)
        assert (source.classes, images_of(source)["a.png"][1]) == ((), None)
        assert open_images(tmp_path / "a.png").classes == ()

    def test_both_at_once_are_refused(self, tmp_path: Path):
        write_folder(tmp_path, random_images(3))
        (tmp_path / "bare.png").write_bytes(png(random_images(1)[0]))
        with pytest.raises(DataError, match=r"such as cat/000\.png, and others outside, such as bare\.png"):
            open_images(tmp_path)
        # What the message suggests works.
        assert open_images(tmp_path, exclude=["bare.png"]).classes == ("cat", "dog", "owl")
        without = open_images(tmp_path, label_field="")
        assert without.classes == ()
        assert {label for _, label in images_of(without).values()} == {None}

    def test_other_files_and_empty_ones_are_listed(self, tmp_path: Path):
        write_folder(tmp_path, random_images(3))
        (tmp_path / "README.md").write_text("about")
        (tmp_path / "cat" / "empty.jpg").write_bytes(b"")
        (tmp_path / "cat" / ".hidden.png").write_bytes(b"x")
        (tmp_path / "dog" / "big.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
        wanted = {
            ("README.md", "not an image"),
            ("cat/empty.jpg", "empty"),
            ("cat/.hidden.png", "hidden"),
            ("dog/big.png", "Git LFS pointer"),
        }
        assert skips_of(open_images(tmp_path)) == wanted
        with pytest.raises(DataError, match=r"cat/empty\.jpg: empty"):
            list(open_images(tmp_path, strict=True))

    def test_a_folder_without_images_names_what_is_read(self, tmp_path: Path):
        (tmp_path / "a.txt").write_text("a text")
        with pytest.raises(DataError, match=r"no usable image:\n  1 not an image: a\.txt\nUse \.png \.jpg"):
            open_images(tmp_path)
        with pytest.raises(DataError, match="stdlib contains no images"):
            open_images("stdlib")
        with pytest.raises(DataError, match="does not exist"):
            open_images(tmp_path / "missing")


class TestIdx:
    @pytest.mark.parametrize("mark", ["-", "."])
    @pytest.mark.parametrize("shape", [(4, 3), (4, 3, 3), (4, 3, 1)])
    def test_images_and_labels_come_in_order(self, tmp_path: Path, shape: tuple[int, ...], mark: str):
        images, labels = random_images(6, shape), [3, 0, 1, 2, 0, 3]
        write_idx(tmp_path, images, labels, mark=mark)
        source = open_images(tmp_path)
        assert source.classes == ("0", "1", "2", "3")
        found = images_of(source)
        assert list(found) == [f"train-images{mark}idx{images.ndim}-ubyte.gz:{number}" for number in range(6)]
        for number, (pixels, label) in enumerate(found.values()):
            assert (pixels == images[number].reshape(4, 3, -1)).all()
            assert label == labels[number]
        assert skips_of(source) == set()

    def test_plain_files_and_files_without_labels(self, tmp_path: Path):
        images = random_images(3, (2, 2))
        (tmp_path / "images-idx3-ubyte").write_bytes(idx(images))
        source = open_images(tmp_path)
        assert source.classes == ()
        assert {label for _, label in images_of(source).values()} == {None}
        (tmp_path / "labels-idx1-ubyte").write_bytes(idx(np.array([0, 1, 1])))
        assert open_images(tmp_path).classes == ("0", "1")
        assert open_images(tmp_path, label_field="").classes == ()

    def test_labels_change_the_fingerprint(self, tmp_path: Path):
        found = []
        for name, labels in (("a", [0, 1]), ("b", [1, 0])):
            write_idx(tmp_path / name, random_images(2, (2, 2)), labels)
            found.append(open_images(tmp_path / name).fingerprint())
        assert found[0] != found[1]

    def test_reading_without_labels_is_another_source(self, tmp_path: Path):
        write_idx(tmp_path, random_images(2, (2, 2)), [0, 1])
        assert open_images(tmp_path).fingerprint() != open_images(tmp_path, label_field="").fingerprint()

    def test_only_some_files_with_labels(self, tmp_path: Path):
        write_idx(tmp_path, random_images(2, (2, 2)), [0, 1])
        write_idx(tmp_path, random_images(2, (2, 2)), None, name="t10k")
        with pytest.raises(DataError, match=r"train-images\S+ has labels, and t10k-images\S+ has none"):
            open_images(tmp_path)
        assert open_images(tmp_path, exclude=["t10k*"]).classes == ("0", "1")

    def test_labels_of_another_number_are_left_out_or_refused(self, tmp_path: Path):
        write_idx(tmp_path, random_images(3, (2, 2)), [0, 1])
        write_idx(tmp_path, random_images(2, (2, 2)), [0, 1], name="t10k")
        assert ("train-images-idx3-ubyte.gz", "labels of another number") in skips_of(open_images(tmp_path))
        with pytest.raises(DataError, match=r"has 3 images, and train-labels-idx1-ubyte.gz 2 labels"):
            open_images(tmp_path, strict=True)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "empty|it begins with"),
            (b"\0\0\x08\x03\0\0", "ends in its header"),
            (b"\0\0\x0d\x03" + bytes(12), "no IDX file of bytes in 3 or 4 dimensions"),
            (b"\0\0\x08\x01\0\0\0\x09", "in 3 or 4 dimensions"),
            (idx(np.zeros((9, 0, 4))), "images of 0 x 4"),
            (idx(np.zeros((1, 2, 2, 2))), "images of 2 x 2 x 2"),
            (b"\0\0\x08\x03\0\0\0\x09\xff\xff\xff\xff\0\0\0\x01", "images of 4294967295 x 1"),
        ],
    )
    def test_headers_that_are_none(self, tmp_path: Path, content: bytes, message: str):
        (tmp_path / "images-idx3-ubyte").write_bytes(content)
        with pytest.raises(DataError, match=message):
            open_images(tmp_path)

    def test_images_before_damage_are_used(self, tmp_path: Path):
        images = random_images(4, (8, 8))
        for name, content in (("short", idx(images)[:-70]), ("long", idx(images) + b"\0")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "images-idx3-ubyte").write_bytes(content)
        source = open_images(tmp_path / "short")
        assert len(images_of(source)) == 2
        assert source.left_out.examples["damaged"][0].startswith("images-idx3-ubyte (it ends after 2 of 4 images")
        source = open_images(tmp_path / "long")
        assert len(images_of(source)) == 4
        assert "more behind its last image" in source.left_out.examples["damaged"][0]

    def test_a_damaged_stream_says_so(self, tmp_path: Path):
        content = gzip.compress(idx(random_images(400, (8, 8))))
        (tmp_path / "images-idx3-ubyte.gz").write_bytes(content[: len(content) // 2])
        source = open_images(tmp_path)
        assert 0 < len(images_of(source)) < 400
        assert "ends before its compressed data does" in source.left_out.examples["damaged"][0]

    def test_damaged_labels_are_refused(self, tmp_path: Path):
        (tmp_path / "images-idx3-ubyte").write_bytes(idx(random_images(3, (2, 2))))
        (tmp_path / "labels-idx1-ubyte").write_bytes(idx(np.array([0, 1, 1]))[:-1])
        with pytest.raises(DataError, match=r"the labels cannot be read .labels-idx1-ubyte does not have the 3 labels"):
            open_images(tmp_path)


class TestTables:
    @pytest.mark.parametrize("plain", [True, False])
    def test_names_come_from_the_schema(self, tmp_path: Path, plain: bool):
        images = random_images(5)
        labels = pa.array([2, 0, 2, 1, 0])
        write_table(tmp_path / "a.parquet", list(map(png, images)), labels, names=("owl", "cat", "dog"), plain=plain)
        source = open_images(tmp_path)
        assert source.classes == ("owl", "cat", "dog")
        found = images_of(source)
        assert list(found) == [f"a.parquet:{row}" for row in range(5)]
        assert [label for _, label in found.values()] == ["dog", "owl", "dog", "cat", "owl"]
        for pixels, (other, _) in zip(images, found.values(), strict=True):
            assert (pixels == other).all()

    @pytest.mark.parametrize(
        ("labels", "classes"),
        [
            (pa.array([2, 0, 0], pa.int8()), ("0", "1", "2")),
            (pa.array(["b", "a", "b"]), ("a", "b")),
            (pa.array(["b", "a", "b"]).dictionary_encode(), ("a", "b")),
        ],
    )
    def test_numbers_and_texts_are_labels(self, tmp_path: Path, labels: pa.Array, classes: tuple[str, ...]):
        write_table(tmp_path / "a.parquet", list(map(png, random_images(3))), labels)
        source = open_images(tmp_path)
        assert source.classes == classes
        assert [label for _, label in images_of(source).values()] == labels.to_pylist()

    def test_tables_of_many_groups_are_cut(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        images = random_images(20)
        write_table(tmp_path / "a.parquet", list(map(png, images)), pa.array(range(20)), row_group_size=3)
        monkeypatch.setattr("data_pipeline.prepare.sources.CUT_BYTES", 500)
        source = open_images(tmp_path)
        pieces = source.pieces()
        assert len(pieces) > 3
        from data_pipeline.prepare.source_reader import SourceReader

        found = {document.name: document.image for document in SourceReader(source.read_as).documents(pieces)}
        assert list(found) == [f"a.parquet:{row}" for row in range(20)]
        assert [image.label for image in found.values() if image is not None] == list(range(20))

    def test_rows_without_image_or_label_are_listed(self, tmp_path: Path):
        contents = [png(pixels) for pixels in random_images(4)]
        write_table(tmp_path / "a.parquet", [None, *contents[1:]], pa.array([0, 1, -1, None]), names=("a", "b"))
        assert skips_of(open_images(tmp_path)) == {
            ("a.parquet:0", "null"),
            ("a.parquet:2", "no label"),
            ("a.parquet:3", "no label"),
        }
        assert len(images_of(open_images(tmp_path, label_field=""))) == 3
        with pytest.raises(DataError, match=r"a\.parquet:0: null"):
            list(open_images(tmp_path, strict=True))

    def test_without_a_label_column_there_are_no_classes(self, tmp_path: Path):
        write_table(tmp_path / "a.parquet", list(map(png, random_images(2))), None)
        assert open_images(tmp_path).classes == ()
        with pytest.raises(DataError, match="no column 'kind' with labels; its columns: image"):
            open_images(tmp_path, label_field="kind")

    def test_other_columns_are_named(self, tmp_path: Path):
        write_table(tmp_path / "a.parquet", list(map(png, random_images(2))), pa.array([0, 1]))
        with pytest.raises(
            DataError, match=r"no field 'img': a\.parquet \(fields: 'image', 'label'; with bytes: 'image'"
        ):
            open_images(tmp_path, image_field="img")
        with pytest.raises(DataError, match="no field 'label'"):
            open_images(tmp_path, image_field="label")

    def test_labels_of_another_type_are_left_out(self, tmp_path: Path):
        write_table(tmp_path / "a.parquet", list(map(png, random_images(2))), pa.array([0.5, 1.5]))
        with pytest.raises(DataError, match="column 'label' holds double, not whole numbers or texts"):
            open_images(tmp_path)

    @pytest.mark.parametrize(
        ("first", "second", "message"),
        [
            ({"labels": pa.array([0, 1])}, {"labels": pa.array(["a", "b"])}, "label their images differently"),
            (
                {"labels": pa.array([0, 1]), "names": ("a", "b")},
                {"labels": pa.array([0, 1]), "names": ("b", "a")},
                "label their images differently",
            ),
            ({"labels": pa.array([0, 1])}, {"labels": None}, "a.parquet has labels, and b.parquet has none"),
        ],
    )
    def test_tables_that_disagree(self, tmp_path: Path, first: dict, second: dict, message: str):
        contents = list(map(png, random_images(2)))
        for name, options in (("a", first), ("b", second)):
            write_table(tmp_path / f"{name}.parquet", contents, **options)
        with pytest.raises(DataError, match=message):
            open_images(tmp_path)

    def test_a_number_too_large_for_a_class(self, tmp_path: Path):
        write_table(tmp_path / "a.parquet", list(map(png, random_images(2))), pa.array([0, 10**12]))
        with pytest.raises(DataError, match="has label 1000000000000, but numbers are class indices below"):
            open_images(tmp_path)

    def test_a_damaged_table_is_left_out(self, tmp_path: Path):
        write_table(tmp_path / "a.parquet", list(map(png, random_images(2))), pa.array([0, 1]))
        (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
        assert ("b.parquet", "damaged") in skips_of(open_images(tmp_path))


def test_kinds_of_files_are_not_mixed(tmp_path: Path):
    write_folder(tmp_path, random_images(3))
    write_table(tmp_path / "a.parquet", list(map(png, random_images(2))), None)
    with pytest.raises(DataError, match=r"mixes image files \(cat/000\.png\) and Parquet tables \(a\.parquet\)"):
        open_images(tmp_path)
    assert open_images(tmp_path, include=["*.parquet"]).num_files == 1
