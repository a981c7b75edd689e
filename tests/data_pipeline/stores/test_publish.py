"""Builds into a store, and packed folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash

from data_pipeline.inspect import describe, find_problems
from data_pipeline.prepare import publish
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.parts.build_engine import BuildContext
from data_pipeline.prepare.publish import pack_folder, send, transfer_folder
from data_pipeline.prepare.sources import TextSource
from data_pipeline.shards import local_copies
from data_pipeline.shards.manifest import hash_json
from data_pipeline.shards.reader import ShardSet, shard_tokens
from data_pipeline.stores.urls import ObjectPath
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from tests.bounded import refusal, zstd_bomb
from tests.data_pipeline.prepare.parts.conftest import content
from tests.data_pipeline.stores.conftest import fill
from tests.data_pipeline.stores.s3_server import Store

URL = "s3://corpora/out"
PLACE = ObjectPath("s3", "corpora", "out")
OPTIONS = {"validation_fraction": 0.2, "shard_tokens": 20_000}


def say(message: str) -> None:
    """Nobody listens."""


def puts(store: Store) -> list[str]:
    """Objects that were written, in order."""
    written = [path.removeprefix("POST ") for path in store.requests if path.startswith(("PUT", "POST"))]
    return [path.removeprefix("PUT ").removeprefix("corpora/out/") for path in written]


def break_at(store: Store, ending: str) -> None:
    """From now on the store refuses to take objects of this name."""
    store.fault = lambda method, path: "AccessDenied" if method in ("PUT", "POST") and path.endswith(ending) else ""


def test_a_build_into_a_store_sends_what_a_build_here_makes(
    store: Store, source: TextSource, tokenizer: Tokenizer, built: Path
):
    report = build_shards(source, tokenizer, URL, **OPTIONS)
    assert store.under("corpora/out") == content(built)
    assert (report.output, report.up_to_date) == (URL, False)
    assert report.validation is not None
    assert str(report.validation.folder) == f"{URL}/validation"
    # Nobody can read it before all of it is there.
    order = list(dict.fromkeys(puts(store)))
    assert order[-1] == "manifest.json"
    assert order.index("validation/manifest.json") < order.index("00000.arrow")
    assert not transfer_folder(PLACE).exists()
    store.requests.clear()
    again = build_shards(source, tokenizer, URL, **OPTIONS)
    assert again.up_to_date
    assert (again.training, again.validation) == (report.training, report.validation)
    assert not puts(store)


def test_another_recipe_is_refused_unless_it_shall_replace(
    store: Store, source: TextSource, tokenizer: Tokenizer, built: Path
):
    build_shards(source, tokenizer, URL, **OPTIONS)
    with pytest.raises(DataError, match="built from another options"):
        build_shards(source, tokenizer, URL, validation_fraction=0, shard_tokens=20_000)
    build_shards(source, tokenizer, URL, validation_fraction=0, shard_tokens=1 << 20, overwrite=True)
    # Nothing of the first one is left: not its shards with higher numbers, nor its split.
    assert set(store.under("corpora/out")) == {"00000.arrow", "00000.sums", "manifest.json", "tokenizer.model"}
    assert find_problems(URL) == []


def test_a_sending_that_was_interrupted_goes_on(
    store: Store, source: TextSource, tokenizer: Tokenizer, built: Path, monkeypatch: pytest.MonkeyPatch
):
    break_at(store, "/out/00001.arrow")
    with pytest.raises(DataError, match=r"s3://corpora/out/00001.arrow cannot be reached"):
        build_shards(source, tokenizer, URL, **OPTIONS)
    assert "manifest.json" not in store.under("corpora/out")
    with pytest.raises(DataError, match="is not a shard folder"):
        ShardSet.open(URL)
    store.fault = lambda method, path: ""
    store.requests.clear()
    # It was built: no document is encoded again.
    monkeypatch.setattr(BuildContext, "carry_out", None)
    build_shards(source, tokenizer, URL, **OPTIONS)
    assert store.under("corpora/out") == content(built)
    assert "00000.arrow" not in puts(store)
    assert not any(name.startswith("validation/") for name in puts(store))


def test_an_object_that_was_lost_meanwhile_is_sent_again(store: Store, built: Path, tmp_path: Path):
    folder = Path(shutil.copytree(built, tmp_path / "folder"))
    break_at(store, "/out/tokenizer.model")
    with pytest.raises(DataError, match="cannot be reached"):
        send(folder, PLACE, overwrite=False, say=say)
    store.fault = lambda method, path: ""
    store.objects["corpora/out/00000.arrow"] = b"cut short"
    send(folder, PLACE, overwrite=False, say=say)
    assert store.under("corpora/out") == content(built)


def test_foreign_objects_are_not_touched(store: Store, source: TextSource, tokenizer: Tokenizer, built: Path):
    store.objects["corpora/out/thesis.pdf"] = b"precious"
    for overwrite in (False, True):
        with pytest.raises(DataError, match=r"output=s3://corpora/out contains thesis.pdf"):
            build_shards(source, tokenizer, URL, overwrite=overwrite, **OPTIONS)
    assert store.under("corpora/out") == {"thesis.pdf": b"precious"}


def test_a_store_that_lost_a_shard_is_not_up_to_date(store: Store, source: TextSource, tokenizer: Tokenizer):
    build_shards(source, tokenizer, URL, **OPTIONS)
    del store.objects["corpora/out/00001.arrow"]
    with pytest.raises(DataError, match=r"00001.arrow has no bytes, expected"):
        build_shards(source, tokenizer, URL, **OPTIONS)


def test_two_of_one_host_do_not_send_the_same(store: Store, built: Path, tmp_path: Path):
    folder = Path(shutil.copytree(built, tmp_path / "folder"))
    with publish._transfer_lock(folder, PLACE), pytest.raises(DataError, match="being sent by another process"):
        send(folder, PLACE, overwrite=False, say=say)


class TestPacked:
    @pytest.fixture
    def packed(self, store: Store, built: Path, tmp_path: Path) -> Path:
        """The folder packed; no store takes part, but the test has a cache of its own."""
        pack_folder(built, tmp_path / "packed", overwrite=False, say=say)
        return tmp_path / "packed"

    def test_it_is_smaller_and_reads_the_same(self, packed: Path, built: Path):
        sizes = [sum(path.stat().st_size for path in folder.rglob(f"*.{end}")) for folder, end in
                 ((packed, "zst"), (built, "arrow"))]  # fmt: skip
        assert sizes[0] < 0.8 * sizes[1]
        for split in (".", "validation"):
            there, here = ShardSet.open(packed / split), ShardSet.open(built / split)
            # The same data to a checkpoint.
            assert there.manifest.hash == here.manifest.hash
            assert all(np.array_equal(there.document(n), here.document(n)) for n in range(here.num_documents))
            assert there.copy is not None
            for entry in here.manifest.shards:
                assert (there.folder / entry.file).read_bytes() == (built / split / entry.file).read_bytes()
        assert describe(packed).tokens == describe(built).tokens
        assert find_problems(packed) == []

    def test_one_in_a_store_too(self, store: Store, built: Path):
        size = pack_folder(built, URL, overwrite=False, say=say)
        assert size == sum(len(body) for name, body in store.under("corpora/out").items() if name.endswith(".zst"))
        assert not any(name.endswith(".arrow") for name in store.under("corpora/out"))
        there, here = ShardSet.open(URL), ShardSet.open(built)
        assert all(np.array_equal(there.document(n), here.document(n)) for n in range(here.num_documents))
        assert find_problems(URL) == []
        assert not transfer_folder(PLACE).exists()

    @pytest.mark.parametrize("harm", ["flip", "cut", "remove", "grow", "swap"])
    def test_damage_is_named_before_anything_is_read(self, packed: Path, harm: str):
        path = packed / "00001.arrow.zst"
        raw = path.read_bytes()
        middle = len(raw) // 2
        changed = {
            "flip": raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :],
            "cut": raw[:middle],
            "grow": raw + raw,
            "swap": (packed / "00000.arrow.zst").read_bytes(),
        }
        path.unlink()
        if harm in changed:
            path.write_bytes(changed[harm])
        shards = ShardSet.open(packed)
        with pytest.raises(DataError, match=r"packed/00001\.arrow\.zst is (damaged|missing)"):
            shard_tokens(shards, 1)
        assert not list(local_copies.copies_folder().rglob("00001.arrow"))
        assert any("00001.arrow.zst" in problem for problem in find_problems(packed))

    def test_one_that_becomes_far_more_than_its_shard_is_refused(self, packed: Path):
        """Gigabytes in some kilobytes, under the right checksum."""
        raw = zstd_bomb(4 << 30)
        (packed / "00001.arrow.zst").write_bytes(raw)
        body = json.loads((packed / "packed.json").read_text())
        del body["hash"]
        body["shards"][1] |= {"bytes": len(raw), "xxh3_128": xxhash.xxh3_128_hexdigest(raw)}
        (packed / "packed.json").write_text(json.dumps(body | {"hash": hash_json(body)}))
        message = refusal(lambda: shard_tokens(ShardSet.open(packed), 1))
        assert "00001.arrow.zst is damaged: its checksum does not match manifest.json" in message
        assert not list(local_copies.copies_folder().rglob("00001.arrow*"))

    @pytest.mark.parametrize(
        "change",
        [
            {"file": "../00000.arrow.zst"},
            {"file": 3},
            {"shard": "00009.arrow"},
            {"bytes": "4"},
            {"xxh3_128": "no"},
            {"other": 1},
        ],
    )
    def test_a_list_that_leads_elsewhere_is_refused(self, packed: Path, change: dict):
        body = json.loads((packed / "packed.json").read_text())
        del body["hash"]
        body["shards"][0] |= change
        (packed / "packed.json").write_text(json.dumps(body | {"hash": hash_json(body)}))
        with pytest.raises(DataError, match=r"packed\.json"):
            ShardSet.open(packed)
        assert "packed.json" in find_problems(packed)[0]

    def test_a_list_that_was_edited_or_is_of_another_folder_is_refused(self, packed: Path):
        raw = (packed / "packed.json").read_text()
        (packed / "packed.json").write_text(raw.replace('"bytes": ', '"bytes": 1'))
        with pytest.raises(DataError, match="was changed"):
            ShardSet.open(packed)
        (packed / "packed.json").write_text((packed / "validation/packed.json").read_text())
        with pytest.raises(DataError, match="does not match the manifest"):
            ShardSet.open(packed)

    def test_what_is_packed_is_checked_first(self, damaged: Path, tmp_path: Path):
        with pytest.raises(DataError, match="from 1 to 22"):
            pack_folder(damaged, tmp_path / "out", level=0, overwrite=False, say=say)
        raw = bytearray((damaged / "00001.arrow").read_bytes())
        raw[len(raw) // 2] ^= 1
        (damaged / "00001.arrow").write_bytes(raw)
        with pytest.raises(DataError, match=r"00001\.arrow is missing or damaged"):
            pack_folder(damaged, tmp_path / "out", overwrite=False, say=say)
        assert not (tmp_path / "out").exists()

    def test_an_output_that_is_there_is_replaced_when_asked(self, packed: Path, built: Path):
        with pytest.raises(DataError, match="already exists"):
            pack_folder(built, packed, overwrite=False, say=say)
        pack_folder(built, packed, overwrite=True, say=say)
        with pytest.raises(DataError, match="is already packed"):
            pack_folder(packed, packed, overwrite=True, say=say)


def test_a_folder_sent_by_other_means_is_read_too(store: Store, built: Path, tmp_path: Path):
    pack_folder(built, tmp_path / "packed", overwrite=False, say=say)
    fill(store, tmp_path / "packed", "corpora/copied")
    assert find_problems("s3://corpora/copied") == []
