"""Documents as text, from a shard folder with its own tokenizer or from any source that ``data build`` reads."""

from __future__ import annotations

from collections.abc import Iterator

from data_pipeline.prepare.sources import open_source
from data_pipeline.rows.packing_checks import check_kind_of_texts
from data_pipeline.shards.local_copies import has_folder
from data_pipeline.shards.shard_verification import open_validated
from data_pipeline.stores.urls import Location


def read_texts(folder: str | Location) -> Iterator[str]:
    """Yield each document's text in folder order, as an evaluation haystack uses it.

    A run's held-out documents are in its ``data.validation`` folder.
    """
    if has_folder(folder):
        # Decode with the folder's own tokenizer: the model under test may use another one, which did not produce these
        # ids.
        shards = open_validated(folder)
        check_kind_of_texts(shards)
        tokenizer = shards.tokenizer()
        for number in range(shards.num_documents):
            shards.check_files([number])
            yield tokenizer.decode(shards.document(number))
        return
    for document in open_source(str(folder)):
        yield document.text
