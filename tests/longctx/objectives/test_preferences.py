"""Preferences between replies: losses and gradients against plain autograd over all logits, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch, PackedDocuments
from longctx.errors import ConfigError
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from longctx.objectives.preference_losses import LOSSES, ReplyScores, preference_losses
from longctx.objectives.preferences import Preferences, reply_documents
from longctx.preference_options import PREFERENCE_LOSSES, PreferenceOptions
from tests.longctx.samples import dense_config, gradients, randomize, tiny_config

RECORDS = ((9, 6, 11), (5, 8, 1), (1, 2, 3), (12, 4, 4))
"""Prompt, first and second reply: tokens."""
LABELS = (1, 0, 0, 1)
OPTIONS = {
    "dpo": PreferenceOptions(loss="dpo", beta=0.2),
    "ipo": PreferenceOptions(loss="ipo", beta=0.3),
    "simpo": PreferenceOptions(loss="simpo", beta=2.0, margin=0.4),
    "orpo": PreferenceOptions(loss="orpo", beta=0.25),
    "kto": PreferenceOptions(loss="kto", beta=0.2, desirable_weight=1.5, undesirable_weight=0.5),
    "dpo, likelihood": PreferenceOptions(loss="dpo", nll_weight=0.7),
}
CONFIGS = {
    "dense": dense_config(),
    "cap": dense_config(logit_softcap=5.0, logit_scale=0.7, tie_embeddings=True),
    "bias": dense_config(head_bias=True),
}


def records(*, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Random prompts and replies."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(97, (n,), generator=generator) for n in lengths) for lengths in RECORDS]  # type: ignore[misc]


def packed(*, shared: bool, padding: int = 3, seed: int = 0) -> Batch:
    """One row of all records: a prompt but its last token and two replies after it, or a copy of it in each."""
    documents: list[tuple[Tensor, int]] = []  # tokens, and how many predict none
    prefixes: list[int] = []
    labels = []
    for (prompt, *replies), label in zip(records(seed=seed), LABELS, strict=True):
        before = -1
        if shared and len(prompt) > 1:
            before = len(documents)
            documents.append((prompt[:-1], len(prompt) - 1))
            prefixes.append(-1)
        for reply in replies:
            labels.append((len(documents), label if reply is replies[0] else IGNORED_TARGET))
            if shared:
                documents.append((torch.cat([prompt[-1:], reply]), 0))
            else:
                documents.append((torch.cat([prompt, reply]), len(prompt) - 1))
            prefixes.append(before)
    lengths = [len(tokens) for tokens, _ in documents] + [padding]
    packed_documents = PackedDocuments.of_lengths(lengths, (len(documents),), (*prefixes, -1) if shared else ())
    row = torch.cat([*(tokens for tokens, _ in documents), torch.zeros(padding, dtype=torch.int64)])
    targets, label_T = row.roll(-1), torch.full_like(row, IGNORED_TARGET)
    targets[packed_documents.cu_seqlens[1:] - 1] = IGNORED_TARGET
    targets[-padding:] = IGNORED_TARGET
    for start, (_, uncounted) in zip(packed_documents.bounds, documents, strict=False):
        targets[start : start + uncounted] = IGNORED_TARGET
    for document, label in labels:
        label_T[packed_documents.bounds[document]] = label
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    ids[-padding:] = PADDING_DOCUMENT
    starts = zip(packed_documents.first_positions, lengths, strict=True)
    positions = torch.cat([start + torch.arange(n) for start, n in starts])
    per_token = {"tokens": row, "targets": targets, "positions": positions, "document_ids": ids, "labels": label_T}
    return Batch(
        **{name: x[None] for name, x in per_token.items()},
        documents=packed_documents,
        reference_P2=reference(),
    )


def reference() -> Tensor:
    """Log-likelihoods of some other model."""
    return -20 * torch.rand(len(RECORDS), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def task_of(config, options: PreferenceOptions, execution: Execution | None = None) -> Preferences:
    task = Preferences(Decoder(config, execution=execution), options=options).double()
    randomize(task)
    return task


def step(task: Preferences, batch: Batch) -> dict[str, Tensor]:
    """The sums and all gradients."""
    loss = task.loss_sum(task(batch))
    loss["objective"].backward()
    return {**{name: x.detach() for name, x in loss.sums.items()}, **gradients(task)}


def by_logits(task: Preferences) -> dict[str, Tensor]:
    """The same by plain autograd: each reply by itself, from all logits."""
    sums = []
    for prompt, *replies in records():
        for reply in replies:
            tokens = torch.cat([prompt, reply])[None]
            logits = task.network.logits(task.network(tokens, torch.arange(tokens.shape[1])[None], None))
            found = logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(1, reply[:, None])
            sums.append(found.sum())
    lengths = torch.tensor([lengths[1:] for lengths in RECORDS], dtype=torch.float64)
    losses = by_the_papers(task.options, torch.stack(sums).view(-1, 2), lengths)
    losses.sum().backward()
    return {"objective": losses.sum().detach(), **gradients(task)}


def by_the_papers(options: PreferenceOptions, sums: Tensor, lengths: Tensor) -> Tensor:
    """The losses [P], written out once more."""
    (first, second), beta = sums.unbind(1), options.beta
    ratio_first, ratio_second = (sums - reference()).unbind(1)
    mean_first, mean_second = (sums / lengths).unbind(1)
    if options.loss == "dpo":
        losses = -logsigmoid(beta * ((first - second) - (reference()[:, 0] - reference()[:, 1])))
    elif options.loss == "ipo":
        losses = (ratio_first / lengths[:, 0] - ratio_second / lengths[:, 1] - 1 / (2 * beta)).square()
    elif options.loss == "simpo":
        losses = -logsigmoid(beta * mean_first - beta * mean_second - options.margin)
    elif options.loss == "orpo":
        odds_first, odds_second = (mean.exp() / (1 - mean.exp()) for mean in (mean_first, mean_second))
        losses = -mean_first - beta * logsigmoid((odds_first / odds_second).log())
    else:
        kl = ratio_second.detach().mean().clamp(min=0)
        good = options.desirable_weight * (1 - torch.sigmoid(beta * (ratio_first - kl)))
        bad = options.undesirable_weight * (1 - torch.sigmoid(beta * (kl - ratio_first)))
        losses = torch.where(torch.tensor(LABELS) > 0, good, bad)
    return losses - options.nll_weight * mean_first


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shared", [False, True])
def test_losses_and_gradients_equal_plain_autograd(name, shared):
    wanted = by_logits(task_of(CONFIGS["dense"], OPTIONS[name]))
    for execution in (Execution(), Execution("inputs", "host", chunk_tokens=7)):
        got = step(task_of(CONFIGS["dense"], OPTIONS[name], execution), packed(shared=shared))
        for key, value in wanted.items():
            torch.testing.assert_close(got[key], value, rtol=1e-10, atol=1e-10, msg=lambda t, k=key: f"{k}: {t}")


@pytest.mark.parametrize("config", ["cap", "bias"])
def test_every_head_weighs_its_tokens(config):
    wanted = by_logits(task_of(CONFIGS[config], OPTIONS["dpo"]))
    for execution in (Execution(), Execution("attention", "host", chunk_tokens=5)):
        got = step(task_of(CONFIGS[config], OPTIONS["dpo"], execution), packed(shared=True))
        for key, value in wanted.items():
            torch.testing.assert_close(got[key], value, rtol=1e-10, atol=1e-10, msg=lambda t, k=key: f"{k}: {t}")


def test_experts_add_their_losses():
    task = task_of(tiny_config(), OPTIONS["dpo"])
    sums = task.loss_sum(task(packed(shared=True)))
    assert {"balance", "router_z"} <= sums.sums.keys()
    assert task.denominators(packed(shared=True)) == {"labels": len(RECORDS), "tokens": 23 + 39 + 8}


@pytest.mark.parametrize("name", ["dpo", "simpo", "kto"])
def test_what_a_run_reports(name):
    task, batch = task_of(CONFIGS["dense"], OPTIONS[name]), packed(shared=True)
    sums = task.loss_sum(task(batch)).sums
    scored = task.score(batch)
    assert scored.right_Bt is not None
    torch.testing.assert_close(scored.nll_Bt.double().sum(), sums["preference"].double(), rtol=1e-6, atol=0)
    assert scored.right_Bt.sum() == sums["right_preferences"]
    replies = task.reply_sums(batch)
    # as the model itself was the reference
    own = task.loss_sum(task(replace(batch, reference_P2=replies))).sums
    if name == "dpo":
        assert abs(float(own["preference"]) - len(RECORDS) * torch.tensor(2.0).log().item()) < 1e-6
        assert abs(float(own["kl"])) < 1e-9
    assert ("kl" in sums) == (name != "simpo")


def test_records_are_found_by_their_documents():
    assert reply_documents(packed(shared=False).documents).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # the third prompt has no token but its last, so its replies stand alone
    assert reply_documents(packed(shared=True).documents).tolist() == [[1, 2], [4, 5], [6, 7], [9, 10]]


def test_texts_have_no_preferences():
    batch = replace(packed(shared=True), labels=None)
    with pytest.raises(ConfigError, match="two replies"):
        task_of(CONFIGS["dense"], OPTIONS["dpo"]).prepare(batch)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": "ppo"}, "dpo, ipo, simpo, orpo, kto"),
        ({"beta": 0.0}, "positive"),
        ({"margin": -1.0}, "at least 0"),
        ({"nll_weight": float("nan")}, "at least 0"),
    ],
)
def test_options_are_checked(changes, words):
    with pytest.raises(ConfigError, match=words):
        PreferenceOptions(**changes)


def test_every_name_has_a_formula():
    assert list(LOSSES) == list(PREFERENCE_LOSSES)


def test_large_sums_stay_finite():
    sums = torch.tensor([[-3000.0, -9000.0], [-9000.0, -3000.0]], dtype=torch.float64, requires_grad=True)
    lengths, zeros = torch.full((2, 2), 1000.0, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    for name in LOSSES:
        scores = ReplyScores(sums, lengths, zeros, torch.tensor([True, False]))
        losses = preference_losses(scores, PreferenceOptions(loss=name))
        (slopes,) = torch.autograd.grad(losses.sum(), sums)
        assert losses.isfinite().all()
        assert slopes.isfinite().all()
