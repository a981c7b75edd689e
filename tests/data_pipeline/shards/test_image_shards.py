"""Shards of images: bytes that plain pyarrow reads, labels, and folders whose images contradict their format."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_pipeline.inspect import find_problems
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.reader import Corpus, ShardSet, shard_labels
from data_pipeline.shards.shard_writer import EncodedDocument, ShardWriter
from longctx.errors import DataError
from longctx.images.image_format import ImageFormat
from longctx.tokenizer import Tokenizer
from longctx.tokenizer.image_tokenizer import ImageTokenizer
from tests.data_pipeline.shards.test_hostile_shards import forge
from tests.data_pipeline.shards.test_shards import edit, flip_byte

FORMAT = ImageFormat(height=2, width=3, channels=1, classes=("cat", "dog", "owl"))
LABELS = [0, 2, 1, 1, 0]


def palette(colors: int, **fields) -> ImageFormat:
    values = tuple((value,) for value in np.linspace(-1, 1, colors).tolist())
    return dataclasses.replace(FORMAT, palette=values, **fields)


def write_images(folder: Path, found: ImageFormat, rows: list[np.ndarray], labels: list[int], **options) -> Manifest:
    folder.mkdir()
    tokenizer = ImageTokenizer.of(found, folder)
    writer = ShardWriter(folder, vocab_size=tokenizer.vocab_size, images=True, **options)
    for number, (tokens, label) in enumerate(zip(rows, labels, strict=True)):
        fields = {"hash": number, "name": f"i{number}", "text_bytes": 0}
        writer.add(EncodedDocument(tokens=tokens, label=label, **fields))
    tokenizer.save(folder)
    return writer.finish(split="training", tokenizer=tokenizer, sources=[{"kind": "test"}], options={}, skipped={})


def rows_of(found: ImageFormat, count: int = 5) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, found.num_ids, found.num_tokens) for _ in range(count)]


@pytest.mark.parametrize(
    ("found", "dtype"),
    [(FORMAT, pa.uint8()), (palette(255), pa.uint8()), (palette(256), pa.uint16()), (palette(600), pa.uint16())],
)
def test_every_image_comes_back(tmp_path: Path, found: ImageFormat, dtype: pa.DataType):
    rows = rows_of(found)
    rows[0][0] = found.num_ids - 1
    manifest = write_images(tmp_path / "f", found, rows, LABELS, shard_tokens=12)
    assert (manifest.version, [entry.documents for entry in manifest.shards]) == (3, [2, 2, 1])
    table = pa.ipc.open_file(pa.memory_map(str(tmp_path / "f" / "00000.arrow"))).read_all()
    assert (table.schema.field("tokens").type, table.schema.field("label").type) == (pa.large_list(dtype), pa.int32())
    shards = ShardSet.open(tmp_path / "f")
    assert shards.is_images
    assert shards.image_format == found
    assert [shards.document(number).tolist() for number in range(5)] == [row.tolist() for row in rows]
    assert [shards.label(number) for number in range(5)] == LABELS
    assert np.concatenate([shard_labels(shards, number) for number in range(3)]).tolist() == LABELS
    assert find_problems(tmp_path / "f") == []


def test_several_folders_give_their_labels(tmp_path: Path):
    for name in ("a", "b"):
        write_images(tmp_path / name, FORMAT, rows_of(FORMAT), LABELS)
    corpus = Corpus([ShardSet.open(tmp_path / name) for name in ("a", "b")])
    assert corpus.is_images
    assert [corpus.label(number) for number in range(10)] == LABELS * 2


def test_a_flipped_label_is_damage(tmp_path: Path):
    # So many that the labels are in blocks of their own, which opening the file does not read.
    tokens = np.zeros(FORMAT.num_tokens, np.uint8)
    labels = np.random.default_rng(0).integers(0, 3, 60_000)
    write_images(tmp_path / "f", FORMAT, [tokens] * len(labels), labels.tolist())
    path = tmp_path / "f" / "00000.arrow"
    flip_byte(path, path.read_bytes().index(labels.astype(np.int32).tobytes()) + 4 * 30_000)
    shards = ShardSet.open(tmp_path / "f")
    assert shards.label(0) == labels[0]
    for read in (lambda: shards.label(30_000), lambda: shard_labels(shards, 0)):
        with pytest.raises(DataError, match=r"00000\.arrow is damaged"):
            read()


def test_a_folder_of_texts_has_no_format(built: Path):
    shards = ShardSet.open(built)
    assert not shards.is_images
    assert "kind" not in shards.manifest.to_json()
    with pytest.raises(DataError, match=r"contains no images\. Build some with"):
        _ = shards.image_format


class TestContradictions:
    """Folders that somebody made up, every hash consistent."""

    @pytest.mark.parametrize(
        ("labels", "said"),
        [([0, 3, 1, 1, 0], "label 3 in i1, but its 3 classes allow 0 to 2"), ([-1] * 5, "label -1 in i0")],
    )
    def test_labels_outside_the_classes(self, tmp_path: Path, labels: list[int], said: str):
        write_images(tmp_path / "f", FORMAT, rows_of(FORMAT), labels)
        (problem,) = find_problems(tmp_path / "f")
        assert said in problem

    def test_labels_without_classes(self, tmp_path: Path):
        found = dataclasses.replace(FORMAT, classes=())
        write_images(tmp_path / "fine", found, rows_of(found), [-1] * 5)
        assert find_problems(tmp_path / "fine") == []
        write_images(tmp_path / "f", found, rows_of(found), LABELS)
        (problem,) = find_problems(tmp_path / "f")
        assert "label 0 in i0, but its 0 classes allow -1 to -1" in problem

    def test_images_of_another_size(self, tmp_path: Path):
        write_images(tmp_path / "f", FORMAT, [row[:5] for row in rows_of(FORMAT)], LABELS)
        (problem,) = find_problems(tmp_path / "f")
        assert "has 5 images of another size than 6 tokens: i0 has 5" in problem

    def test_images_of_different_sizes(self, tmp_path: Path):
        rows = rows_of(FORMAT)
        rows[2] = rows[2][:5]
        write_images(tmp_path / "f", FORMAT, rows, LABELS)
        with pytest.raises(DataError, match="its images differ in their number of tokens"):
            ShardSet.open(tmp_path / "f")

    def test_the_begin_token_in_an_image(self, tmp_path: Path):
        found = palette(4)
        rows = rows_of(found)
        rows[3][2] = 4
        write_images(tmp_path / "f", found, rows, LABELS)
        (problem,) = find_problems(tmp_path / "f")
        assert "contains id 4, outside the palette of 4 colors" in problem

    def test_texts_under_a_manifest_of_images(self, tokenizer: Tokenizer, tmp_path: Path):
        folder = forge(tmp_path / "f", tokenizer, kind="images")
        assert any("contains texts" in problem for problem in find_problems(folder))
        with pytest.raises(DataError, match=r"contains texts, which manifest\.json does not list"):
            ShardSet.open(folder).document(0)

    def test_images_under_a_manifest_of_texts(self, tokenizer: Tokenizer, tmp_path: Path):
        columns = {"tokens": pa.array([[5]], pa.large_list(pa.uint8())), "label": pa.array([0], pa.int32())}
        folder = forge(tmp_path / "f", tokenizer, columns, tokens=1)
        assert any("contains images" in problem for problem in find_problems(folder))
        with pytest.raises(DataError, match=r"contains images, which manifest\.json does not list"):
            ShardSet.open(folder).document(0)

    @pytest.mark.parametrize("labels", [pa.array([0], pa.int64()), pa.array([None], pa.int32())])
    def test_labels_of_another_type(self, tokenizer: Tokenizer, tmp_path: Path, labels: pa.Array):
        folder = forge(tmp_path / "f", tokenizer, {"label": labels}, kind="images")
        with pytest.raises(DataError, match="is not a shard"):
            ShardSet.open(folder).document(0)

    @pytest.mark.parametrize("change", [{"version": 2}, {"kind": "sounds"}, {"kind": ""}])
    def test_another_version_or_kind(self, tmp_path: Path, change: dict):
        write_images(tmp_path / "f", FORMAT, rows_of(FORMAT), LABELS)
        edit(tmp_path / "f" / "manifest.json", lambda body: body.update(change), seal=True)
        with pytest.raises(DataError, match=r"manifest\.json: "):
            ShardSet.open(tmp_path / "f")
