"""Documents whose middle is to be filled in: every token is there once, in an order that can be undone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.inspect import decode_rows
from data_pipeline.loader import build_loader, open_order
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.sources import TextSource
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from data_pipeline.rows.fim import MIN_BODY, Fim, FimRule
from data_pipeline.rows.fim_documents import FimDocuments
from data_pipeline.rows.pack import Packing
from data_pipeline.rows.row_batches import Share
from data_pipeline.rows.row_reader import documents_in
from data_pipeline.shards.reader import Corpus, ShardSet
from longctx.errors import ConfigError, DataError
from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.special import FIM_TOKENS

SEQ_LEN = 256


@pytest.fixture(scope="module")
def marked(source: TextSource, tmp_path_factory) -> Tokenizer:
    """A tokenizer with ids for prefix, suffix and middle."""
    return train_tokenizer(source, tmp_path_factory.mktemp("fim") / "t.model", vocab_size=400, fim=True)


@pytest.fixture(scope="module")
def folder(source: TextSource, marked: Tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fim") / "shards"
    build_shards(source, marked, folder, validation_fraction=0.2, shard_tokens=20_000)
    return folder


def packing(rate: float = 0.5, **rule: Any) -> Packing:
    return Packing(fim=FimRule(rate, **rule))


def undone(ids: list[int], fim: Fim) -> list[int]:
    """The document that was filled in, by its marks alone."""
    text: list[int] = []
    body = ids[int(fim.begin is not None) :]
    assert body[0] == fim.ids.prefix
    segments: list[list[int]] = []
    for token in body:
        if token == fim.ids.prefix:
            segments.append([])
        segments[-1].append(token)
    for segment in segments:
        if fim.end is not None:
            assert segment.pop() == fim.end
        suffix, middle = segment.index(fim.ids.suffix), segment.index(fim.ids.middle)
        assert suffix < middle
        if suffix == 1:
            # Prefix and middle follow each other, as SPM has them; of PSM without a prefix they do as well.
            text += segment[middle + 1 :] + segment[suffix + 1 : middle]
        else:
            text += segment[1:suffix] + segment[middle + 1 :] + segment[suffix + 1 : middle]
    return text


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_filled_in_can_be_undone(folder, marked, data):
    shards = ShardSet.open(folder)
    rule = FimRule(1.0, data.draw(st.sampled_from([0.0, 0.5, 1.0])), data.draw(st.integers(24, 900)))
    fim = Fim.of(rule, marked, seed=data.draw(st.integers(0, 5)), seq_len=SEQ_LEN)
    documents = FimDocuments(shards, (fim,))
    number = data.draw(st.integers(0, shards.num_documents - 1))
    whole = shards.document(number).tolist()
    (length,) = documents.lengths_of(np.array([number])).tolist()
    read = documents.slice(number, 0, 1 << 40).tolist()
    assert len(read) == length
    if len(whole) < MIN_BODY + 2:
        assert read == whole
        return
    assert undone(read, fim) == whole[1:-1]
    assert read[0] == whole[0]
    # A segment begins wherever a row may.
    assert all(read[at] == fim.ids.prefix for at in range(rule.segment_tokens, length, rule.segment_tokens))
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length + 3))
    assert documents.slice(number, start, stop).tolist() == read[start:stop]


def test_the_share_is_what_was_asked_for(marked):
    documents = np.arange(20_000)
    lengths = np.full(len(documents), 100)
    for rate in (0.0, 0.1, 0.5, 0.9, 1.0):
        fim = Fim.of(FimRule(rate), marked, seed=3, seq_len=SEQ_LEN)
        grown = fim.lengths(documents, lengths)
        assert set(grown.tolist()) <= {100, 103}
        assert (grown == 103).mean() == pytest.approx(rate, abs=0.015)
    spm = Fim.of(FimRule(1.0, 0.3), marked, seed=3, seq_len=SEQ_LEN)
    first = [list(next(iter(spm.parts(number, 100, 0)))) for number in range(5000)]
    assert np.mean([spm.ids.suffix in ids for ids in first]) == pytest.approx(0.3, abs=0.03)


def rows_of_epoch(folder: Path, **options: Any) -> list[list[list[int]]]:
    """Each row of the first epoch as the tokens of its documents, padding left out."""
    loader = build_loader(folder, seq_len=SEQ_LEN, rows_per_step=1, **options)
    found = []
    while loader.epoch == 0:
        batch = next(loader)
        tokens, ids = batch.tokens[0], batch.document_ids[0]
        found.append([tokens[ids == number].tolist() for number in range(int(ids.max()) + 1)])
    return found


def test_an_epoch_has_every_token_once_and_each_gap_in_its_row(folder, marked):
    shards = ShardSet.open(folder)
    fim = Fim.of(FimRule(1.0), marked, seed=0, seq_len=SEQ_LEN)
    wanted = Counter(token for number in range(shards.num_documents) for token in shards.document(number).tolist())
    found: Counter = Counter()
    for row in rows_of_epoch(folder, packing=packing(1.0)):
        for piece in row:
            found.update(piece)
            if len(piece) < MIN_BODY:
                continue
            counts = [piece.count(token) for token in fim.ids]
            assert counts == [1, 1, 1], "a piece has one gap and all of its parts"
            assert piece[-1] == fim.end
    ends = found[fim.end] - wanted[fim.end]
    for token in (*fim.ids, fim.end):
        found.pop(token)
        wanted.pop(token, None)
    assert found == wanted
    assert ends > 0, "segments of long documents end as documents do"


def test_ranks_read_shares_of_the_same_rows(folder):
    options = {"seq_len": SEQ_LEN, "rows_per_step": 2, "packing": packing(0.7), "seed": 4}
    whole, shares = build_loader(folder, **options), build_loader(folder, **options)
    runs = [(3, 100, 1), (150, 50, 2)]
    for _ in range(20):
        batch = next(whole)
        share = shares.take(lambda documents: Share(documents, runs, None)).share.unpack()
        index = torch.cat([torch.arange(3, 103), torch.arange(150, 250, 2)])
        for name in ("tokens", "targets", "positions", "document_ids"):
            assert torch.equal(getattr(share, name)[0], getattr(batch, name)[0, index]), name


def test_a_run_goes_on_by_the_same_rule_alone(folder):
    options = {"seq_len": SEQ_LEN, "rows_per_step": 2}
    loader = build_loader(folder, packing=packing(0.7), **options)
    for _ in range(6):
        next(loader)
    state = loader.state_dict()
    again = build_loader(folder, packing=packing(0.7), **options)
    again.load_state_dict(state)
    assert torch.equal(next(again).tokens, next(loader).tokens)
    for other in (Packing(), packing(0.6), packing(0.7, spm_rate=0.1), packing(0.7, segment_tokens=64)):
        with pytest.raises(DataError, match=r"0\.7 filled in"):
            build_loader(folder, packing=other, **options).load_state_dict(state)
    nothing = build_loader(folder, packing=packing(0.0), **options)
    assert nothing.state_dict() == build_loader(folder, **options).state_dict()


def test_a_source_of_a_mixture_may_have_its_own_share(folder, marked, tmp_path):
    path = tmp_path / "mixture.toml"
    source = '[[sources]]\nname = "{name}"\npath = "{path}"\nweight = 1\n'
    path.write_text(
        source.format(name="code", path=folder) + "fim_rate = 1.0\n" + source.format(name="prose", path=folder)
    )
    folders, order = open_order(path, SEQ_LEN, packing=packing(0.0))
    documents, corpus = documents_in(folders, order.fim_by_folder), Corpus(folders)
    middle = marked.special.fim.middle  # type: ignore[union-attr]
    seen = set()
    rows, _ = order.rows(order.start(), 30)
    for row in rows:
        for document, start, stop in row:
            ids = documents.slice(document, start, stop).tolist()
            if len(ids) >= MIN_BODY:
                assert (middle in ids) == (corpus.folder_of(document) == 0)
                seen.add(corpus.folder_of(document))
    assert seen == {0, 1}
    state = order.state(order.start())
    path.write_text(path.read_text().replace("1.0", "0.5"))
    with pytest.raises(DataError, match="fim="):
        open_order(path, SEQ_LEN, packing=packing(0.0))[1].read(state)
    path.write_text(path.read_text().replace("0.5", "1.5"))
    with pytest.raises(ConfigError, match=r"fim_rate=1.5: Input should be less than or equal to 1"):
        open_order(path, SEQ_LEN)


def mixture_of(folder: Path, path: Path, lengths: list[int], *, epochs: str = "epochs = 1\n") -> Path:
    """The file of a mixture of one source that is all filled in, with rows of each length for two rows of the run."""
    text = f'[[sources]]\nname = "code"\npath = "{folder}"\nfim_rate = 1.0\n{epochs}'
    for number, length in enumerate(lengths):
        text += f"[[stages]]\nfrom_tokens = {2 * SEQ_LEN * number}\nrow_tokens = {length}\n"
    path.write_text(text)
    return path


def pieces_of(path: Path, rule: FimRule, count: int = 1 << 30) -> list[list[int]]:
    """The tokens of each piece of a mixture's rows, until it is used up."""
    folders, order = open_order(path, SEQ_LEN, packing=Packing(fim=rule))
    documents, at, found = documents_in(folders, order.fim_by_folder), order.start(), []
    try:
        while at.rows_consumed < count:
            (row,), at = order.rows(at, 1)
            found += [documents.slice(*piece).tolist() for piece in row]
    except DataError:
        pass
    return found


def torn(pieces: list[list[int]], marked: Tokenizer) -> int:
    """How many pieces have a middle mark without its prefix and suffix, or those without a middle."""
    marks = marked.special.fim
    assert marks is not None
    return sum(len({piece.count(mark) for mark in marks}) > 1 for piece in pieces)


@settings(deadline=None, max_examples=8)
@given(lengths=st.lists(st.sampled_from([32, 64, 128, 256]), min_size=1, max_size=5))
def test_no_stages_rows_tear_a_gap_from_its_parts(folder, marked, tmp_path_factory, lengths):
    path = mixture_of(folder, tmp_path_factory.mktemp("stages") / "m.toml", lengths)
    pieces = pieces_of(path, FimRule(0), 25)
    assert torn(pieces, marked) == 0
    assert sum(piece.count(marked.special.fim.middle) for piece in pieces) > 20  # type: ignore[union-attr]


def test_segments_divide_rows_that_do_not_divide_each_other(folder, marked, tmp_path):
    path = mixture_of(folder, tmp_path / "m.toml", [96, 64])
    options: dict[str, Any] = {"seq_len": 192, "rows_per_step": 1, "packing": packing(0.0)}
    loader = build_loader(path, **options)
    assert loader.state_dict()["sources"]["code"]["fim"].endswith("segments of 32")
    marks = list(marked.special.fim)
    for _ in range(9):
        batch = next(loader)
        for number in range(int(batch.document_ids.max()) + 1):
            piece = batch.tokens[batch.document_ids == number].tolist()
            assert len({piece.count(mark) for mark in marks}) == 1


def test_an_epoch_with_shorter_stages_has_every_document_back(folder, marked, tmp_path):
    shards = ShardSet.open(folder)
    wanted = Counter(token for number in range(shards.num_documents) for token in shards.document(number).tolist())
    found = Counter(
        token
        for piece in pieces_of(mixture_of(folder, tmp_path / "m.toml", [256, 64, 128]), FimRule(0))
        for token in piece
    )
    for token in (*marked.special.fim, marked.document_end):  # type: ignore[misc]
        found.pop(token)
        wanted.pop(token, None)
    assert found == wanted


@pytest.mark.parametrize("length", [96, 512])
def test_segments_that_rows_would_cut_are_refused(folder, tmp_path, length):
    rule = packing(1.0, segment_tokens=length)
    path = mixture_of(folder, tmp_path / "m.toml", [256, 64])
    for data, most in ((folder, 256), (path, 64)):
        loader = build_loader(data, seq_len=SEQ_LEN, rows_per_step=1, packing=rule)
        with pytest.raises(ConfigError, match=rf"={length} does not divide.*\n.*=0, which resolves to {most}"):
            next(loader)
        next(build_loader(data, seq_len=SEQ_LEN, rows_per_step=1, packing=packing(1.0)))
    with pytest.raises(ConfigError, match="packing=concatenate cuts documents"):
        next(build_loader(folder, seq_len=SEQ_LEN, rows_per_step=1, packing=Packing("concatenate", fim=FimRule(0.5))))
    with pytest.raises(ConfigError, match="A segment of 8 tokens leaves no room for text"):
        next(build_loader(mixture_of(folder, path, [256, 8]), seq_len=SEQ_LEN, rows_per_step=1, packing=packing(0.0)))


def older_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state as releases wrote it whose segments were the run's rows in every stage."""
    entry = state["sources"]["code"]
    head, between, _ = entry["fim"].rpartition(" of ")
    return state | {"sources": {"code": entry | {"fim": f"{head}{between}0"}}}


@pytest.mark.parametrize("shorter", [64, 16])
def test_a_run_goes_on_by_the_segments_that_it_began_with(folder, marked, tmp_path, caplog, shorter):
    options: dict[str, Any] = {"seq_len": SEQ_LEN, "rows_per_step": 1, "packing": packing(0.0)}
    path = mixture_of(folder, tmp_path / "m.toml", [256, shorter], epochs="")
    # An older release cut into segments of the run's rows: as if its rule had named them.
    named = dict(options, packing=Packing(fim=FimRule(0, segment_tokens=SEQ_LEN)))
    old = build_loader(path, **named)
    old.load_state_dict(old.state_dict() | {"rows_consumed": 1})
    for _ in range(3):
        next(old)
    state = older_state(old.state_dict())
    again = build_loader(path, **options)
    again.load_state_dict(state)
    assert f"keeps the segment rule from the release that started the run: rows of {shorter} tokens" in caplog.text
    assert again.state_dict() == state
    pieces = []
    for _ in range(6):
        batch, expected = next(again), next(old)
        assert torch.equal(batch.tokens, expected.tokens)
        ids = batch.document_ids[0]
        pieces += [batch.tokens[0][ids == number].tolist() for number in range(int(ids.max()) + 1)]
    assert torn(pieces, marked) > 5
    assert older_state(old.state_dict()) == again.state_dict()


def test_stages_may_change_as_long_as_they_cut_no_segment(folder, tmp_path):
    options: dict[str, Any] = {"seq_len": SEQ_LEN, "rows_per_step": 1, "packing": packing(0.0)}
    path = mixture_of(folder, tmp_path / "m.toml", [64, 64, 64], epochs="")
    loader = build_loader(path, **options)
    for _ in range(3):
        next(loader)
    state = loader.state_dict()
    mixture_of(folder, path, [64, 64, 128], epochs="")
    again = build_loader(path, **options)
    again.load_state_dict(state)
    assert torch.equal(next(again).tokens, next(loader).tokens)
    mixture_of(folder, path, [256, 256], epochs="")
    again = build_loader(path, **options)
    again.load_state_dict(state)
    assert again.state_dict()["sources"]["code"]["fim"].endswith("segments of 64")
    mixture_of(folder, path, [64, 64, 32], epochs="")
    with pytest.raises(DataError, match=r"segments of 64 tokens. A stage with row_tokens=32 would cut"):
        build_loader(path, **options).load_state_dict(state)
    path.write_text(path.read_text().replace('"code"', '"code-32"'))
    again = build_loader(path, **options)
    again.load_state_dict(state)
    assert again.state_dict()["sources"]["code-32"]["fim"].endswith("segments of 32")


def test_rows_are_shown_as_they_are_read(folder):
    plain, filled = (
        "".join(decode_rows(folder, seq_len=SEQ_LEN, rows=3, packing=packing(rate))) for rate in (0.0, 1.0)
    )
    assert not any(mark in plain for mark in FIM_TOKENS)
    assert len({filled.count(mark) for mark in FIM_TOKENS}) == 1
    assert filled.count(FIM_TOKENS[0]) == filled.count("────")


def test_no_text_becomes_a_mark(marked):
    assert marked.special.fim is not None
    text = "a <|fim_prefix|> b <|fim_suffix|> c <|fim_middle|>"
    ids = marked.encode(text)
    assert not set(ids.tolist()) & set(marked.special.fim)
    assert marked.decode(ids) == text
    assert marked.decode(list(marked.special.fim)) == ""
    assert load_tokenizer(marked.path).special.fim == marked.special.fim


def test_what_cannot_be_is_refused(built, marked, source, tmp_path):
    with pytest.raises(ConfigError, match="needs a tokenizer with ids for prefix, suffix and middle"):
        build_loader(built, seq_len=SEQ_LEN, rows_per_step=1, packing=packing())
    with pytest.raises(ConfigError, match=r"fim_rate=1.5 must be from 0 to 1"):
        FimRule(1.5)
    with pytest.raises(ConfigError, match=r"fim_spm_rate=-0.5 must be from 0 to 1"):
        FimRule(1, -0.5)
    with pytest.raises(ConfigError, match=r"fim_segment_tokens=-1"):
        FimRule(1, 0.5, -1)
    with pytest.raises(ConfigError, match="leaves no room for text"):
        Fim.of(FimRule(1, 0.5, 10), marked, seed=0, seq_len=SEQ_LEN)
    with pytest.raises(DataError, match=r"7 control ids. Try 264 or more"):
        train_tokenizer(source, tmp_path / "small.model", vocab_size=263, fim=True)
