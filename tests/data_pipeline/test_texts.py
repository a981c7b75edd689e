from __future__ import annotations

from pathlib import Path

from data_pipeline.prepare.sources import Source
from data_pipeline.shards.reader import ShardSet
from data_pipeline.texts import read_texts


def test_shards_give_the_documents_that_they_were_made_of(built: Path, source: Source):
    texts = list(read_texts(built))
    assert len(texts) == ShardSet.open(built).num_documents
    assert set(texts) <= {document.text for document in source}


def test_a_folder_of_files_gives_the_same_texts(corpus: Path, source: Source):
    assert list(read_texts(corpus)) == [document.text for document in source]
