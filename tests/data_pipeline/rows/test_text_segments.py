"""Two segments: what stands in a row, which are together, and that ranks, epochs and resumes agree about it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline.loader import build_loader, build_validation_loader
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.encode_texts import paragraphs_of
from data_pipeline.prepare.sources import TextSource, open_source
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from data_pipeline.rows.pack import Packing
from data_pipeline.rows.row_batches import Share
from data_pipeline.rows.text_segments import SegmentRule, TextSegments
from data_pipeline.rows.token_masking import MaskRule
from data_pipeline.shards.reader import ShardSet
from longctx.batch import IGNORED_TARGET
from longctx.errors import ConfigError, DataError
from longctx.tokenizer import Tokenizer
from parallel.layout.sequence import SequenceLayout

SEQ_LEN = 64
KINDS = ("nsp", "sop")


@pytest.fixture(scope="module")
def wordpiece(source: TextSource, tmp_path_factory) -> Tokenizer:
    return train_tokenizer(source, tmp_path_factory.mktemp("pieces") / "t.json", vocab_size=500, kind="wordpiece")


@pytest.fixture(scope="module")
def folder(source: TextSource, wordpiece: Tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pieces") / "shards"
    build_shards(source, wordpiece, folder, validation_fraction=0.2, shard_tokens=20_000, paragraphs=True)
    return folder


def loader_of(folder: Path, kind: str, **options):
    packing = Packing(examples=SegmentRule(kind))
    return build_loader(folder, seq_len=SEQ_LEN, rows_per_step=4, micro_batch_rows=4, packing=packing, **options)


def documents(batch):
    """Tokens, segments and order of each document of a batch that was not masked."""
    ids = batch.document_ids.flatten()
    for n in sorted(set(ids[ids >= 0].tolist())):
        own = ids == n
        order = batch.labels.flatten()[own]
        assert (order[1:] == IGNORED_TARGET).all()
        yield batch.tokens.flatten()[own].numpy(), batch.segments.flatten()[own].numpy(), int(order[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_is_two_segments_of_a_text_in_an_order(folder, wordpiece, kind):
    shards, loader = ShardSet.open(folder), loader_of(folder, kind, shuffle=False)
    begin, end = int(wordpiece.prefix_ids[0]), int(wordpiece.suffix_ids[0])
    text = " ".join(map(str, np.concatenate([[-1, *shards.document(n)[1:-1]] for n in range(shards.num_documents)])))
    orders, firsts, texts = Counter(), 0, Counter()
    while loader.epoch == 0:
        batch = next(loader)
        for tokens, segments, order in documents(batch):
            cut = int(np.argmax(segments))
            assert tokens[0] == begin
            assert tokens[cut - 1] == tokens[-1] == end
            assert (segments == (np.arange(len(tokens)) >= cut)).all()
            first, second = tokens[1 : cut - 1], tokens[cut:-1]
            assert len(first)
            assert len(second)
            parts = (first, second) if order == 0 or kind == "nsp" else (second, first)
            whole = " ".join(map(str, np.concatenate(parts)))
            # If another document stands in, the segments do not follow each other, but for a few tokens by chance.
            if order == 0 or kind == "sop" or len(tokens) > 20:
                assert (f" {whole} " in f"{text} ") == (order == 0 or kind == "sop")
            assert f" {' '.join(map(str, second))} " in f"{text} "
            orders[order] += 1
            texts.update(first.tolist() if kind == "nsp" else np.concatenate(parts).tolist())
        assert batch.num_labels == len(batch.labels[batch.labels != IGNORED_TARGET])
        firsts += batch.num_labels
    assert firsts == orders.total()
    assert abs(orders[0] - orders[1]) < 5 * orders.total() ** 0.5
    if kind == "sop":
        wanted = Counter(np.concatenate([shards.document(n)[1:-1] for n in range(shards.num_documents)]).tolist())
        # Pieces of one token are left out; the last step may have begun the next epoch.
        assert (wanted - texts).total() <= shards.num_documents


def test_a_piece_is_cut_where_a_paragraph_begins_and_else_at_a_word(folder, wordpiece):
    shards = ShardSet.open(folder)
    recipe = TextSegments(SegmentRule("sop"), shards, seed=1)
    document = int(np.argmax([len(shards.paragraphs(n)) for n in range(shards.num_documents)]))
    begins, length = shards.paragraphs(document), int(shards.lengths_of(np.array([document]))[0])
    cuts = set()
    for epoch in range(20):
        (made,) = recipe.examples([((document, 0, length - 2), epoch)])
        first = made.second - 2
        if made.label:
            first = len(made.tokens) - 3 - first
        cuts.add(first + 1)
    assert cuts <= set(begins.tolist())
    assert len(cuts) > 1
    ends = begins.tolist()
    between = next(((a, b) for a, b in pairwise(ends) if b - a > 8), None)
    assert between is not None
    (made,) = recipe.examples([((document, between[0] - 1, between[1] - 1), 0)])
    first = made.second - 2
    words = recipe._is_word_start[made.tokens]
    assert words[1]
    assert words[made.second]
    assert 0 < first < between[1] - between[0]


def test_paragraphs_are_parted_by_blank_lines_or_by_lines():
    assert paragraphs_of("a\nb\n\n \nc\n") == ["a\nb\n\n \n", "c\n"]
    assert paragraphs_of("a\nb\n\n\n") == ["a\nb\n\n\n"]
    assert paragraphs_of("a\nb") == ["a\n", "b"]
    assert paragraphs_of("a") == ["a"]
    assert paragraphs_of("a\r\nb\r\n\r\nc\r\n") == ["a\r\nb\r\n\r\n", "c\r\n"]
    assert paragraphs_of("a\r\nb") == ["a\r\n", "b"]
    assert paragraphs_of("\n\na\n\nb") == ["\n\na\n\n", "b"]
    assert paragraphs_of("\n\na\nb") == ["\n\na\n", "b"]


def test_a_folder_says_where_its_paragraphs_begin(tmp_path, wordpiece):
    texts = ["one two\n\nthree\n\nfour", "alone"]
    (tmp_path / "in").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    source = open_source(tmp_path / "in")
    build_shards(source, wordpiece, tmp_path / "out", validation_fraction=0, paragraphs=True)
    shards = ShardSet.open(tmp_path / "out")
    begins = shards.paragraphs(0)
    parts = [wordpiece.decode(part).strip() for part in np.split(shards.document(0), begins)]
    assert parts == ["one two", "three", "four"]
    assert len(shards.paragraphs(1)) == 0
    assert not ShardSet.open(tmp_path / "out").manifest.has_sources
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"a": "x", "b": "y"}\n')
    with pytest.raises(DataError, match="--paragraphs records paragraph starts"):
        build_shards(open_source(pairs, source_field="a", text_field="b"), wordpiece, tmp_path / "no", paragraphs=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layout", "degree"), [("zigzag", 2), ("striped", 2), ("contiguous", 4)])
def test_ranks_read_equal_bits_and_a_run_goes_on_to_them(folder, kind, layout, degree):
    options = {"seed": 5, "mask": MaskRule()}
    whole_loader, ranks = (
        loader_of(folder, kind, **options),
        [loader_of(folder, kind, **options) for _ in range(degree)],
    )

    def place(rank: int):
        def of(documents):
            laid = SequenceLayout.build(layout, documents.num_tokens, degree, documents, causal=False)
            return Share(documents, laid.rank_runs(rank), laid)

        return of

    for _ in range(3):
        state = whole_loader.state_dict()
        batch = next(whole_loader)
        again = loader_of(folder, kind, **options)
        again.load_state_dict(state)
        repeated = next(again)
        for name in ("tokens", "targets", "segments", "labels"):
            assert torch.equal(getattr(repeated, name), getattr(batch, name))
        flat, num_labels = batch.flatten_rows(), 0
        for rank, loader in enumerate(ranks):
            share = loader.take(place(rank)).share
            got = share.unpack()
            for name in ("tokens", "targets", "segments", "labels"):
                assert torch.equal(getattr(got, name), got.placement.split(getattr(flat, name), rank, 1)), name
            assert share.num_labels == got.num_labels == len(got.label_indices)
            assert (got.labels.flatten()[got.label_indices] != IGNORED_TARGET).all()
            # What a device makes of it token by token is the same.
            looked = share.unpack_by_lookup("cpu")
            assert torch.equal(looked["positions"].view(1, -1), got.positions)
            num_labels += share.num_labels
        assert num_labels == batch.num_labels > 0


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_and_seeds_draw_others_and_validation_the_same(folder, kind):
    recipe = [TextSegments(SegmentRule(kind), ShardSet.open(folder), seed=seed) for seed in (0, 0, 1)]
    piece = (0, 0, 60)
    made = [recipe[0].examples([(piece, 0)]), recipe[1].examples([(piece, 0)]), recipe[2].examples([(piece, 0)])]
    assert np.array_equal(made[0][0].tokens, made[1][0].tokens)
    drawn = {recipe[0].examples([(piece, epoch)])[0].tokens.tobytes() for epoch in range(8)}
    assert len(drawn) > 2

    def rows():
        options = {
            "seq_len": SEQ_LEN,
            "max_rows": 3,
            "mask": MaskRule(),
            "packing": Packing(examples=SegmentRule(kind)),
        }
        return [(batch.tokens, batch.labels) for batch in build_validation_loader(folder / "validation", **options)]

    assert all(
        torch.equal(a, b) for one, two in zip(rows(), rows(), strict=True) for a, b in zip(one, two, strict=True)
    )


def test_masking_hides_no_token_around_a_text(folder, wordpiece):
    loader = loader_of(folder, "nsp", mask=MaskRule(rate=0.5))
    batch = next(loader)
    hidden = batch.targets != IGNORED_TARGET
    control = torch.from_numpy(wordpiece.is_control)
    assert hidden.float().mean() > 0.3
    assert not control[batch.targets[hidden]].any()


def test_without_long_documents_segments_stay_together(tmp_path, wordpiece):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "long.txt").write_text("word " * 200)
    (tmp_path / "in" / "short.txt").write_text("a b")
    build_shards(open_source(tmp_path / "in"), wordpiece, tmp_path / "out", validation_fraction=0)
    recipe = TextSegments(SegmentRule("nsp"), ShardSet.open(tmp_path / "out"), seed=0)
    made = recipe.examples([((0, 0, 190), epoch) for epoch in range(6)])
    assert {example.label for example in made} == {0}


def test_what_is_refused(folder, built, tmp_path, wordpiece):
    with pytest.raises(ConfigError, match="cannot fit two segments"):
        build_loader(folder, seq_len=4, rows_per_step=1, packing=Packing(examples=SegmentRule("nsp")))
    packing = Packing("concatenate", examples=SegmentRule("nsp"))
    with pytest.raises(ConfigError, match="concatenate cuts documents"):
        next(build_loader(folder, seq_len=64, rows_per_step=1, packing=packing))
    mixture = tmp_path / "mixture.toml"
    mixture.write_text(f'[[source]]\nname = "a"\nfolder = "{folder}"\nshare = 1.0\n')
    with pytest.raises(ConfigError, match="require data from one folder"):
        build_loader(mixture, seq_len=64, rows_per_step=1, packing=Packing(examples=SegmentRule("nsp")))
    one = tmp_path / "one.txt"
    one.write_text("some words")
    build_shards(open_source(one), wordpiece, tmp_path / "one", validation_fraction=0)
    with pytest.raises(ConfigError, match="has only one"):
        TextSegments(SegmentRule("nsp"), ShardSet.open(tmp_path / "one"), seed=0)
