"""Dropout: its statistics, and that it depends on seed, token and channel and on nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from longctx.model.decoder import Decoder
from longctx.model.layers import dropout as module
from longctx.model.layers.dropout import Draw, Dropout
from longctx.model.training_pass import Execution, TrainingPass
from tests.longctx.attention_cores import Blind
from tests.longctx.samples import dense_config, documents_of, one_document, packed_batch, tiny_config
from tests.oracles import mix32, mix64

M = 256


def dropped(rate: float = 0.5, *, seed: int = 3, site: int = 0, tokens: Tensor | None = None, width: int = M) -> Tensor:
    """Which values are dropped, [1, t, width]."""
    tokens = torch.arange(512)[None] if tokens is None else tokens
    return Dropout(rate, seed, tokens)(torch.ones(*tokens.shape, width), site) == 0


def within_noise(share: Tensor | float, expected: float, count: int) -> bool:
    """Whether a share among ``count`` independent draws is as near as 5 standard deviations."""
    return bool((torch.as_tensor(share) - expected).abs().max() < 5 * (expected * (1 - expected) / count) ** 0.5)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_shares_are_those_asked_for_in_every_token_and_channel(rate):
    out = dropped(rate, tokens=torch.arange(2048)[None]).float()[0]
    assert within_noise(out.mean(), rate, out.numel())
    assert within_noise(out.mean(0), rate, 2048)
    assert within_noise(out.mean(1), rate, M) or rate == 0.001  # too few draws a token for a bell curve


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_stays_is_scaled_and_rounded_once(dtype):
    x = torch.randn(1, 64, M, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    rule = Dropout(0.1, 0, torch.arange(64)[None])
    out = rule(x, 5)
    kept = out != 0
    assert out.dtype == dtype
    partial = torch.float64 if dtype == torch.float64 else torch.float32
    wanted = (x.to(partial) * (1 / 0.9)).to(dtype)
    assert torch.equal(out[kept], wanted[kept])
    assert 0 < (~kept).sum() < kept.sum()


def test_infinities_are_dropped_too():
    out = Dropout(0.5, 0, torch.arange(64)[None])(torch.full((1, 64, M), torch.inf), 0)
    assert not out.isnan().any()


def test_seeds_sites_tokens_and_channels_are_independent():
    base = dropped()
    others = {
        "seed": dropped(seed=4),
        "seed 32 bits on": dropped(seed=3 + 2**32),
        "negative seed": dropped(seed=-3),
        "site": dropped(site=1),
        "embedding": dropped(site=-1),
        "next token": dropped(tokens=torch.arange(1, 513)[None]),
        "next channel": base.roll(1, -1),
        "distant token": dropped(tokens=torch.arange(512)[None] + 10_000_000),
    }
    found = {"base": base, **others}
    for (a, one), (b, other) in combinations(found.items(), 2):
        assert within_noise((one == other).float().mean(), 0.5, base.numel()), f"{a} and {b}"


def test_no_two_rows_are_alike_at_any_distance():
    """Two sites, or two tokens, that drop the same values would show as a row of equal bits."""
    rows = torch.cat([dropped(site=site)[0] for site in range(-1, 3)]).float() * 2 - 1
    alike = rows @ rows.T / M
    alike.fill_diagonal_(0)
    assert alike.abs().max() < 6.5 / M**0.5  # of 2 million pairs
    columns = rows.T @ rows / len(rows)
    columns.fill_diagonal_(0)
    assert columns.abs().max() < 6 / len(rows) ** 0.5


def test_bits_do_not_depend_on_what_else_is_computed(monkeypatch):
    tokens = torch.arange(24).view(2, 12)
    whole = dropped(tokens=tokens, width=7)
    shuffled = torch.tensor([5, 0, 11])
    assert torch.equal(dropped(tokens=tokens[:, shuffled], width=7), whole[:, shuffled])
    assert torch.equal(dropped(tokens=tokens, width=3), whole[..., :3])
    assert dropped(tokens=tokens[:, :0], width=7).shape == (2, 0, 7)
    for chunk in (1, 20, 21, 1 << 30):
        monkeypatch.setattr(module, "_CHUNK_VALUES", chunk)
        assert torch.equal(dropped(tokens=tokens, width=7), whole)


def by_whole_numbers(rate: float, seed: int, site: int, token: int, channel: int) -> bool:
    """The rule in Python's unbounded whole numbers: SplitMix64 of seed and site, then MurmurHash3's finaliser."""
    key = mix64((mix64(seed % 2**64) + site) % 2**64)
    row = mix32((token + key % 2**31) % 2**32) ^ (key >> 32)
    bits = mix32(row ^ (channel * 0x9E3779B1 % 2**32))
    return (bits ^ 0x80000000) < int(rate * 2**32)  # compared as signed numbers, whose order starts at the top bit


def test_the_bits_stay_what_they_are():
    """A resumed run continues with the values it would have dropped: a change here breaks that."""
    tokens = [0, 1, 77, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5]
    for rate, seed, site in ((0.5, 0, -1), (0.1, 12345, 0), (0.3, 2**63 + 7, 129)):
        wanted = [[by_whole_numbers(rate, seed, site, token, c) for c in range(300)] for token in tokens]
        assert dropped(rate, seed=seed, site=site, tokens=torch.tensor([tokens]), width=300)[0].tolist() == wanted


def test_backward_drops_the_same_values_and_keeps_a_number_a_token():
    x = torch.randn(1, 33, M, dtype=torch.float64, requires_grad=True)
    rule, kept = Dropout(0.3, 0, torch.arange(33)[None]), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = rule(x, 0)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, (out != 0).double() / 0.7)
    assert sum(t.numel() * t.element_size() for t in kept) <= 33 * 8
    few = x[:, :, :3].detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rule(x, 1), (few,))


def test_a_strided_gradient_is_taken():
    x = torch.ones(1, 4, 6, requires_grad=True)
    rule = Dropout(0.5, 0, torch.arange(4)[None])
    rule(x, 0).sum().backward()  # the gradient of a sum has stride 0
    assert x.grad is not None
    assert torch.equal(x.grad, rule(torch.ones(1, 4, 6), 0))
    turned = torch.ones(1, 6, 4).transpose(1, 2)
    assert torch.equal(rule(turned, 0), rule(turned.contiguous(), 0))


# In the decoder


def decoder_of(*, rate: float = 0.25, experts: bool = False, core=None, keep="all", **changes) -> Decoder:
    config = (tiny_config if experts else dense_config)(residual_dropout=rate, **changes)
    return Decoder(config, core and {"softmax": core}, execution=Execution(keep)).double()


def run(decoder: Decoder, batch, *, seed: int | None = 11, first_tokens: tuple[int, ...] = (0,)) -> Tensor:
    return decoder(
        batch.tokens,
        batch.positions,
        batch.cu_seqlens,
        document_ids=batch.document_ids,
        row_tokens=batch.row_tokens,
        training_pass=TrainingPass(seed=seed, first_tokens=first_tokens),
    )


def test_nothing_is_dropped_without_a_seed_or_a_rate():
    batch = packed_batch([[5, 11]])
    plain = run(decoder_of(rate=0.0), batch)
    assert torch.equal(run(decoder_of(), batch, seed=None), plain)
    assert torch.equal(decoder_of()(batch.tokens, batch.positions, batch.cu_seqlens), plain), "evaluation"
    assert not torch.equal(run(decoder_of(), batch), plain)
    assert torch.equal(run(decoder_of(), batch), run(decoder_of(), batch))
    assert not torch.equal(run(decoder_of(), batch), run(decoder_of(), batch, seed=12))


@pytest.mark.parametrize("order", ["pre", "post", "sandwich"])
def test_sites_are_the_embedding_and_what_each_part_adds(order, monkeypatch):
    """Recorded one by one: 1 + 2 · layers sites, each once, over all of the width."""
    decoder, batch, sites, site_of = decoder_of(norm_order=order), one_document(1, 6), [], {}
    draw, drop = Dropout.draw, Draw.drop

    def recording_draw(self, site):
        made = draw(self, site)
        site_of[id(made)] = site, made  # kept, so that no other draw gets its id
        return made

    def recording_drop(self, x_BtM):
        sites.append((site_of[id(self)][0], tuple(x_BtM.shape)))
        return drop(self, x_BtM)

    monkeypatch.setattr(Dropout, "draw", recording_draw)
    monkeypatch.setattr(Draw, "drop", recording_drop)
    run(decoder, batch)
    assert sites == [(site, (1, 6, 32)) for site in (-1, 0, 1, 2, 3)]


@pytest.mark.parametrize("rows", [[[17]], [[5, 11, 1]], [[5, 11, 1], [1, 16, 0]]])
def test_shares_of_a_sequence_drop_what_the_whole_drops(rows):
    batch = packed_batch(rows)
    decoder = decoder_of(core=Blind())
    whole = run(decoder, batch).flatten(0, 1)
    flat = batch.flatten_rows()
    for rank in range(3):
        mine = flat.map_tokens(lambda x, rank=rank: x[:, rank::3])
        torch.testing.assert_close(run(decoder, mine)[0], whole[rank::3], atol=1e-13, rtol=0)


def test_documents_whose_positions_restart_drop_different_values(monkeypatch):
    decoder, batch, seen = decoder_of(), packed_batch([[6, 6]]), []
    known = Dropout.__call__
    monkeypatch.setattr(Dropout, "__call__", lambda self, x, site: seen.append(self.token_Bt) or known(self, x, site))
    run(decoder, batch)
    assert seen[-1].tolist() == [list(range(12))]  # not 0 … 5 twice
    given = TrainingPass(seed=11)
    decoder(batch.tokens, batch.positions, batch.cu_seqlens, training_pass=given)  # a whole batch needs no ids
    assert seen[-1].tolist() == [list(range(12))]
    with pytest.raises(ValueError, match="needs `document_ids`"):
        decoder(batch.tokens[:, :5], batch.positions[:, :5], batch.cu_seqlens, training_pass=given)


def test_micro_batches_of_one_seed_continue_its_places():
    batch = packed_batch([[6, 6]])
    parts = documents_of(batch)
    decoder = decoder_of(core=Blind())
    whole = run(decoder, batch)
    for part, start in zip(parts, (0, 6), strict=True):
        found = run(decoder, part, first_tokens=(start,))
        torch.testing.assert_close(found, whole[:, start : start + 6], atol=1e-13, rtol=0)


@pytest.mark.parametrize("flat", [False, True])
def test_rows_keep_their_places_in_whatever_order_they_come(flat):
    """Rows 2, 0 and 3 of a step as one micro-batch, as rows and laid end to end."""
    batch = packed_batch([[4, 2], [6], [1, 5], [6]])
    decoder = decoder_of(core=Blind())
    whole = run(decoder, batch)
    chosen = (2, 0, 3)
    part = packed_batch([[[4, 2], [6], [1, 5], [6]][row] for row in chosen])
    part = replace(part, tokens=batch.tokens[list(chosen)])
    if flat:
        part = part.flatten_rows()
    found = run(decoder, part, first_tokens=tuple(6 * row for row in chosen))
    torch.testing.assert_close(found.view(3, 6, -1), whole[list(chosen)], atol=1e-13, rtol=0)
