"""Scores and texts of requests on one process and over ranks, without lm-eval."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launcher.evaluation.harness.request_encoder import Encoder, generation_of
from launcher.evaluation.harness.request_server import Ranks
from launcher.evaluation.harness.settings import Settings
from longctx.errors import ConfigError, LongCtxError
from longctx.generation.load_decoder import load_model
from longctx.generation.loop import generate
from longctx.generation.scoring import Pair, Score, score_after_context
from longctx.tokenizer import load_tokenizer
from tests.helpers import run_distributed

TEXT = "import os\n\n\ndef main(arguments):\n    return os.path.join(arguments)\n"
ENDS = (" -> int:", "):", " pass", " x = 1")
OPTIONS = (
    {"until": ["\n\n"], "max_gen_toks": 9},
    {"temperature": 0.8, "max_gen_toks": 5},
    {"num_beams": 2} | {"max_gen_toks": 4},
)


def requests(encoder: Encoder) -> tuple[list[Pair], list[tuple[int, list[int]]]]:
    """Several continuations of one context, long and short ones; prompts of several lengths, one of them twice."""
    pairs = [encoder.pair(TEXT * 4, end) for end in ENDS] + [encoder.pair(TEXT[:n], TEXT[n:]) for n in (0, 5, 9, 30)]
    prompts = [encoder.text(TEXT[:n]) for n in (60, 8, 31, 31, 17)]
    return pairs, list(enumerate(prompts))


def answers(run: Path, **options) -> tuple[list[Score], list[list[str]]]:
    """What rank 0 gets, on one process or over ranks."""
    ranks = Ranks(torch.device("cpu"))
    subject = ranks.load(Settings(checkpoint=run, **options))
    pairs, prompts = requests(Encoder(subject.tokenizer))
    texts = [ranks.generate(prompts, generation_of(how), 3) for how in OPTIONS]
    scores = ranks.score(pairs)
    ranks.end()
    return scores, texts


@pytest.fixture(scope="session")
def alone(run: Path) -> tuple[list[Score], list[list[str]]]:
    return answers(run, chunk_tokens=100)


def test_scores_and_texts_are_the_models(run, alone):
    scores, texts = alone
    model = load_model(run)
    tokenizer = load_tokenizer(run / "checkpoints/step_000100")
    pairs, prompts = requests(Encoder(tokenizer))
    for pair, score in zip(pairs, scores, strict=True):
        (wanted,) = score_after_context(model, pair.context, [pair.continuation])
        assert score.is_greedy == wanted.is_greedy
        assert score.log_likelihood == pytest.approx(wanted.log_likelihood, abs=1e-4)
    for (_, ids), text in zip(prompts, texts[0], strict=True):
        whole = tokenizer.decode(generate(model, ids, 9, stop_ids=tokenizer.special.stop_ids))
        assert text == whole.split("\n\n")[0]
    # The same prompt twice: greedy texts are the same, sampled ones are not.
    assert texts[0][2] == texts[0][3]
    assert texts[1][2] != texts[1][3]


def test_a_long_context_is_read_once_and_short_texts_together(run, monkeypatch):
    ranks = Ranks(torch.device("cpu"))
    encoder = Encoder(ranks.load(Settings(checkpoint=run)).tokenizer)
    assert ranks._worker is not None
    backbone, read = ranks._worker._model.model, []
    forward = backbone.forward
    monkeypatch.setattr(backbone, "forward", lambda x, *a, **k: read.append(x.tokens_Bt.numel()) or forward(x, *a, **k))
    long = [encoder.pair(TEXT * 20, end) for end in ENDS]
    ranks.score(long)
    assert sum(read) < len(long[0].context) + sum(pair.num_read - len(pair.context) + 1 for pair in long)
    read.clear()
    short = [encoder.pair(TEXT, end) for end in ENDS] + [encoder.pair(TEXT[:9], TEXT[9:])]
    ranks.score(short)
    assert read == [sum(pair.num_read for pair in short)]


@pytest.mark.parametrize("context", [1, 2])
def test_two_ranks_give_what_one_process_does(run, alone, context):
    """Two that share each text, and two that each have texts of their own."""
    run_distributed(check_on_ranks, 2, run, alone, context, timeout=60.0)


def check_on_ranks(run: Path, alone: tuple[list[Score], list[list[str]]], context: int) -> None:
    if dist.get_rank() != 0:
        Ranks(torch.device("cpu")).serve()
        return
    scores, texts = answers(run, chunk_tokens=100, context=context)
    assert texts == alone[1]
    assert [score.is_greedy for score in scores] == [score.is_greedy for score in alone[0]]
    for one, other in zip(scores, alone[0], strict=True):
        assert abs(one.log_likelihood - other.log_likelihood) <= 1e-4


def test_what_the_ranks_cannot_do_ends_all_of_them_alike(run):
    run_distributed(refuse_on_ranks, 2, run, timeout=60.0)


def refuse_on_ranks(run: Path) -> None:
    for settings, said in (
        (Settings(checkpoint=run, expert=2, context=1), "parallel.expert=2"),
        (Settings(checkpoint=run, max_length=10**6), "max_length=1000000"),
        (Settings(checkpoint=run.parent / "nothing"), "nothing"),
    ):
        ranks = Ranks(torch.device("cpu"))
        act = ranks.serve
        if dist.get_rank() == 0:
            act = partial(ranks.load, settings)
        with pytest.raises(LongCtxError, match=said):
            act()
        # Nobody listens any more, so nobody is told.
        ranks.end()


def test_rank_0_alone_may_fail(run):
    """What lm-eval itself finds wrong, before or after a model is there."""
    run_distributed(leave_after_a_fault, 2, run, timeout=60.0)


def leave_after_a_fault(run: Path) -> None:
    ranks = Ranks(torch.device("cpu"))
    if dist.get_rank() != 0:
        ranks.serve()
        return
    with pytest.raises(ConfigError, match="has no separate token"):
        Encoder(ranks.load(Settings(checkpoint=run)).tokenizer).pair("a", "")
    ranks.end()
