"""Preferences in rows: complete records, prompts shared or copied, labels, references, any ranks and positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.inspect import decode_rows, describe, show_row
from data_pipeline.loader import build_loader, build_validation_loader
from data_pipeline.mixture.description import describe_mixture
from data_pipeline.rows.fim import FimRule
from data_pipeline.rows.pack import Packing
from data_pipeline.rows.preferences import PreferenceRule
from data_pipeline.rows.row_batches import Share
from data_pipeline.rows.span_corruption import SpanRule
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.references import write_references
from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch
from longctx.errors import ConfigError, DataError
from longctx.model.attention.local import LocalAttention
from longctx.model.decoder import Decoder
from longctx.objectives.causal_lm import CausalLM
from longctx.tokenizer import Tokenizer
from parallel.layout.sequence import SequenceLayout
from tests.data_pipeline.preference_records import Sizes, ids_of, write_preferences
from tests.longctx.samples import dense_config

SIZES: list[Sizes] = [(5, 3, 4), (1, 2, 2), (9, 1, 6), (4, 4, 4), (2, 7, 1), (30, 30, 9), (3, 5, 5), (6, 2, 3)] * 4
FORMS = [Packing(examples=PreferenceRule()), Packing(examples=PreferenceRule(shared_prompts=True))]
record_sizes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory) -> Path:
    return write_preferences(tmp_path_factory.mktemp("preferences") / "shards", tokenizer, SIZES).folder


@pytest.fixture(scope="module")
def labelled(tokenizer: Tokenizer, tmp_path_factory) -> Path:
    labels = [number % 3 % 2 for number in range(len(SIZES))]
    return write_preferences(tmp_path_factory.mktemp("l") / "shards", tokenizer, SIZES, labels=labels).folder


def loaded(folder: Path | ShardSet, packing: Packing, **options: Any) -> Any:
    options = {"seq_len": 48, "rows_per_step": 2, "micro_batch_rows": 2} | options
    return build_loader(folder, packing=packing, **options)


def replies_in(batch: Batch) -> list[dict[str, Any]]:
    """Each reply's whole sequence as a model sees it: tokens, positions and targets, with its prefix before it."""
    documents, found = batch.documents, []
    tokens, positions, targets = (x.flatten().tolist() for x in (batch.tokens, batch.positions, batch.targets))
    is_prefix = set(documents.prefixes)
    for number in range(documents.num_documents):
        if number in (documents.padding or ()) or number in is_prefix:
            continue
        places = list(range(documents.bounds[number], documents.bounds[number + 1]))
        if documents.prefixes and documents.prefixes[number] >= 0:
            prefix = documents.prefixes[number]
            places = [*range(documents.bounds[prefix], documents.bounds[prefix + 1]), *places]
        found.append({"tokens": [tokens[n] for n in places], "positions": [positions[n] for n in places]})
        found[-1]["targets"] = [targets[n] for n in places]
    return found


def references_in(batch: Batch) -> torch.Tensor:
    """Each record's reference log-likelihoods."""
    assert batch.reference_P2 is not None
    return batch.reference_P2


def wanted_replies(number: int, sizes: Sizes, vocab_size: int) -> list[dict[str, Any]]:
    """The same of a record, without packing."""
    prompt, *replies = (ids.tolist() for ids in ids_of(number, sizes, vocab_size))
    return [
        {
            "tokens": prompt + reply,
            "positions": list(range(len(prompt) + len(reply))),
            "targets": [IGNORED_TARGET] * (len(prompt) - 1) + reply + [IGNORED_TARGET],
        }
        for reply in replies
    ]


def row_tokens(sizes: Sizes, packing: Packing) -> int:
    prompt, first, second = sizes
    return sum(sizes) + 1 if packing is FORMS[1] else 2 * prompt + first + second


@pytest.mark.parametrize("packing", FORMS, ids=str)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sizes=record_sizes, shuffle=st.booleans(), kind=st.sampled_from(["best_fit", "one_document"]))
def test_a_row_gives_back_every_record_that_fits(tokenizer, tmp_path_factory, packing, sizes, shuffle, kind):
    shards = write_preferences(tmp_path_factory.mktemp("p") / "s", tokenizer, sizes)
    rule = Packing(kind, examples=packing.examples)
    fitting = [n for n, size in enumerate(sizes) if row_tokens(size, packing) <= 20]
    options = {"seq_len": 20, "packing": rule, "rows_per_step": 1, "shuffle": shuffle}
    if not fitting:
        with pytest.raises(ConfigError, match="no record of"):
            build_loader(shards, **options).pack_report()
        return
    loader = build_loader(shards, **options)
    report = loader.pack_report()
    assert report.pairs_left_out == len(sizes) - len(fitting)
    assert report.tokens == sum(row_tokens(sizes[n], packing) for n in fitting)
    found, labels, num_targets = [], 0, 0
    for _ in range(report.rows):
        batch = next(loader)
        found += replies_in(batch)
        labels += batch.num_labels
        num_targets += int((batch.targets != IGNORED_TARGET).sum())
        assert len(references_in(batch)) == batch.num_labels
        assert torch.isnan(references_in(batch)).all()
    wanted = [wanted_replies(n, sizes[n], tokenizer.vocab_size) for n in fitting]
    # First and second reply follow each other.
    assert sorted(map(str, zip(found[::2], found[1::2], strict=True))) == sorted(str(tuple(pair)) for pair in wanted)
    assert labels == len(fitting)
    assert num_targets == sum(sizes[n][1] + sizes[n][2] for n in fitting)


@pytest.mark.parametrize("packing", FORMS, ids=str)
def test_both_ways_to_unpack_agree_and_count(folder: Path, packing: Packing):
    loader, other = loaded(folder, packing), loaded(folder, packing)
    for _ in range(6):
        share = loader.take(lambda documents: Share(documents, [(0, documents.num_tokens, 1)], None)).share
        batch = next(other)
        assert share.num_targets == int((batch.targets != IGNORED_TARGET).sum())
        assert share.num_tokens == int((batch.document_ids != PADDING_DOCUMENT).sum())
        found = share.unpack_by_lookup("cpu")
        for name in ("tokens", "positions", "document_ids"):
            assert torch.equal(found[name], getattr(batch, name).flatten()), name
        targets = found["next_token_ids"].masked_fill(~found["loss_mask"], IGNORED_TARGET)
        assert torch.equal(targets, batch.targets.flatten())
        assert share.documents.prefixes == batch.documents.prefixes
        assert bool(share.documents.prefixes) == (packing is FORMS[1])


@pytest.mark.parametrize("packing", FORMS, ids=str)
def test_labels_and_references_are_those_of_the_records(labelled: Path, tokenizer: Tokenizer, tmp_path, packing):
    labels = [number % 3 % 2 for number in range(len(SIZES))]
    shards = write_preferences(tmp_path / "shards", tokenizer, SIZES, labels=labels)
    sums_N2 = -np.arange(2.0 * len(SIZES)).reshape(-1, 2)
    write_references(shards.folder, sums_N2, {"weights": "abc"})
    loader = loaded(shards.folder, packing)
    firsts = {str(wanted_replies(n, size, tokenizer.vocab_size)[0]["tokens"]): n for n, size in enumerate(SIZES)}
    seen = set()
    for _ in range(8):
        batch = next(loader)
        numbers = [firsts[str(reply["tokens"])] for reply in replies_in(batch)[::2]]
        assert references_in(batch).dtype == torch.float64
        assert references_in(batch).tolist() == sums_N2[numbers].tolist()
        flat = batch.labels.flatten()
        assert flat[batch.label_indices].tolist() == [labels[n] for n in numbers]
        assert (flat != IGNORED_TARGET).sum() == len(numbers)
        ids = batch.document_ids.flatten()[batch.label_indices]
        assert [batch.documents.bounds[n] for n in ids.tolist()] == batch.label_indices.tolist()
        seen |= set(numbers)
    assert len(seen) > 20


@pytest.mark.parametrize(("layout", "degree"), [("zigzag", 2), ("striped", 3), ("balanced", 2), ("contiguous", 4)])
def test_a_rank_reads_its_part(labelled: Path, layout: str, degree: int):
    whole = loaded(labelled, FORMS[0])

    def place(rank: int):
        def of(documents):
            laid = SequenceLayout.build(layout, documents.num_tokens, degree, documents)
            return Share(documents, laid.rank_runs(rank), laid)

        return of

    ranks = [loaded(labelled, FORMS[0]) for _ in range(degree)]
    for _ in range(4):
        batch = next(whole).flatten_rows()
        shares = [loader.take(place(rank)).share for rank, loader in enumerate(ranks)]
        assert sum(share.num_targets for share in shares) == int((batch.targets != IGNORED_TARGET).sum())
        assert sum(share.num_labels for share in shares) == batch.num_labels == len(references_in(batch))
        for rank, share in enumerate(shares):
            got = share.unpack()
            for name, x in batch.per_token().items():
                assert torch.equal(got.per_token()[name], got.placement.split(x, rank, 1)), name
            torch.testing.assert_close(references_in(got), references_in(batch), equal_nan=True)


def test_shared_prompts_need_one_rank(folder: Path):
    loader = loaded(folder, FORMS[1])
    with pytest.raises(ConfigError, match=r"parallel\.context=1"):
        loader.take(lambda documents: Share(documents, [(0, documents.num_tokens // 2, 1)], None))


@pytest.mark.parametrize("packing", FORMS, ids=str)
def test_a_run_goes_on_at_any_step(folder: Path, packing: Packing):
    loader = loaded(folder, packing, seed=4)
    states, batches = [], []
    for _ in range(9):
        states.append(loader.state_dict())
        batches.append(next(loader))
    for state, wanted in zip(states, batches, strict=True):
        again = loaded(folder, packing, seed=4)
        again.load_state_dict(state)
        assert torch.equal(next(again).tokens, wanted.tokens)
    other = FORMS[packing is FORMS[0]]
    with pytest.raises(DataError, match="packing="):
        loaded(folder, other, seed=4).load_state_dict(states[0])


@pytest.mark.parametrize("packing", FORMS, ids=str)
def test_validation_reads_every_record_once(folder: Path, packing: Packing):
    loader = build_validation_loader(folder, seq_len=48, micro_batch_rows=2, packing=packing)
    batches = list(loader)
    assert sum(len(references_in(batch)) for batch in batches) == sum(row_tokens(size, packing) <= 48 for size in SIZES)
    assert loader.bytes_per_token is None
    assert [batch.tokens.tolist() for batch in loader] == [batch.tokens.tolist() for batch in batches]


def test_a_model_has_the_same_loss_in_both_forms(folder: Path, tokenizer: Tokenizer):
    config = dense_config(vocab_size=tokenizer.vocab_size)
    lm = CausalLM(Decoder(config, {"softmax": LocalAttention("auto")})).double()
    sums = []
    for rule in (form.examples for form in FORMS):
        loader = loaded(folder, Packing("one_document", examples=rule), seq_len=100, shuffle=False, rows_per_step=8)
        sums.append([lm.loss_sum(lm(next(loader)))["objective"].item() for _ in range(2)])
    assert sums[0] == pytest.approx(sums[1], rel=1e-12)


def mixture(path: Path, *folders: Path) -> Path:
    path.write_text("".join(f'[[sources]]\nname = "s{n}"\npath = "{one}"\n' for n, one in enumerate(folders)))
    return path


@pytest.mark.parametrize("packing", FORMS, ids=str)
def test_a_mixture_reads_both_folders(folder: Path, tokenizer: Tokenizer, tmp_path: Path, packing: Packing):
    sizes = [(3, 2, 4), (4, 3, 3)] * 10
    second = write_preferences(tmp_path / "second", tokenizer, sizes)
    write_references(second.folder, -np.ones((len(sizes), 2)), {})
    path = mixture(tmp_path / "mixture.toml", folder, second.folder)
    wanted = [
        {str(wanted_replies(n, size, tokenizer.vocab_size)) for n, size in enumerate(of)} for of in (SIZES, sizes)
    ]
    seen: list[set[str]] = [set(), set()]
    loader = loaded(path, packing)
    for batch in (*(next(loader) for _ in range(12)), *build_validation_loader(path, seq_len=48, packing=packing)):
        replies = replies_in(batch)
        assert batch.sources is not None
        firsts = batch.document_ids.flatten()[batch.label_indices]
        for place, document in enumerate(firsts.tolist()):
            source = int(batch.sources[document])
            pair = str(replies[2 * place : 2 * place + 2])
            assert pair in wanted[source]
            assert torch.isnan(references_in(batch)[place]).all() == (source == 0)
            seen[source].add(pair)
    assert all(len(found) > 5 for found in seen)
    assert describe_mixture(path).sources[1].documents == len(sizes)


def test_a_mixture_with_other_kinds_is_refused(folder: Path, labelled: Path, built: Path, tmp_path: Path):
    path = mixture(tmp_path / "texts.toml", folder, built)
    with pytest.raises(DataError, match="contains preferences, the other texts"):
        loaded(path, FORMS[0])
    with pytest.raises(DataError, match="s0 contains preferences, s1 texts"):
        describe_mixture(path)
    with pytest.raises(ConfigError, match="single replies with labels"):
        loaded(mixture(tmp_path / "labels.toml", folder, labelled), FORMS[0])
    with pytest.raises(ConfigError, match="contains preferences"):
        loaded(mixture(tmp_path / "alone.toml", folder), Packing())


def test_what_is_refused(folder: Path, built: Path):
    for packing in (Packing(), Packing("concatenate"), Packing(examples=SpanRule())):
        with pytest.raises(ConfigError, match="preferences"):
            loaded(folder, packing, source_seq_len=48 if packing.examples else 0)
    with pytest.raises(ConfigError, match="contains preferences"):
        build_validation_loader(folder, seq_len=48)
    with pytest.raises(ConfigError, match="contains no preferences"):
        loaded(built, FORMS[0])
    with pytest.raises(ConfigError, match="must stay uncut"):
        next(loaded(folder, Packing("concatenate", examples=PreferenceRule())))
    with pytest.raises(ConfigError, match=r"data\.source_seq_len=9 does not apply"):
        loaded(folder, FORMS[0], source_seq_len=9)
    with pytest.raises(ConfigError, match=r"data\.fim_rate=0"):
        loaded(folder, Packing(fim=FimRule(0.5, 0.5), examples=PreferenceRule()))
    with pytest.raises(DataError, match="contains preferences"):
        show_row(folder, seq_len=48, row=0)
    with pytest.raises(ConfigError, match="contains preferences"):
        next(decode_rows(folder, seq_len=48, rows=1))


def test_inspect_shows_the_first_record_and_the_cost(folder: Path, labelled: Path):
    found = describe(folder, seq_len=48)
    assert found.preferences is not None
    assert not found.preferences.has_labels
    assert found.source_tokens == sum(size[0] for size in SIZES)
    assert found.longest_source_tokens == 30
    assert found.packing is not None
    assert found.packing.pairs_left_out == sum(row_tokens(size, FORMS[0]) > 48 for size in SIZES)
    shards = ShardSet.open(folder)
    assert found.preferences.first == shards.tokenizer().decode(shards.slice(0, 0, 3))
    of_labels = describe(labelled).preferences
    assert of_labels is not None
    assert of_labels.undesirable == sum(number % 3 % 2 == 0 for number in range(len(SIZES)))
