"""Scores of continuations: packed, behind a shared context, chunk by chunk, against one plain pass."""

from __future__ import annotations

import pytest
import torch

from longctx.errors import ConfigError
from longctx.generation.loop import generate
from longctx.generation.prefill import token_scores
from longctx.generation.scoring import Pair, Score, can_share, score_after_context, score_packed
from longctx.model.attention.local import LocalAttention
from longctx.model.decoder import Decoder
from tests.longctx.cached_models import MODELS, config_of, ids_of
from tests.longctx.samples import dense_config

PAIRS = [
    Pair(ids_of(length)[:cut], ids_of(length)[cut:]) for length, cut in ((2, 1), (9, 8), (9, 1), (23, 17), (31, 5))
]


def build(name: str) -> Decoder:
    return Decoder(config_of(name), {"softmax": LocalAttention("blockwise")}).double()


@torch.no_grad()
def wanted(decoder: Decoder, pair: Pair) -> Score:
    """By one pass over the pair alone, and all its logits."""
    ids = torch.tensor([[*pair.context, *pair.continuation]])
    logits = decoder.logits(decoder(ids[:, :-1], torch.arange(ids.shape[1] - 1)[None]))[0].float()
    logits, targets = logits[len(pair.context) - 1 :], ids[0, len(pair.context) :]
    found = logits.log_softmax(-1).gather(1, targets[:, None])
    return Score(float(found.double().sum()), logits.argmax(-1).tolist() == targets.tolist())


def check(found: list[Score], right: list[Score]) -> None:
    assert [score.is_greedy for score in found] == [score.is_greedy for score in right]
    for one, other in zip(found, right, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_many_texts_scores_each_as_if_alone(name, monkeypatch):
    monkeypatch.setattr("longctx.generation.scoring.HEAD_TOKENS", 7)
    decoder = build(name)
    if can_share(decoder):
        check(score_packed(decoder, PAIRS), [wanted(decoder, pair) for pair in PAIRS])


@pytest.mark.parametrize("name", MODELS)
def test_continuations_of_one_context_score_as_if_each_had_read_it(name):
    """Of one token, of several, and one that goes over the border of a chunk."""
    decoder, context = build(name), ids_of(19)
    continuations = [[3], [7, 9, 11], ids_of(14), [3]]
    right = [wanted(decoder, Pair(context, continuation)) for continuation in continuations]
    check(score_after_context(decoder, context, continuations, chunk_tokens=5), right)
    check(score_after_context(decoder, context, continuations[2:3], chunk_tokens=5), right[2:3])


def test_what_greedy_decoding_writes_is_greedy():
    decoder, context = build("grouped"), ids_of(12)
    greedy = generate(decoder, context, 6)
    almost = [*greedy[:5], (greedy[5] + 1) % 61]
    found = score_after_context(decoder, context, [greedy, almost, greedy[:1]])
    assert [score.is_greedy for score in found] == [True, False, True]
    assert [score.is_greedy for score in score_packed(decoder, [Pair(context, greedy), Pair(context, almost)])] == [
        True,
        False,
    ]


def test_a_shared_context_is_read_once(monkeypatch):
    decoder = build("grouped")
    counted = []
    forward = decoder.model.forward
    monkeypatch.setattr(
        decoder.model, "forward", lambda x, *a, **k: counted.append(x.tokens_Bt.numel()) or forward(x, *a, **k)
    )
    score_after_context(decoder, ids_of(40), [[1, 2], [3], [4, 5, 6]], chunk_tokens=16)
    assert sum(counted) == 40 + 1 + 2


def test_nothing_to_score_is_refused():
    decoder = build("grouped")
    for pair, said in (
        (Pair([], [1]), "each needs one"),
        (Pair([1], []), "each needs one"),
        (Pair([1], [61]), "id 61"),
    ):
        with pytest.raises(ConfigError, match=said):
            score_packed(decoder, [pair])
        with pytest.raises(ConfigError, match=said):
            score_after_context(decoder, pair.context, [pair.continuation])


def test_a_token_without_an_output_has_no_likelihood():
    """It may begin a sequence."""
    config = dense_config(tie_embeddings=False, output_vocab_size=90)
    decoder = Decoder(config, {"softmax": LocalAttention("blockwise")}).double()
    check(score_packed(decoder, [Pair([96, 3], [89])]), [wanted(decoder, Pair([96, 3], [89]))])
    said = r"id 90 has no likelihood: the model predicts ids 0 to 89 only .model.output_vocab_size=90"
    with pytest.raises(ConfigError, match=said):
        score_packed(decoder, [Pair([96], [3, 90])])
    with pytest.raises(ConfigError, match=said):
        score_after_context(decoder, [96], [[3], [90, 4]])
    assert len(token_scores(decoder, [96, 3, 89]).nll) == 2
    with pytest.raises(ConfigError, match=said):
        token_scores(decoder, [3, 90])
