"""Masked tokens: drawn as the rule says, for every rank alike, by a definition in plain Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.loader import build_loader, build_validation_loader
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.sources import TextSource
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from data_pipeline.rows.row_batches import Share
from data_pipeline.rows.token_masking import CONTEXT, Masking, MaskRule
from data_pipeline.shards.reader import ShardSet
from longctx.batch import IGNORED_TARGET
from longctx.errors import ConfigError
from longctx.tokenizer import Tokenizer
from tests.oracles import mix64

SEQ_LEN = 256
RULES = {
    "tokens": MaskRule(),
    "half": MaskRule(0.5),
    "words": MaskRule(whole_words=True),
    "static words": MaskRule(0.3, whole_words=True, static=True),
}


@pytest.fixture(scope="module")
def marked(source: TextSource, tmp_path_factory) -> Tokenizer:
    """A tokenizer with an id for a masked token."""
    return train_tokenizer(source, tmp_path_factory.mktemp("mask") / "t.model", vocab_size=400, mask=True)


@pytest.fixture(scope="module")
def folder(source: TextSource, marked: Tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mask") / "shards"
    build_shards(source, marked, folder, validation_fraction=0.2, shard_tokens=20_000)
    return folder


def key(*parts: int) -> int:
    """A hash of whole numbers, in their order."""
    found = 0
    for part in parts:
        found = mix64(found ^ part)
    return found


def by_definition(rule: MaskRule, tokenizer: Tokenizer, shards: ShardSet, document: int, epoch: int, seed: int):
    """What each token of a document is read as, and whether it is to be told; token by token."""
    ids = shards.document(document).tolist()
    parts = (key(document, int(shards.manifest.hash[:16], 16)), seed, 0 if rule.static else epoch)
    texts = [token for token in range(tokenizer.vocab_size) if not tokenizer.is_control[token]]
    read, told = list(ids), [False] * len(ids)
    for at, token in enumerate(ids):
        unit = at
        if rule.whole_words:
            near = range(at, max(-1, at - CONTEXT), -1)
            begins = (
                n for n in near if n == 0 or tokenizer.piece(ids[n]).startswith("▁") or tokenizer.is_control[ids[n]]
            )
            unit = next(begins, at // CONTEXT * CONTEXT)
        if tokenizer.is_control[token] or key(unit, *parts, 201) >= int(rule.rate * 2**64):
            continue
        told[at], kind = True, key(at, *parts, 202)
        if kind < int(0.8 * 2**64):
            read[at] = tokenizer.special.mask
        elif kind < int(0.9 * 2**64):
            read[at] = texts[mix64(at ^ key(*parts, 203)) % len(texts)]
    return read, told


@pytest.mark.few(1)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("name", RULES)
def test_any_stretch_of_a_document_is_masked_as_defined(folder, marked, name, data):
    shards, rule = ShardSet.open(folder), RULES[name]
    document = data.draw(st.integers(0, shards.num_documents - 1))
    epoch, seed = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    ids = shards.document(document)
    first = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(first, len(ids)))
    masking = Masking(rule, [shards], seed=seed)
    before = ids[max(0, first - masking.context) : first]
    chosen, read_as = masking.draw(0, document, epoch, first, ids[first:stop], before)
    read, told = by_definition(rule, marked, shards, document, epoch, seed)
    assert chosen.tolist() == [at for at, is_told in enumerate(told[first:stop]) if is_told]
    assert read_as.tolist() == [read[first + at] for at in chosen.tolist()]


def test_shares_are_those_of_the_paper(folder, marked):
    shards = ShardSet.open(folder)
    masking = Masking(MaskRule(), [shards], seed=1)
    ids = np.concatenate([shards.document(number) for number in range(shards.num_documents)])
    ids = ids[~marked.is_control[ids]]
    chosen, read_as = masking.draw(0, 0, 0, 0, ids, ids[:0])
    count = len(chosen)
    assert len(ids) > 20_000
    # Four standard deviations of so many draws.
    assert count / len(ids) == pytest.approx(0.15, abs=4 * (0.15 * 0.85 / len(ids)) ** 0.5)
    is_mask, kept = read_as == marked.special.mask, read_as == ids[chosen]
    assert is_mask.mean() == pytest.approx(0.8, abs=4 * (0.16 / count) ** 0.5)
    # One random token in some 390 is the one that stood there.
    assert kept.mean() == pytest.approx(0.1, abs=4 * (0.09 / count) ** 0.5 + 0.001)
    assert not marked.is_control[read_as[~is_mask]].any()


@pytest.mark.parametrize("name", RULES)
def test_ranks_read_shares_of_the_same_rows(folder, name):
    options: dict[str, Any] = {"seq_len": SEQ_LEN, "rows_per_step": 2, "mask": RULES[name], "seed": 4}
    whole, shares = build_loader(folder, **options), build_loader(folder, **options)
    runs = [(3, 100, 1), (150, 50, 2)]
    for _ in range(20):
        batch = next(whole)
        taken = shares.take(lambda documents: Share(documents, runs, None)).share
        share = taken.unpack()
        index = torch.cat([torch.arange(3, 103), torch.arange(150, 250, 2)])
        for field in ("tokens", "targets", "positions", "document_ids"):
            assert torch.equal(getattr(share, field)[0], getattr(batch, field)[0, index]), field
        assert taken.num_targets == share.num_targets == int((share.targets != IGNORED_TARGET).sum())


def test_targets_are_what_the_unmasked_rows_have(folder, marked):
    options: dict[str, Any] = {"seq_len": SEQ_LEN, "rows_per_step": 2, "seed": 4}
    plain, masked = build_loader(folder, **options), build_loader(folder, mask=MaskRule(0.4), **options)
    for _ in range(10):
        wanted, batch = next(plain), next(masked)
        told = batch.targets != IGNORED_TARGET
        assert torch.equal(batch.targets[told], wanted.tokens[told])
        assert torch.equal(batch.tokens[~told], wanted.tokens[~told])
        assert not told[wanted.document_ids < 0].any()
        assert not marked.is_control[wanted.tokens[told].numpy()].any()


def test_epochs_differ_unless_the_rule_is_static_and_a_run_goes_on(folder):
    def of_epochs(rule: MaskRule) -> tuple[torch.Tensor, torch.Tensor]:
        loader = build_loader(folder, seq_len=SEQ_LEN, rows_per_step=1, mask=rule, shuffle=False)
        found: list[list[torch.Tensor]] = [[], []]
        while loader.epoch < 2:
            found[loader.epoch].append(next(loader).tokens)
        return torch.cat(found[0]), torch.cat(found[1])

    assert torch.equal(*of_epochs(MaskRule(static=True)))
    first, second = of_epochs(MaskRule())
    assert first.shape == second.shape
    # What neither epoch chose is read alike: some 0.85² of the tokens.
    assert 0.6 < (first == second).float().mean() < 0.9
    options: dict[str, Any] = {"seq_len": SEQ_LEN, "rows_per_step": 2, "mask": MaskRule()}
    loader, again = build_loader(folder, **options), build_loader(folder, **options)
    for _ in range(8):
        next(loader)
    again.load_state_dict(loader.state_dict())
    assert torch.equal(next(again).tokens, next(loader).tokens)


def test_the_sources_of_a_mixture_are_masked_by_their_own_epochs(folder, tmp_path):
    path = tmp_path / "mixture.toml"
    path.write_text(f'[[sources]]\nname = "a"\npath = "{folder}"\nweight = 1\n')
    options: dict[str, Any] = {"seq_len": SEQ_LEN, "rows_per_step": 1, "mask": MaskRule(), "shuffle": False}
    mixed, alone = build_loader(path, **options), build_loader(folder, **options)
    while alone.epoch < 2:
        assert torch.equal(next(mixed).tokens, next(alone).tokens)
    path.write_text(path.read_text() + "fim_rate = 0.5\n")
    with pytest.raises(ConfigError, match=r"fim_rate"):
        build_loader(path, **options)


def test_validation_is_masked_alike_each_time(folder):
    options: dict[str, Any] = {"seq_len": SEQ_LEN, "max_rows": 4, "mask": MaskRule(0.3)}
    once = [batch.tokens for batch in build_validation_loader(folder, **options)]
    again = [batch.tokens for batch in build_validation_loader(folder, **options)]
    plain = [batch.tokens for batch in build_validation_loader(folder, seq_len=SEQ_LEN, max_rows=4)]
    assert all(map(torch.equal, once, again))
    assert not any(map(torch.equal, once, plain))


def test_what_cannot_be_masked_is_refused(folder, source, tmp_path):
    validation = build_validation_loader(folder, seq_len=SEQ_LEN, mask=MaskRule())
    assert validation.bytes_per_token is None
    assert build_validation_loader(folder, seq_len=SEQ_LEN).bytes_per_token
    for rate in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ConfigError, match="must be above 0 and below 1"):
            MaskRule(rate)
    tokenizer = train_tokenizer(source, tmp_path / "t.model", vocab_size=400)
    build_shards(source, tokenizer, tmp_path / "shards")
    with pytest.raises(ConfigError, match="longctx tokenizer train --mask"):
        build_loader(tmp_path / "shards", seq_len=SEQ_LEN, rows_per_step=1, mask=MaskRule())
