"""A small real corpus, a tokenizer trained on it, and shards built from both, made once for the whole session."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.sources import TextSource, open_source
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from longctx.tokenizer import Tokenizer

VOCAB_SIZE = 700


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short files of the standard library, one of them twice."""
    folder = tmp_path_factory.mktemp("corpus")
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(stdlib.glob("*.py")) if 2_000 < path.stat().st_size < 12_000][:40]
    for path in files:
        shutil.copyfile(path, folder / path.name)
    shutil.copyfile(files[0], folder / "again.py")
    return folder


@pytest.fixture(scope="session")
def source(corpus: Path) -> TextSource:
    return open_source(corpus)


@pytest.fixture(scope="session")
def tokenizer(source: TextSource, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(source, tmp_path_factory.mktemp("tokenizer") / "small.model", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def built(source: TextSource, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard folder with several shards and a validation split. Read-only: damage a copy."""
    folder = tmp_path_factory.mktemp("built") / "shards"
    build_shards(source, tokenizer, folder, validation_fraction=0.2, shard_tokens=20_000)
    return folder


@pytest.fixture
def damaged(built: Path, tmp_path: Path) -> Path:
    """A copy of ``built`` to break."""
    return Path(shutil.copytree(built, tmp_path / "damaged"))


@pytest.fixture(scope="session")
def mixed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files, large tables that are cut, and of all that is left out something at both ends of the order."""
    folder = tmp_path_factory.mktemp("mixed")
    texts = [path.read_text() for path in sorted(corpus.glob("*.py"))]
    for path in sorted(corpus.glob("*.py"))[:10]:
        shutil.copyfile(path, folder / path.name)
    (folder / "0_empty.txt").write_text("")
    (folder / "0_binary.bin").write_bytes(b"\0" * 100)
    (folder / "z_latin.txt").write_bytes("Grüße".encode("latin-1"))
    (folder / "z_damaged.jsonl.gz").write_bytes(b"\x1f\x8b rubbish")
    lines = [json.dumps({"text": text}).encode() for text in texts]
    lines[5:5] = [b"", b"{}", b'{"text": null}', b'{"text": ""}', b"\xff\xfe", b'{"text": "\\ud800"}', b"no JSON", b""]
    lines.append(b'{"text": "the last line has no newline, and a space mark \xe2\x96\x81"}')
    (folder / "m_lines.jsonl").write_bytes(b"\n".join(lines))
    table = pa.table({"id": range(len(texts)), "text": pa.array(texts[::-1])})
    pq.write_table(table, folder / "p_rows.parquet", row_group_size=7, compression="none")
    return folder
