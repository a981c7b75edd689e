"""The leak probe over a small model of its own, in which each kind of leak can be planted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, softmax

from longctx.evaluation.document_leaks import find_leaks

VOCABULARY, WIDTH = 50, 16
IDS_BT = torch.tensor([[0] * 7 + [1] * 5 + [2] * 8 + [-1] * 4, [3] * 11 + [4] + [5] * 12])
TOKENS_BT = torch.randint(VOCABULARY, IDS_BT.shape, generator=torch.Generator().manual_seed(1))


class Model:
    """Attention, learned positions, a convolution and a running state, each of its document alone but for ``leak``."""

    def __init__(self, leak: str = "") -> None:
        generator = torch.Generator().manual_seed(0)
        self.leak = leak
        self.embedding, self.positions = (
            torch.randn(size, WIDTH, generator=generator, dtype=torch.float64) for size in (VOCABULARY, 64)
        )

    def __call__(self, tokens_BT: Tensor, ids_BT: Tensor) -> Tensor:
        rows = zip(tokens_BT, ids_BT, strict=True)
        return torch.stack([self._row(tokens_T, ids_T) for tokens_T, ids_T in rows])

    def _row(self, tokens_T: Tensor, ids_T: Tensor) -> Tensor:
        num_tokens = len(tokens_T)
        whole = torch.zeros_like(ids_T)
        at_T = torch.arange(num_tokens)
        if self.leak != "position":
            at_T = (ids_T[:, None] == ids_T[None]).tril().sum(1) - 1
        x_TD = self.embedding[tokens_T] + self.positions[at_T]
        same_TT = (self._seen("mask", ids_T, whole)).tril()
        x_TD = x_TD + softmax((x_TD @ x_TD.T).masked_fill(~same_TT, -torch.inf), -1) @ x_TD
        before_T = torch.diagonal(self._seen("convolution", ids_T, whole), offset=-1)
        x_TD = x_TD + pad(x_TD[:-1] * before_T[:, None], (0, 0, 1, 0))
        return x_TD + self._seen("state", ids_T, whole).tril().double() @ x_TD

    def _seen(self, part: str, ids_T: Tensor, whole: Tensor) -> Tensor:
        if self.leak == part:
            ids_T = whole
        return ids_T[:, None] == ids_T[None]


def test_nothing_leaks_where_documents_are_alone():
    found = find_leaks(Model(), TOKENS_BT, IDS_BT, vocab_size=VOCABULARY)
    assert found[:4] == (0.0, 1.0, 0.0, 5 + 8 + 11 + 1 + 12)
    assert found.moved < 1e-12


@pytest.mark.parametrize(
    ("leak", "share"),
    # Of 37 tokens outside: all 13 behind in the row; the first of the next document alone; all of the row.
    [("mask", 13 / 37), ("convolution", 5 / 37), ("state", 13 / 37), ("position", 0.0)],
)
def test_each_planted_leak_is_seen(leak, share):
    found = find_leaks(Model(leak), TOKENS_BT, IDS_BT, vocab_size=VOCABULARY)
    # What a convolution brings over the boundary, a state carries on in the document.
    assert found.leaked_share == pytest.approx(share)
    assert (found.largest > 0.01) == (leak != "position")
    assert found.moved > 0.01


def test_a_change_within_the_tolerance_is_none_and_not_a_number_is_one():
    found = find_leaks(Model("mask"), TOKENS_BT, IDS_BT, vocab_size=VOCABULARY, tolerance=1e9)
    assert found.leaked_share == 0 < found.largest

    def broken(tokens: Tensor, ids: Tensor) -> Tensor:
        return Model()(tokens, ids) + torch.where(tokens == TOKENS_BT, 0.0, torch.nan).sum()

    assert find_leaks(broken, TOKENS_BT, IDS_BT, vocab_size=VOCABULARY).leaked_share == 1


def test_one_document_and_padding_are_compared_with_nobody():
    found = find_leaks(Model(), TOKENS_BT[:1, :9], torch.tensor([[0] * 7 + [-1] * 2]), vocab_size=VOCABULARY)
    assert (found.num_other_tokens, found.leaked_share, found.moved) == (0, 0.0, 0.0)


def test_a_first_document_of_one_token_is_refused():
    with pytest.raises(ValueError, match="one token"):
        find_leaks(Model(), TOKENS_BT[:, :3], torch.tensor([[0, 1, 1], [2, 2, 2]]), vocab_size=VOCABULARY)
