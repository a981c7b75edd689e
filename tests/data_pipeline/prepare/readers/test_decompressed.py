"""Compressed files give every byte of all their frames, and before damage every byte that can be decompressed."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.prepare.readers import decompressed
from data_pipeline.prepare.readers.decompressed import Decompressed
from data_pipeline.prepare.source_items import FileContentError
from data_pipeline.prepare.sources import open_source

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
SKIPPABLE = struct.pack("<II", 0x184D2A53, 5) + b"hello"


def new_frame(compression: str):
    """What Python and zstandard make one frame of."""
    if compression == ".gz":
        return zlib.decompressobj(31)
    if compression == ".bz2":
        return bz2.BZ2Decompressor()
    if compression == ".xz":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ)
    return zstandard.ZstdDecompressor().decompressobj()


def before_damage(content: bytes, compression: str) -> tuple[bytes, bool]:
    """The oracle: frames decompressed byte by byte, and whether something is wrong."""
    output, at, frame, is_first = bytearray(), 0, None, True
    while at < len(content):
        if frame is None and not is_first and compression != ".zst":
            rest = content[at:].lstrip(b"\0")
            if compression == ".xz" and (len(content) - at - len(rest)) % 4:
                return bytes(output), True
            at = len(content) - len(rest)
            if not rest:
                break
        frame = frame or new_frame(compression)
        try:
            output += frame.decompress(content[at : at + 1])
        except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError):
            return bytes(output), True
        at += 1
        if frame.eof:
            # Of bytes that were not its own, zstandard gives some back.
            at -= len(frame.unused_data)
            frame, is_first = None, False
    return bytes(output), frame is not None


def read_all(content: bytes, compression: str, size: int) -> tuple[bytes, bool]:
    stream, output = Decompressed(io.BytesIO(content), compression), b""
    try:
        while piece := stream.read(size):
            output += piece
    except FileContentError:
        # Whoever asks again is told again.
        with pytest.raises(FileContentError):
            stream.read(size)
        return output, True
    return output, False


TEXT = "".join(random.Random(0).choices("abcd \n", k=3000)).encode()


@settings(deadline=None, max_examples=60)
@given(data=st.data(), compression=st.sampled_from(list(PACK)), size=st.sampled_from([1, 7, 64, 1 << 20]))
def test_frames_padding_cuts_and_garbage_give_what_byte_by_byte_gives(data, compression: str, size: int):
    content = b""
    for length in data.draw(st.lists(st.sampled_from([0, 1, 50, 1000]), max_size=4)):
        content += PACK[compression](TEXT[:length])
        content += b"\0" * data.draw(st.sampled_from([0, 0, 0, 1, 2, 4, 12, 512]))
        if compression == ".zst" and data.draw(st.booleans()):
            content += SKIPPABLE
    how = data.draw(st.sampled_from(["whole", "cut", "garbage", "flip"]))
    if how == "cut":
        content = content[: data.draw(st.integers(0, len(content)))]
    elif how == "garbage":
        content += data.draw(st.binary(min_size=1, max_size=30))
    # libzstd itself takes other damage for some when it is given byte by byte.
    elif content and compression != ".zst" and how == "flip":
        at = data.draw(st.integers(0, len(content) - 1))
        content = content[:at] + bytes([content[at] ^ 1 << data.draw(st.integers(0, 7))]) + content[at + 1 :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decompressed, "_INPUT_BYTES", data.draw(st.sampled_from([1, 5, 100, 2048])))
        assert read_all(content, compression, size) == before_damage(content, compression)


def lines(first: int, stop: int) -> bytes:
    return b"".join(json.dumps({"text": f"document {number}"}).encode() + b"\n" for number in range(first, stop))


def read(path: Path, content: bytes) -> tuple[list[str], dict[str, list[str]]]:
    """Texts of a file, and what is left out."""
    path.write_bytes(content)
    (path.parent / "z.txt").write_text("good")
    source = open_source(path.parent)
    texts = [document.text for document in source if document.name != "z.txt"]
    return texts, source.left_out.examples


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("behind", [lines(1, 3), b"\0" * 3 + b"x", b"BZh9", b"\0" * 5], ids=["plain", "x", "head", "5"])
def test_what_follows_and_is_no_frame_is_said(ending: str, behind: bytes, tmp_path: Path):
    texts, left_out = read(tmp_path / f"a.jsonl{ending}", PACK[ending](lines(0, 1)) + behind)
    assert texts == ["document 0"]
    if not behind.strip(b"\0") and ending in (".gz", ".bz2"):
        assert not left_out
    else:
        assert "1 documents before it are used" in left_out["damaged"][0]


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "values"])
def test_documents_before_a_cut_are_used(ending: str, kind: str, tmp_path: Path):
    noise = random.Random(1)
    texts = [noise.randbytes(300).hex() for _ in range(200)]
    if kind == "csv":
        records = [text + "\r\n" for text in texts]
        whole = "text\r\n" + "".join(records)
    else:
        records = [json.dumps({"text": text}) + ("\n" if kind == "jsonl" else "") for text in texts]
        whole = "".join(records)
    if kind == "json":
        whole = f"[{','.join(records)}]"
    content = PACK[ending](whole.encode()[:45_000]) + PACK[ending](whole.encode()[45_000:])
    content = content[: len(content) * 3 // 4]
    given, _ = before_damage(content, ending)
    found, left_out = read(tmp_path / f"a.{kind.replace('values', 'json')}{ending}", content)
    expected = sum(whole.index(record) + len(record) <= len(given) for record in records)
    assert found == texts[:expected]
    assert expected > 50
    assert f"{expected} documents before it are used" in left_out["damaged"][0]


def test_a_text_that_is_cut_is_no_document(tmp_path: Path):
    for ending, pack in PACK.items():
        texts, left_out = read(tmp_path / f"a.txt{ending}", pack(TEXT)[:-3])
        assert texts == []
        assert "0 documents before it are used" in left_out["damaged"][0]
        (tmp_path / f"a.txt{ending}").unlink()


def test_an_empty_file_is_empty_however_it_is_compressed(tmp_path: Path):
    for ending, pack in PACK.items():
        for content in (b"", pack(b"")):
            texts, left_out = read(tmp_path / f"a.jsonl{ending}", content)
            assert (texts, left_out) == ([], {"empty": [f"a.jsonl{ending}"]})
        (tmp_path / f"a.jsonl{ending}").unlink()


def test_the_older_lzma_is_one_stream(tmp_path: Path):
    content = lzma.compress(lines(0, 2), format=lzma.FORMAT_ALONE)
    assert read(tmp_path / "a.jsonl.lzma", content) == (["document 0", "document 1"], {})
    texts, left_out = read(tmp_path / "a.jsonl.lzma", content + content)
    assert len(texts) == 2
    assert "damaged" in left_out
