"""Memory of a build does not grow with the corpus: each worker holds a shard's tokens, a document and a constant."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from longctx.tokenizer import Tokenizer
from tests.data_pipeline.growth import run_measured
from tests.helpers import REPOSITORY

WRITE = """
import sys
import numpy as np
from data_pipeline.shards.shard_writer import EncodedDocument, ShardWriter
tokens = np.arange(int(sys.argv[2]), dtype=np.uint16) % 700
writer = ShardWriter(Path(sys.argv[1]), vocab_size=700)
begin()
for number in range(int(sys.argv[3])):
    writer.add(EncodedDocument(tokens=tokens, hash=number, name=f"folder/of/files.jsonl:{number}", text_bytes=3))
writer.close()
print(growth())
"""

BUILD = """
import sys
from data_pipeline.prepare.parts import source_parts
source_parts.PART_BYTES = 16_500_000
from launcher.cli import main
sys.exit(main(sys.argv[1:]))
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with Linux's /proc")


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(("length", "documents", "most"), [(1_000_000, 40, 3), (50, 400_000, 9)])
def test_a_shard_in_the_making_holds_its_tokens_once(tmp_path: Path, length: int, documents: int, most: float):
    """Two bytes a token, some hundred a document; it was four, and seven hundred."""
    grown = int(run_measured(WRITE, tmp_path, length, documents))
    assert grown / (length * documents) < most


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_workers_with_documents_of_8_megabytes(corpus: Path, tokenizer: Tokenizer, tmp_path: Path):
    text = "".join(path.read_text() for path in sorted(corpus.iterdir()))
    (tmp_path / "in").mkdir()
    for number in range(6):
        begin = 10_000 * number
        (tmp_path / "in" / f"{number}.txt").write_text((text[begin:] + text * (8_000_000 // len(text)))[:8_000_000])
    words = ["data", "build", "--source", tmp_path / "in", "--tokenizer", tokenizer.path]
    words += ["--output", tmp_path / "out", "--workers", 2, "--shard-tokens", 4_000_000]
    command = [sys.executable, "-c", BUILD, *map(str, words)]
    most = 0
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            most = max(most, resident([parent, *parent.children()]))
            time.sleep(0.02)
    assert process.returncode == 0
    # 128 or 256 MiB for each worker's shard come to it where shards are larger.
    assert most < 900e6


def resident(processes: list[psutil.Process]) -> int:
    """Bytes of memory that the processes have together."""
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
