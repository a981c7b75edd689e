from __future__ import annotations

import re
from pathlib import Path

from data_pipeline.prepare.sources import TextSource
from data_pipeline.shards.reader import ShardSet
from data_pipeline.texts import read_texts
from tests.helpers import REPOSITORY


def test_shards_give_the_documents_that_they_were_made_of(built: Path, source: TextSource):
    texts = list(read_texts(built))
    assert len(texts) == ShardSet.open(built).num_documents
    assert set(texts) <= {document.text for document in source}


def test_a_folder_of_files_gives_the_same_texts(corpus: Path, source: TextSource):
    assert list(read_texts(corpus)) == [document.text for document in source]


def test_the_example_of_the_page_runs(built: Path, capsys):
    """docs/evaluation.md: documents of a shard folder become a haystack, and a model that says nothing scores 0."""
    example = re.search(r"```python\n(.*?)```", (REPOSITORY / "docs/evaluation.md").read_text(), re.S)
    assert example
    code = example[1].replace("shards/validation", str(built)).replace("runs/quickstart", str(built))
    names = {"answer": lambda prompt, answer_tokens: ""}
    exec(code.replace("(4096, 8192)", "(1024, 1280)").replace("length, 22)", "length, 3)"), names)
    assert "Estimate(mean=0.0" in capsys.readouterr().out
    assert len(names["rows"]) == 3 * 2 * 3
