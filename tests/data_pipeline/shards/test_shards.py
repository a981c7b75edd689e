from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_pipeline.inspect import find_problems
from data_pipeline.shards.manifest import Manifest, hash_json, length_histogram
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_writer import EncodedDocument, ShardWriter, token_dtype
from longctx.errors import DataError
from longctx.files import staged_folder, write_atomically
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.lengths import lengths_of, read_all


def write(folder: Path, tokenizer: Tokenizer, documents: list[list[int]], *, source: int = 0, **options) -> Manifest:
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, **{"vocab_size": tokenizer.vocab_size, **options})
    for number, tokens in enumerate(documents):
        fields = {"hash": 2**64 - 1 - number, "name": f"d{number}", "text_bytes": 3, "source": source}
        writer.add(EncodedDocument(tokens=np.array(tokens), **fields))
    return writer.finish(split="training", tokenizer=tokenizer, sources=[{"kind": "test"}], options={}, skipped={})


class TestWriteAndRead:
    documents = ([1, 5, 2], [1, 6, 7, 8, 2], [9], [10, 11, 12])

    def test_every_document_comes_back(self, tokenizer: Tokenizer, tmp_path: Path):
        manifest = write(tmp_path, tokenizer, list(self.documents), shard_tokens=6)
        shards = ShardSet.open(tmp_path)
        assert [e.documents for e in manifest.shards] == [1, 2, 1]
        assert [shards.document(i).tolist() for i in range(4)] == list(self.documents)
        assert shards.slice(1, 2, 4).tolist() == [7, 8]
        assert (lengths_of(shards).tolist(), lengths_of(shards).dtype) == ([3, 5, 1, 3], np.int64)
        assert (shards.num_documents, shards.num_tokens) == (4, 12)
        assert shards.name(2) == "d2"
        assert manifest.length_histogram == {"2^0": 1, "2^1": 2, "2^2": 1}
        with pytest.raises(IndexError):
            shards.document(4)

    def test_a_document_longer_than_a_shard_stays_whole(self, tokenizer: Tokenizer, tmp_path: Path):
        manifest = write(tmp_path, tokenizer, [[5] * 3, [6] * 50, [7] * 3], shard_tokens=10)
        assert [e.tokens for e in manifest.shards] == [3, 50, 3]

    def test_views_are_not_copies_and_cannot_be_written(self, tokenizer: Tokenizer, tmp_path: Path):
        write(tmp_path, tokenizer, list(self.documents))
        view = ShardSet.open(tmp_path).document(1)
        assert view.base is not None
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1

    @pytest.mark.parametrize(
        ("vocab_size", "dtype"), [(700, pa.uint16()), (1 << 16, pa.uint16()), (65537, pa.uint32())]
    )
    def test_plain_pyarrow_reads_it(self, tokenizer: Tokenizer, tmp_path: Path, vocab_size: int, dtype: pa.DataType):
        write(tmp_path, tokenizer, [[1, vocab_size - 1, 2]], vocab_size=vocab_size)
        reader = pa.ipc.open_file(pa.memory_map(str(tmp_path / "00000.arrow")))
        assert reader.num_record_batches == 1
        assert reader.schema == pa.schema(
            {"tokens": pa.large_list(dtype), "source": pa.int16(), "hash": pa.uint64(), "name": pa.string()}
        )
        row = reader.read_all().to_pylist()[0]
        assert row == {"tokens": [1, vocab_size - 1, 2], "source": 0, "hash": 2**64 - 1, "name": "d0"}
        assert token_dtype(vocab_size) == dtype.to_pandas_dtype()

    @pytest.mark.parametrize("tokens", [[1, 700], [-1, 2], []])
    def test_ids_outside_the_vocabulary_are_refused(self, tokenizer: Tokenizer, tmp_path: Path, tokens: list[int]):
        with pytest.raises(DataError, match="d0 has"):
            write(tmp_path, tokenizer, [tokens])


def flip_byte(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def edit(path: Path, change: Callable[[dict], object], *, seal: bool = False) -> None:
    body = json.loads(path.read_text())
    change(body)
    if seal:
        del body["hash"]
        body["hash"] = hash_json(body)
    path.write_text(json.dumps(body))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (lambda f: flip_byte(f / "00001.arrow", 5000), "00001.arrow is damaged"),
    "truncated shard": (
        lambda f: (f / "00000.arrow").write_bytes((f / "00000.arrow").read_bytes()[:-8]),
        "00000.arrow has",
    ),
    "missing shard": (lambda f: (f / "00001.arrow").unlink(), "00001.arrow is missing"),
    "swapped shards": (lambda f: shutil.copy(f / "00000.arrow", f / "00001.arrow"), "00001.arrow has"),
    "edited manifest": (lambda f: edit(f / "manifest.json", lambda m: m.update(vocab_size=1)), "was changed"),
    "manifest without hash": (lambda f: edit(f / "manifest.json", lambda m: m.pop("hash")), "was changed"),
    "half a manifest": (
        lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text()[:500]),
        "manifest.json is damaged",
    ),
    "missing manifest": (lambda f: (f / "manifest.json").unlink(), "is not a shard folder"),
    "a list for a manifest": (lambda f: (f / "manifest.json").write_text("[]"), "is not a JSON object"),
    "other version": (lambda f: edit(f / "manifest.json", lambda m: m.update(version=5)), "format version 5"),
    "other format": (lambda f: edit(f / "manifest.json", lambda m: m.update(format="x")), "not a shard manifest"),
    "sealed with a field too few": (
        lambda f: edit(f / "manifest.json", lambda m: m.pop("padding"), seal=True),
        "it lacks padding",
    ),
    "sealed with wrong counts": (
        lambda f: edit(
            f / "manifest.json", lambda m: m["shards"][0].update(tokens=m["shards"][0]["tokens"] - 1), seal=True
        ),
        "00000.arrow does not contain",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(damaged: Path, damage: str):
    harm, message = DAMAGE[damage]
    harm(damaged)
    with pytest.raises(DataError) as caught:
        read_all(ShardSet.open(damaged))
    assert message in str(caught.value)
    assert str(damaged) in str(caught.value)
    problems = find_problems(damaged)
    assert len(problems) in (1, 2)
    assert message in problems[0]


def test_without_verify_a_file_is_looked_at_when_something_of_it_is_asked_for(damaged: Path):
    """A start costs the same however many documents there are."""
    content = (damaged / "00000.arrow").read_bytes()
    (damaged / "00000.arrow").write_bytes(bytes(len(content)))
    shards = ShardSet.open(damaged, verify=False)
    assert mapped(damaged) == 0
    first = shards.manifest.shards[0].documents
    shards.lengths_of(np.array([first, first + 1]))
    assert mapped(damaged) == 1
    with pytest.raises(DataError, match=r"00000.arrow cannot be read"):
        shards.lengths_of(np.array([0, first]))
    with pytest.raises(DataError, match=r"00000.arrow cannot be read"):
        shards.document(0)
    (damaged / "00000.arrow").unlink()
    with pytest.raises(DataError, match=r"00000.arrow is missing"):
        ShardSet.open(damaged, verify=False)


@pytest.mark.parametrize("wrong", [-5, 0, 3, 10**12])
def test_wrong_offsets_are_named_before_anything_is_read_by_them(tokenizer: Tokenizer, tmp_path: Path, wrong: int):
    write(tmp_path, tokenizer, [[5] * 3, [6] * 4, [7] * 5])
    path = tmp_path / "00000.arrow"
    content, offsets = path.read_bytes(), np.array([0, 3, 7, 12]).tobytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, np.array([0, 3, wrong, 12]).tobytes()))
    shards = ShardSet.open(tmp_path, verify=False)
    assert shards.lengths_of(np.array([0])).tolist() == [3]
    with pytest.raises(DataError, match=r"00000.arrow is damaged: its document offsets are not ascending"):
        shards.lengths_of(np.array([1, 2]))
    with pytest.raises(DataError, match=r"00000.arrow is damaged: its document offsets are not ascending"):
        shards.document(1)


def test_lengths_come_in_the_order_that_is_asked_for(tokenizer: Tokenizer, tmp_path: Path):
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    write(tmp_path, tokenizer, [[5] * length for length in lengths], shard_tokens=6)
    shards = ShardSet.open(tmp_path)
    wanted = np.array([7, 0, 3, 3, 6, 1])
    assert shards.lengths_of(wanted).tolist() == [lengths[number] for number in wanted]
    assert shards.lengths_of(wanted[:0]).tolist() == []
    assert shards.longest_document() == 9


class TestBoundedMappings:
    """Only so many files are mapped at once, however many shards there are."""

    @pytest.fixture
    def many(self, tokenizer: Tokenizer, tmp_path: Path) -> Path:
        folder = tmp_path / "many"
        write(folder, tokenizer, [[number + 1] * 4 for number in range(9)], shard_tokens=4)
        return folder

    def test_every_document_comes_back_in_any_order(self, many: Path):
        shards = ShardSet.open(many, max_mapped=2)
        assert len(shards.manifest.shards) == 9
        assert mapped(many) == 0
        for number in (0, 8, 0, 4, 4, 7, 1, 0, 8):
            assert shards.document(number).tolist() == [number + 1] * 4
            assert mapped(many) <= 2
        assert lengths_of(shards).tolist() == [4] * 9

    def test_the_one_used_longest_ago_goes(self, many: Path):
        shards = ShardSet.open(many, max_mapped=2)
        for number in (0, 1, 0, 2):
            shards.document(number)
        assert mapped(many, "00000.arrow") == 1
        assert mapped(many, "00001.arrow") == 0

    def test_a_view_outlives_its_place(self, many: Path):
        shards = ShardSet.open(many, max_mapped=1)
        view = shards.document(3)
        for number in range(9):
            shards.document(number)
        assert view.tolist() == [4] * 4
        assert mapped(many) == 2


def mapped(folder: Path, file: str = ".arrow") -> int:
    """The folder's files that this process has mapped. One may have several parts, each with its own advice."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[-1] for line in lines if str(folder) in line and line.endswith(file)})


def test_histogram_counts_powers_of_two():
    assert length_histogram([1, 2, 3, 4, 7, 8, 1 << 40]) == {"2^0": 1, "2^1": 2, "2^2": 2, "2^3": 1, "2^40": 1}
    assert length_histogram([]) == {}


class TestStaging:
    def test_a_folder_appears_at_once_or_not_at_all(self, tmp_path: Path):
        target = tmp_path / "new" / "folder"

        def interrupted() -> None:
            with staged_folder(target) as staging:
                (staging / "file").write_text("half")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert list(target.parent.iterdir()) == []
        with staged_folder(target) as staging:
            (staging / "file").write_text("whole")
            assert not target.exists()
        assert [p.name for p in target.parent.iterdir()] == ["folder"]

    def test_a_failed_replacement_leaves_the_old_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        target = tmp_path / "folder"
        target.mkdir()
        (target / "old").touch()
        with pytest.raises(ValueError, match="stop"), staged_folder(target, replace=True):
            raise ValueError("stop")
        assert [p.name for p in target.iterdir()] == ["old"]

        rename = Path.rename

        def fail_last(path: Path, new: Path) -> Path:
            if ".partial." in path.name:  # the old folder has already been moved aside
                raise OSError(5, "Input/output error")
            return rename(path, new)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", fail_last)
            with pytest.raises(DataError, match="could not be written"), staged_folder(target, replace=True):
                pass
        assert [p.name for p in target.iterdir()] == ["old"]
        with staged_folder(target, replace=True) as staging:
            (staging / "new").touch()
        assert [p.name for p in target.iterdir()] == ["new"]
        assert [p.name for p in tmp_path.iterdir()] == ["folder"]

    def test_what_a_killed_process_left_is_removed(self, tmp_path: Path):
        import socket

        dead = tmp_path / f".folder.partial.{socket.gethostname()}.{2**22 + 1}"
        other_host = tmp_path / ".folder.partial.elsewhere.1"
        for folder in (dead, other_host):
            folder.mkdir()
        with staged_folder(tmp_path / "folder"):
            pass
        assert not dead.exists()
        assert other_host.exists()

    def test_a_full_disk_is_explained_and_leaves_nothing(self, tokenizer: Tokenizer, tmp_path: Path):
        """A file size limit makes the kernel refuse a write in the middle of a shard, as a full disk would."""
        target = tmp_path / "folder"
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            with (
                pytest.raises(DataError, match=r"folder could not be written") as caught,
                staged_folder(target) as staging,
            ):
                write(staging, tokenizer, [[5] * 30_000])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert "No partial output remains" in str(caught.value)
        assert "file size limit" in str(caught.value)
        assert list(tmp_path.iterdir()) == []

    def test_a_file_is_replaced_in_one_stroke(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        path = tmp_path / "a.model"
        write_atomically(path, b"old")

        def fail(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", fail)
        with pytest.raises(DataError, match=r"No space left on device.*\nThe disk is full"):
            write_atomically(path, b"new")
        assert path.read_bytes() == b"old"
        assert [p.name for p in tmp_path.iterdir()] == ["a.model"]
