"""A corpus of everything that a source may hold, and builds of it in many small parts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.prepare import sources
from data_pipeline.prepare.build import BuildReport, build_shards
from data_pipeline.prepare.parts import deal
from data_pipeline.prepare.sources import open_source
from longctx.tokenizer import Tokenizer

PART_BYTES = 30_000
OPTIONS = {"validation_fraction": 0.2, "shard_tokens": 4000}


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


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the test, parts and pieces are small."""
    monkeypatch.setattr(deal, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(sources, "CUT_BYTES", PART_BYTES)


Build = Callable[..., BuildReport]


@pytest.fixture
def build(mixed: Path, tokenizer: Tokenizer, small_parts: None) -> Build:
    """Builds the mixed corpus into a folder."""

    def run(output: Path, workers: int = 1, **options) -> BuildReport:
        return build_shards(open_source(mixed), tokenizer, output, workers=workers, **(OPTIONS | options))

    return run


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
