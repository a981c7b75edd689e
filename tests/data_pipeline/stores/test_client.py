"""URLs, and objects as files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.stores import client
from data_pipeline.stores.client import list_names, list_objects, remove, size_of, upload, write_object
from data_pipeline.stores.urls import ObjectPath, below, locate
from longctx.errors import DataError
from tests.data_pipeline.stores.s3_server import Store


def place(spec: str) -> ObjectPath:
    found = locate(spec)
    assert isinstance(found, ObjectPath)
    return found


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("http://host/data", "http:// is not known. Try s3://BUCKET"),
        ("s3://", "is not a valid bucket name"),
        ("s3:///data", "is not a valid bucket name"),
        ("s3://Bucket/data", "is not a valid bucket name"),
        ("s3://bucket/a//b", "must not contain empty names"),
        ("s3://bucket/../b", "must not contain empty names"),
        ("s3://bucket/data?versionId=1", "'\\?'"),
        ("s3://bucket/*.jsonl", "patterns with --include"),
        ("s3://bucket/a\nb", "must not contain"),
        ("file://host/data", "another host. Try file:///data"),
    ],
)
def test_a_url_that_names_no_place_is_refused(spec: str, words: str):
    with pytest.raises(DataError, match=words):
        locate(spec)


def test_a_key_in_a_url_is_refused_and_not_shown():
    with pytest.raises(DataError, match="in the environment") as refusal:
        locate("s3://AKIA:wJalrXUtn@bucket/data")
    assert "wJalr" not in str(refusal.value)


def test_a_file_url_is_a_path():
    assert locate("file:///data/my%20corpus") == Path("/data/my corpus")
    assert locate("file://localhost/data") == Path("/data")
    assert locate("runs/data") == Path("runs/data")


NAMES = st.text("ab.-_ é", min_size=1, max_size=5).filter(lambda name: name.strip(".") == name)


@given(st.lists(NAMES, max_size=4))
def test_names_are_appended_and_read_back(names: list[str]):
    path = place("s3://bucket/")
    spec = "s3://bucket"
    for name in names:
        path, spec = path / name, below(spec, name)
    assert str(path) == spec
    assert place(str(path)) == path
    assert path.name == (["bucket", *names])[-1]


def test_bytes_come_back_whatever_the_size(store: Store, tmp_path: Path):
    for size in (0, 1, 100_000, (5 << 20) + 3, (17 << 20) + 1):
        content = os.urandom(size)
        (tmp_path / "file").write_bytes(content)
        upload(tmp_path / "file", place("s3://corpora/a/b.bin"))
        assert store.objects["corpora/a/b.bin"] == content
        assert place("s3://corpora/a/b.bin").read_bytes() == content
        assert size_of(place("s3://corpora/a/b.bin")) == size
        with place("s3://corpora/a/b.bin").open() as file:
            file.seek(size // 2)
            assert file.read(10) == content[size // 2 :][:10]


def test_no_name_changes_the_bytes(store: Store, tmp_path: Path):
    (tmp_path / "file").write_bytes(b"as it is")
    for name in ("x.zst", "x.gz", "x.bz2", "x.arrow", "x"):
        upload(tmp_path / "file", place(f"s3://corpora/{name}"))
        assert store.objects[f"corpora/{name}"] == b"as it is" == place(f"s3://corpora/{name}").read_bytes()


def test_folders_are_listed(store: Store):
    for name in ("a/x", "a/b/y", "ab/z"):
        write_object(place(f"s3://corpora/{name}"), name.encode())
    assert list_objects(place("s3://corpora/a")) == {"x": 3, "b/y": 5}
    assert list_names(place("s3://corpora")) == ["a", "ab"]
    assert list_objects(place("s3://corpora/none")) == {}
    assert place("s3://corpora/a").is_dir()
    assert not place("s3://corpora/a/x").is_dir()
    remove(place("s3://corpora/a/x"))
    remove(place("s3://corpora/a/x"))
    assert not place("s3://corpora/a/x").exists()


def test_what_a_store_refuses_is_explained_without_secrets(store: Store):
    with pytest.raises(FileNotFoundError):
        place("s3://corpora/none").read_bytes()
    with pytest.raises(DataError, match=r"s3://nowhere/x .*NO_SUCH_BUCKET"):
        write_object(place("s3://nowhere/x"), b"x")
    store.fault = lambda method, path: "AccessDenied"
    for action in (place("s3://corpora/x").read_bytes, lambda: list_objects(place("s3://corpora/a"))):
        with pytest.raises(DataError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") as refusal:
            action()
        assert "of-the-test" not in str(refusal.value)


def test_a_store_that_nobody_answers_for_is_named(store: Store, monkeypatch: pytest.MonkeyPatch):
    client._connected.cache_clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(DataError, match=r"s3://lonely/x cannot be reached.*\n.*AWS_ENDPOINT_URL"):
        size_of(place("s3://lonely/x"))


def test_nor_does_google_answer(monkeypatch: pytest.MonkeyPatch):
    client._connected.cache_clear()
    monkeypatch.setattr(client, "_GCS_RETRY_SECONDS", 1)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    with pytest.raises(DataError, match="GOOGLE_APPLICATION_CREDENTIALS") as refusal:
        size_of(place("gs://lonely/x"))
    client._connected.cache_clear()
    first, second = str(refusal.value).splitlines()
    assert first.startswith("gs://lonely/x cannot be reached: ")
    assert "Could not connect to server" in first
    assert len(first) < 200
    assert "AWS" not in second


def test_a_reading_that_breaks_off_goes_on(store: Store):
    store.objects["corpora/x"] = os.urandom(100_000)
    faults = iter(["cut"])
    store.fault = lambda method, path: next(faults, "") if method == "GET" else ""
    assert place("s3://corpora/x").read_bytes() == store.objects["corpora/x"]
    store.fault = lambda method, path: "cut" if method == "GET" else ""
    with pytest.raises(DataError, match="s3://corpora/x cannot be reached"):
        place("s3://corpora/x").read_bytes()
