"""Shards that are left out of a folder afterwards: a manifest as a build without them would have written it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_pipeline.inspect import describe, find_problems
from data_pipeline.loader import build_loader
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.publish import pack_folder
from data_pipeline.prepare.shard_removal import remove_shards
from data_pipeline.prepare.sources import TextSource
from data_pipeline.shards.manifest import VALIDATION_FOLDER, Manifest, hash_json
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_verification import open_validated
from longctx.errors import ConfigError, DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.lengths import lengths_of, read_all, write_lengths
from tests.data_pipeline.prepare.parts.conftest import content

BAD = "00001.arrow"


def rebuild(source: TextSource, tokenizer: Tokenizer, folder: Path) -> None:
    build_shards(source, tokenizer, folder, validation_fraction=0.2, shard_tokens=20_000, overwrite=True)


@pytest.mark.parametrize("state", ["whole", "damaged", "cut short", "missing"])
def test_the_others_are_read_as_ever(damaged: Path, state: str):
    before, shards = content(damaged), ShardSet.open(damaged)
    first = shards.manifest.shards[0].documents
    behind = first + shards.manifest.shards[1].documents
    kept = [*range(first), *range(behind, shards.num_documents)]
    names = [shards.name(number) for number in kept]
    tokens = [shards.document(number).tolist() for number in kept]
    path = damaged / BAD
    if state == "damaged":
        path.write_bytes(bytes(path.stat().st_size))
    elif state == "cut short":
        path.write_bytes(b"")
    elif state == "missing":
        path.unlink()
        path.with_suffix(".sums").unlink()
    found = remove_shards(damaged, [BAD])
    entry = shards.manifest.shards[1]
    assert (found.shards, found.documents, found.tokens) == ((BAD,), entry.documents, entry.tokens)
    after = open_validated(damaged, whole=True)
    assert [after.name(number) for number in range(after.num_documents)] == names
    assert [after.document(number).tolist() for number in range(after.num_documents)] == tokens
    assert find_problems(damaged) == []
    next(build_loader(damaged, seq_len=512, rows_per_step=1))
    if state == "whole":
        changed = {name for name, raw in content(damaged).items() if before[name] != raw}
        assert changed == {"manifest.json"}


def test_the_manifest_counts_what_is_left(damaged: Path):
    before = Manifest.load(damaged)
    remove_shards(damaged, [BAD])
    with pytest.raises(ConfigError, match=f"{BAD} is already left out of "):
        remove_shards(damaged, [BAD])
    remove_shards(damaged, ["00000.arrow"])
    after, shards = Manifest.load(damaged), ShardSet.open(damaged)
    assert after.shards == [entry for entry in before.shards if entry.file not in ("00000.arrow", BAD)]
    assert (after.documents, after.tokens) == (shards.num_documents, int(lengths_of(shards).sum()))
    assert sum(after.length_histogram.values()) == after.documents
    assert after.bytes_per_token == pytest.approx(before.bytes_per_token, rel=1e-3)
    assert (after.sources, after.skipped, after.tokenizer) == (before.sources, before.skipped, before.tokenizer)
    assert after.options == {**before.options, "without": ["00000.arrow", BAD]}
    assert after.hash != before.hash
    assert describe(damaged).documents == after.documents


def test_held_out_documents_are_a_folder_of_their_own(tokenizer: Tokenizer, tmp_path: Path):
    held_out = tmp_path / "shards" / VALIDATION_FOLDER
    write_lengths(tmp_path / "shards", tokenizer, [500, 500], shard_tokens=500)
    write_lengths(held_out, tokenizer, [500, 500], shard_tokens=500)
    before = Manifest.load(tmp_path / "shards").hash
    remove_shards(held_out, [BAD])
    assert Manifest.load(tmp_path / "shards").hash == before
    assert ShardSet.open(held_out).num_documents == 1
    assert find_problems(tmp_path / "shards") == []


def test_a_checkpoint_of_the_folder_before_is_refused(damaged: Path):
    loader = build_loader(damaged, seq_len=512, rows_per_step=1)
    next(loader)
    state = loader.state_dict()
    remove_shards(damaged, [BAD])
    with pytest.raises(DataError, match=r"manifest_hash.*\n.*run\.start_from"):
        build_loader(damaged, seq_len=512, rows_per_step=1).load_state_dict(state)


def test_building_again_writes_a_lost_shard_bit_for_bit(damaged: Path, source: TextSource, tokenizer: Tokenizer):
    whole, read = content(damaged), read_all(ShardSet.open(damaged))
    (damaged / BAD).unlink()
    rebuild(source, tokenizer, damaged)
    assert content(damaged) == whole
    remove_shards(damaged, [BAD])
    with pytest.raises(DataError, match="was built from another options"):
        build_shards(source, tokenizer, damaged, validation_fraction=0.2, shard_tokens=20_000)
    rebuild(source, tokenizer, damaged)
    assert content(damaged) == whole
    assert read_all(ShardSet.open(damaged)) == read


@pytest.mark.parametrize("name", ["00001", "1", "../00001.arrow", "/etc/passwd", "00001.sums", "", "x" * 5000])
def test_what_is_no_shard_is_refused_with_the_nearest(damaged: Path, name: str):
    before = content(damaged)
    with pytest.raises(ConfigError, match=r"is not a shard in .*Did you mean 000\d\d\.arrow\?"):
        remove_shards(damaged, [name])
    assert content(damaged) == before


def test_all_shards_are_refused(damaged: Path):
    with pytest.raises(ConfigError, match=r"would remove all documents from "):
        remove_shards(damaged, [entry.file for entry in Manifest.load(damaged).shards])


def test_another_lost_shard_is_named(damaged: Path):
    before = (damaged / "manifest.json").read_bytes()
    (damaged / "00000.arrow").unlink()
    with pytest.raises(DataError, match=r"00000\.arrow is missing"):
        remove_shards(damaged, [BAD])
    assert (damaged / "manifest.json").read_bytes() == before


def test_a_packed_folder_is_refused(damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    pack_folder(damaged, tmp_path / "packed", overwrite=False, say=lambda _: None)
    with pytest.raises(DataError, match="is packed"):
        remove_shards(tmp_path / "packed", [BAD])
    # One that is made without it is read like any other.
    remove_shards(damaged, [BAD])
    pack_folder(damaged, tmp_path / "again", overwrite=False, say=lambda _: None)
    assert read_all(ShardSet.open(tmp_path / "again")) == read_all(ShardSet.open(damaged))
    assert find_problems(tmp_path / "again") == []


def test_a_manifest_that_cannot_be_written_stays_as_it_was(damaged: Path, monkeypatch: pytest.MonkeyPatch):
    before = content(damaged)

    def refuse(*_: object, **__: object) -> None:
        raise DataError("no space")

    monkeypatch.setattr("data_pipeline.prepare.shard_removal.write_atomically", refuse)
    with pytest.raises(DataError, match="no space"):
        remove_shards(damaged, [BAD])
    assert content(damaged) == before


@pytest.mark.parametrize("names", ["all", [7], ["../x.arrow"], {"00001.arrow": 1}])
def test_a_list_of_names_that_somebody_made_up_is_refused(damaged: Path, names: object):
    body = json.loads((damaged / "manifest.json").read_text())
    del body["hash"]
    body["options"]["without"] = names
    (damaged / "manifest.json").write_text(json.dumps({**body, "hash": hash_json(body)}))
    with pytest.raises(DataError, match=r"options\.without.* is not a (list|name of a shard)"):
        ShardSet.open(damaged)


def test_a_list_of_an_earlier_release_is_not_read_over_in_silence(damaged: Path, tokenizer: Tokenizer):
    (damaged / "exclusions.json").write_text("{}")
    with pytest.raises(DataError, match=r"exclusions\.json lists excluded shards, which this release does not support"):
        ShardSet.open(damaged)
    (problem,) = find_problems(damaged)
    assert "exclusions.json" in problem
    with pytest.raises(DataError, match=r"exclusions\.json"):
        remove_shards(damaged, [BAD])
    with pytest.raises(DataError, match=r"exclusions\.json"):
        pack_folder(damaged, damaged.parent / "packed", overwrite=False, say=print)
