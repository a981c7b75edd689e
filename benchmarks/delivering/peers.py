"""Other projects' loaders, unmodified, each over a corpus in its own format.

They are imported on use: this project needs none of them, and the benchmark reports those that are not installed.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.delivering.contender import Contender, Delivery, Tokens, endlessly

END = 2
"""Id that ends each document in both corpora."""
VOCABULARY = 32_000
EPOCHS = 4
"""Epochs in Megatron's index, which is finite."""
BINS = 8
"""Rows that Grain keeps open: its default."""


# --- megatron-core ------------------------------------------------------------------------------------------


class _Tokenizer:
    """Tokenizer interface that GPTDataset requires."""

    vocab_size, eod, pad, unique_identifiers = VOCABULARY, END, 3, {"class": "none"}


def write_megatron(corpus: Path, own: Path, seq_len: int) -> None:
    """Write a ``.bin`` and its ``.idx``."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(own / "data.bin"), dtype=np.uint16)
    for ids in Tokens.load(corpus).documents():
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(own / "data.idx"))


def _open_megatron(own: Path, seq_len: int, *, reset: bool) -> Delivery:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    # Its own flash attention does not use a seq_len² mask either.
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=seq_len,
        blend=([str(own / "data")], None),
        split="1,0,0",
        path_to_cache=str(own / "cache"),
        tokenizer=_Tokenizer(),
        reset_position_ids=reset,
        reset_attention_mask=reset,
        eod_mask_loss=reset,
        create_attention_mask=False,
    )
    indexed = IndexedDataset(str(own / "data"))
    samples = EPOCHS * int(indexed.sequence_lengths.sum()) // seq_len
    documents = np.arange(len(indexed.sequence_lengths), dtype=np.int32)
    dataset = GPTDataset(indexed, str(own / "data"), documents, samples, Split.train, config)
    taken = 0

    def rows() -> Iterator[Any]:
        nonlocal taken
        for number in range(len(dataset)):
            taken = number
            yield dataset[number]

    return Delivery(endlessly(rows), lambda: {"consumed_samples": taken})


def open_megatron(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Open with defaults: documents see each other."""
    return _open_megatron(own, seq_len, reset=False)


def open_megatron_reset(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Open with positions, masks and losses that end with a document."""
    return _open_megatron(own, seq_len, reset=True)


# --- Grain --------------------------------------------------------------------------------------------------


class _Pieces:
    """Documents for Grain, with those longer than a row cut into pieces, as Grain would drop them."""

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self._ids = tokens.ids()
        starts, stops = [], []
        for start, stop in zip(tokens.offsets[:-1].tolist(), tokens.offsets[1:].tolist(), strict=True):
            for begin in range(start, stop, seq_len):
                starts.append(begin)
                stops.append(min(begin + seq_len, stop))
        self._starts, self._stops = np.array(starts), np.array(stops)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: Any) -> dict[str, np.ndarray]:
        number = int(number)
        return {"tokens": self._ids[self._starts[number] : self._stops[number]].astype(np.int32)}


def _open_grain(corpus: Path, seq_len: int, kind: str) -> Delivery:
    import grain
    from grain import experimental

    dataset = grain.MapDataset.source(_Pieces(Tokens.load(corpus), seq_len)).shuffle(seed=0).repeat()
    # Prefetching in threads gains nothing from memory, and costs CPU.
    parent = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    lengths = {"tokens": seq_len}
    if kind == "concat":
        packed = experimental.ConcatThenSplitIterDataset(
            parent, length_struct=lengths, bos_handling=experimental.BOSHandling.DO_NOTHING
        )
    elif kind == "first":
        packed = experimental.FirstFitPackIterDataset(parent, length_struct=lengths, num_packing_bins=BINS)
    else:
        packed = experimental.BestFitPackIterDataset(parent, length_struct=lengths, num_packing_bins=BINS)
    iterator = iter(packed)
    return Delivery(iterator, iterator.get_state)


def open_grain_concat(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Open with documents end to end."""
    return _open_grain(corpus, seq_len, "concat")


def open_grain_first(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Open with first-fit packing."""
    return _open_grain(corpus, seq_len, "first")


def open_grain_best(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Open with best-fit packing."""
    return _open_grain(corpus, seq_len, "best")


# --- mosaicml-streaming -------------------------------------------------------------------------------------


def _import_streaming() -> Any:
    """Import the package, without its imports for images and transformers."""
    for name in ("streaming.text", "streaming.vision", "streaming.multimodal", "transformers"):
        sys.modules.setdefault(name, types.ModuleType(name))
    for name, wanted in (("feature_extraction_utils", "BatchFeature"), ("tokenization_utils_base", "BatchEncoding")):
        module = types.ModuleType(f"transformers.{name}")
        setattr(module, wanted, type(wanted, (), {}))
        sys.modules.setdefault(module.__name__, module)
    import streaming

    return streaming


def write_mds(corpus: Path, own: Path, seq_len: int) -> None:
    """Write shards of prepacked rows."""
    writer = _import_streaming().MDSWriter
    with writer(out=str(own / "mds"), columns={"tokens": f"ndarray:uint16:{seq_len}"}, size_limit=1 << 26) as out:
        for row in Tokens.load(corpus).rows(seq_len):
            out.write({"tokens": np.ascontiguousarray(row)})


def open_mds(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Open rows in shuffled order, as a data loader's worker reads them."""
    streaming = _import_streaming()
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(
        local=str(own / "mds"), shuffle=True, shuffle_algo="py1e", shuffle_seed=0, batch_size=1, num_canonical_nodes=1
    )
    taken = 0

    def rows() -> Iterator[Any]:
        nonlocal taken
        for row in dataset:
            taken += 1
            yield row["tokens"]

    return Delivery(endlessly(rows), lambda: dataset.state_dict(taken, from_beginning=True))


# --- litdata ------------------------------------------------------------------------------------------------


def write_litdata(corpus: Path, own: Path, seq_len: int) -> None:
    """Write 64 MB files of documents."""
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(own), chunk_bytes=1 << 26, item_loader=TokensLoader(block_size=seq_len))
    for number, ids in enumerate(Tokens.load(corpus).documents()):
        writer.add_item(number, np.ascontiguousarray(ids))
    writer.done()
    writer.merge(1)


def open_litdata(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Open rows cut from these files, regardless of documents."""
    from litdata import StreamingDataset, TokensLoader

    dataset = StreamingDataset(str(own), item_loader=TokensLoader(block_size=seq_len), shuffle=True, seed=0)
    taken = 0

    def rows() -> Iterator[Any]:
        nonlocal taken
        for row in dataset:
            taken += 1
            yield row

    return Delivery(endlessly(rows), lambda: dataset.state_dict(taken, 0, 1))


# --- datasets -----------------------------------------------------------------------------------------------


def write_hf(corpus: Path, own: Path, seq_len: int) -> None:
    """Write an Arrow file of prepacked rows."""
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    features = Features({"tokens": List(Value("uint16"), length=seq_len)})
    with ArrowWriter(path=str(own / "rows.arrow"), features=features) as writer:
        for row in Tokens.load(corpus).rows(seq_len):
            writer.write({"tokens": np.ascontiguousarray(row)})
        writer.finalize()


def _open_hf(own: Path, form: str) -> Delivery:
    from datasets import Dataset

    dataset = Dataset.from_file(str(own / "rows.arrow")).with_format(form)
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    taken = 0

    def rows() -> Iterator[Any]:
        nonlocal taken
        for number in order:
            taken += 1
            yield dataset[number]["tokens"]

    return Delivery(endlessly(rows), lambda: {"taken": taken})


def open_hf_numpy(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Open rows as NumPy arrays."""
    return _open_hf(own, "numpy")


def open_hf_torch(corpus: Path, own: Path, seq_len: int) -> Delivery:
    """Open rows as tensors."""
    return _open_hf(own, "torch")


PEERS = (
    Contender(
        "megatron-core GPTDataset, documents reset",
        open_megatron_reset,
        "tokens, labels, positions int64, loss mask float32",
        "end to end, cut",
        write_megatron,
        ("megatron.core.datasets.gpt_dataset",),
    ),
    Contender(
        "megatron-core GPTDataset",
        open_megatron,
        "tokens, labels int64, loss mask float32; one positions for all; documents see each other",
        "end to end, cut",
        write_megatron,
        ("megatron.core.datasets.gpt_dataset",),
    ),
    Contender(
        f"Grain best fit, {BINS} rows open",
        open_grain_best,
        "tokens, positions, document ids int32",
        "best fit",
        imports=("grain",),
        burst=BINS,
    ),
    Contender(
        f"Grain first fit, {BINS} rows open",
        open_grain_first,
        "tokens, positions, document ids int32",
        "first fit",
        imports=("grain",),
        burst=BINS,
    ),
    Contender(
        "Grain concatenate",
        open_grain_concat,
        "tokens, positions, document ids int32",
        "end to end, cut",
        imports=("grain",),
    ),
    Contender("mosaicml-streaming", open_mds, "tokens uint16 alone", "before, one length", write_mds, ("streaming",)),
    Contender(
        "litdata TokensLoader", open_litdata, "tokens uint16 alone", "end to end, cut", write_litdata, ("litdata",)
    ),
    Contender("datasets, NumPy", open_hf_numpy, "tokens int64 alone", "before, one length", write_hf, ("datasets",)),
    Contender("datasets, torch", open_hf_torch, "tokens int64 alone", "before, one length", write_hf, ("datasets",)),
)
