"""Workers as processes: what they take along, and a script that has no guard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.sources import open_source
from longctx.tokenizer import Tokenizer, load_tokenizer
from tests.data_pipeline.prepare.parts.conftest import OPTIONS, content
from tests.helpers import REPOSITORY
from tests.longctx.conversion.tiny_tokenizer import train_tokenizer

SCRIPT = """
import sys
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.parts import source_parts
from data_pipeline.prepare.sources import open_source
from longctx.tokenizer import load_tokenizer
source_parts.PART_BYTES = 30_000
print("once")
source, model, output = sys.argv[1:]
build_shards(open_source(source), load_tokenizer(model), output, workers=2, shard_tokens=4000)
"""


def test_a_script_without_a_guard_runs_once(corpus: Path, tokenizer: Tokenizer, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, corpus, tokenizer.path, tmp_path / "out"]
    done = subprocess.run(
        [str(word) for word in command],
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr
    assert (tmp_path / "out" / "manifest.json").is_file()


# The folder has such a tokenizer.json in it.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kind", [pytest.param("json", marks=pytest.mark.slow), "Hugging Face folder", "SentencePiece of others"]
)
def test_workers_have_the_same_tokenizer(mixed: Path, small_parts: None, tmp_path: Path, kind: str):
    if kind == "SentencePiece of others":
        path = train_tokenizer(tmp_path / "a.model", add_dummy_prefix=True, remove_extra_whitespaces=True)
    else:
        fast = tokenizers.ByteLevelBPETokenizer()
        fast.train_from_iterator([document.text for document in open_source(mixed)], vocab_size=500)
        path = tmp_path / "tokenizer.json"
        fast.save(str(path))
        if kind == "Hugging Face folder":
            (tmp_path / "generation_config.json").write_text('{"bos_token_id": 3, "eos_token_id": [7, 5]}')
            path = tmp_path
    tokenizer = load_tokenizer(path)
    threads = tokenizer.threads
    outputs = [tmp_path / "one", tmp_path / "two"]
    for workers, output in enumerate(outputs, start=1):
        build_shards(open_source(mixed), tokenizer, output, workers=workers, **OPTIONS)
    assert content(outputs[0]) == content(outputs[1])
    assert tokenizer.threads == threads
