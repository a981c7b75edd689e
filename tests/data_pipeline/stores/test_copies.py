"""Shard folders in a store, read through a copy in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.inspect import decode_rows, describe, find_problems
from data_pipeline.loader import build_loader, build_validation_loader
from data_pipeline.mixture.description import describe_mixture
from data_pipeline.prepare.shard_removal import remove_shards
from data_pipeline.shards import local_copies
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_verification import open_validated
from data_pipeline.texts import read_texts
from longctx.errors import DataError
from tests.data_pipeline.stores.conftest import fill
from tests.data_pipeline.stores.s3_server import Store

URL = "s3://corpora/data"


@pytest.fixture
def remote(store: Store, built: Path) -> Store:
    fill(store, built, "corpora/data")
    return store


def gets(store: Store, ending: str = ".arrow") -> dict[str, int]:
    """How often each object was read."""
    return {path: count for path, count in store.requests.items() if path.startswith("GET") and path.endswith(ending)}


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_shards_are_fetched_when_they_are_used_and_once(remote: Store, built: Path):
    shards, local = ShardSet.open(URL), ShardSet.open(built)
    assert not gets(remote)
    assert shards.copy is not None
    last = local.num_documents - 1
    assert np.array_equal(shards.document(last), local.document(last))
    assert len(gets(remote)) == 1
    for number in range(local.num_documents):
        assert np.array_equal(shards.document(number), local.document(number))
        assert shards.name(number) == local.name(number)
    assert shards.tokenizer().fingerprint == local.tokenizer().fingerprint
    again = ShardSet.open(URL)
    assert np.array_equal(again.lengths_of(np.arange(last)), local.lengths_of(np.arange(last)))
    assert set(gets(remote).values()) == {1}
    assert files(again.folder) == {path.name for path in built.iterdir() if path.is_file()}


def test_everything_that_reads_a_folder_reads_one_in_a_store(remote: Store, built: Path):
    assert describe(URL, seq_len=512).packing == describe(built, seq_len=512).packing
    assert list(decode_rows(URL, seq_len=256, rows=2)) == list(decode_rows(built, seq_len=256, rows=2))
    assert list(read_texts(f"{URL}/validation")) == list(read_texts(built / "validation"))
    sizes = {"seq_len": 256, "rows_per_step": 2}
    there, here = build_loader(URL, **sizes), build_loader(built, **sizes)
    for _ in range(4):
        assert next(there).tokens.equal(next(here).tokens)
    # A checkpoint goes on with either.
    here.load_state_dict(there.state_dict())
    assert next(there).tokens.equal(next(here).tokens)
    assert len(build_validation_loader(f"{URL}/validation", seq_len=256)) > 0
    assert open_validated(URL, whole=True).num_documents == ShardSet.open(built).num_documents


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("harm", "name"),
    [
        ("flip", "00000.arrow"),
        ("cut", "00000.arrow"),
        ("remove", "00000.arrow"),
        ("flip", "00000.sums"),
        ("remove", "00000.sums"),
        ("flip", "manifest.json"),
        ("flip", "tokenizer.model"),
        ("cut", "tokenizer.model"),
        ("remove", "tokenizer.model"),
    ],
)
def test_a_damaged_or_missing_object_is_refused_by_name(remote: Store, name: str, harm: str):
    content = remote.objects[f"corpora/data/{name}"]
    if harm == "flip":
        middle = len(content) // 2
        remote.objects[f"corpora/data/{name}"] = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    elif harm == "cut":
        remote.objects[f"corpora/data/{name}"] = content[: len(content) // 2]
    else:
        del remote.objects[f"corpora/data/{name}"]
    pattern = rf"s3://corpora/data(/{name}| is not a shard folder|: the tokenizer)"
    if (name, harm) == ("tokenizer.model", "remove"):
        pattern = "tokenizer"

    def read() -> None:
        shards = ShardSet.open(URL)
        shards.document(0)
        shards.tokenizer()

    with pytest.raises(DataError, match=pattern):
        read()
    problems = find_problems(URL)
    assert problems
    assert any("s3://corpora/data" in problem for problem in problems)
    assert not any(".verify-" in problem for problem in problems)
    # Nothing half-written has the name of a shard.
    for path in local_copies.copies_folder().rglob("*.arrow"):
        assert path.read_bytes() == remote.objects[f"corpora/data/{path.name}"]
    # Mended, it goes on.
    remote.objects[f"corpora/data/{name}"] = content
    assert len(ShardSet.open(URL).document(0))
    assert find_problems(URL) == []


def test_verify_reads_the_store_and_not_the_cache(remote: Store, built: Path):
    open_validated(URL, whole=True)
    before = gets(remote)
    assert find_problems(URL) == []
    assert all(count > before.get(path, 0) for path, count in gets(remote).items())
    remote.objects["corpora/data/00099.arrow"] = b"left over"
    assert find_problems(URL) == ["s3://corpora/data/00099.arrow is not listed in the manifest."]
    assert not list(local_copies.copies_folder().glob(".verify-*"))


def test_a_download_that_breaks_off_leaves_nothing_and_goes_on(remote: Store, built: Path):
    shards = ShardSet.open(URL)
    remote.fault = lambda method, path: "cut" if method == "GET" and path.endswith(".arrow") else ""
    with pytest.raises(DataError, match=r"00000.arrow cannot be reached"):
        shards.document(0)
    assert not [name for name in files(shards.folder) if name.endswith((".arrow", ".tmp"))]
    remote.fault = lambda method, path: ""
    assert np.array_equal(shards.document(0), ShardSet.open(built).document(0))


def test_data_that_is_replaced_gets_a_copy_of_its_own(remote: Store, built: Path):
    first = ShardSet.open(URL)
    fill(remote, built / "validation", "corpora/data")
    second = ShardSet.open(URL)
    assert second.folder != first.folder
    assert second.manifest.split == "validation"
    # The first is no longer there to be fetched.
    with pytest.raises(DataError, match="is damaged"):
        first.document(0)


def test_a_shard_left_out_afterwards_has_no_other_fetched_again(remote: Store):
    before = ShardSet.open(URL)
    bad = before.manifest.shards[0]
    remove_shards(URL, [bad.file])
    after = ShardSet.open(URL)
    assert after.num_documents == before.num_documents - bad.documents
    assert [after.name(n) for n in range(3)] == [before.name(bad.documents + n) for n in range(3)]
    after.lengths_of(np.arange(after.num_documents))
    assert set(gets(remote).values()) == {1}


def test_a_disk_without_room_is_named(remote: Store, monkeypatch: pytest.MonkeyPatch):
    shards = ShardSet.open(URL)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(local_copies.shutil, "disk_usage", lambda path: usage._replace(free=(1 << 28) + 10))
    with pytest.raises(DataError, match=r"s3://corpora/data needs 0.0 GB more .*\n.*data.cache or LONGCTX_CACHE"):
        shards.document(0)
    with pytest.raises(DataError, match=r"data\.cache or LONGCTX_CACHE"):
        shards.copy.check_free_space()


def test_a_cache_can_be_named(remote: Store, tmp_path: Path):
    assert ShardSet.open(URL, cache=str(tmp_path / "large")).folder.parent == tmp_path / "large"


def test_threads_and_processes_fetch_each_shard_once(remote: Store, built: Path):
    code = (
        "import sys; from data_pipeline.shards.reader import ShardSet\n"
        "shards = ShardSet.open(sys.argv[1])\n"
        "print(sum(len(shards.document(number)) for number in range(shards.num_documents)))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, URL], stdout=subprocess.PIPE, env=os.environ, text=True)
    shards = ShardSet.open(URL)
    threads = [threading.Thread(target=shards.document, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert process.communicate()[0].strip() == str(ShardSet.open(built).num_tokens)
    assert set(gets(remote).values()) == {1}
    assert not [name for name in files(shards.folder) if name.endswith((".tmp", ".lock"))]


def test_what_a_killed_process_left_is_removed(remote: Store):
    shards = ShardSet.open(URL)
    leftover = shards.folder / ".00000.arrow.elsewhere.1.tmp"
    leftover.write_bytes(b"half")
    shards.document(0)
    assert not leftover.exists()


def test_a_copy_that_was_cut_short_is_fetched_again(remote: Store, built: Path):
    shards = ShardSet.open(URL)
    shards.document(0)
    os.truncate(shards.folder / "00000.arrow", 100)
    assert np.array_equal(ShardSet.open(URL).document(0), ShardSet.open(built).document(0))


def test_a_plain_folder_is_read_where_it_lies(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))
    for spec in (built, str(built), f"file://{built}"):
        shards = ShardSet.open(spec)
        assert shards.copy is None
        assert shards.folder == built
    assert not (tmp_path / "cache").exists()


def test_a_mixture_may_have_sources_in_a_store(remote: Store, built: Path, tmp_path: Path):
    table = '[[sources]]\nname = "{name}"\npath = "{path}"\nweight = 1\n'
    options = {"seq_len": 256, "rows_per_step": 2}
    found = []
    for second in (str(built), URL):
        path = tmp_path / "mixture.toml"
        path.write_text(table.format(name="first", path=built) + table.format(name="second", path=second))
        loader, validation = build_loader(path, **options), build_validation_loader(path, seq_len=256, held_out=True)
        rows = [next(loader).tokens.tolist() for _ in range(8)] + [batch.tokens.tolist() for batch in validation]
        # A run goes on wherever its data lies by now.
        found.append((rows, loader.state_dict(), list(decode_rows(path, seq_len=256, rows=3))))
        assert find_problems(path) == []
    assert found[0][:2] == found[1][:2]
    assert len(found[0][2]) == len(found[1][2]) == 3
    assert describe_mixture(path).sources[1].folder == URL
    path.write_text(table.format(name="first", path="s3://no..such//bucket"))
    with pytest.raises(DataError, match="s3://no"):
        build_loader(path, **options)
    path.write_text(table.format(name="first", path="s3://corpora/nothing"))
    with pytest.raises(DataError, match="corpora/nothing"):
        build_loader(path, **options)
