"""The validation loss: of tokens, whatever rows share a micro-batch with them."""

from __future__ import annotations

import math

import pytest
import torch

from data_pipeline.rows.pack import Row
from data_pipeline.rows.row_batches import build_batch
from launcher.training.validation import entropy, position_edges, validate
from longctx.architecture.rope import Rope
from longctx.model.decoder import Decoder
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.samples import dense_config

ROW, DOCUMENT = 96, 20
"""Tokens of a row and of each document: four fit, and sixteen tokens of padding remain."""


class Documents:
    """Documents of one length, as shards would have them."""

    padding, first_documents, is_masked = 3, (0,), False

    def check_files(self, documents) -> None:
        """Nothing is a file."""

    def slices(self, pieces):
        """Parts of documents whose tokens differ."""
        return [self.whole(number)[start:stop] for number, start, stop in pieces]

    @staticmethod
    def whole(number: int):
        generator = torch.Generator().manual_seed(number)
        return torch.randint(97, (DOCUMENT,), generator=generator).numpy().astype("uint16")


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "default"])
def test_rows_of_padding_and_padding_at_rows_ends_change_nothing(kind):
    """Beyond the documents' length a dynamic rope stretches, and LongRoPE takes its other table."""
    rope = Rope()
    if kind == "dynamic":
        rope = Rope(kind="dynamic", factor=4.0, original_max_positions=10)
    if kind == "longrope":
        pairs = dense_config().head_dim // 2
        factors = {"short_factor": (1.0,) * pairs, "long_factor": (8.0,) * pairs}
        rope = Rope(kind="longrope", factor=4.0, original_max_positions=32, **factors)
    model = CausalLM(Decoder(dense_config(rope=rope, max_positions=128)).double())
    rows = [Row.of([(4 * n + k, 0, DOCUMENT) for k in range(4)]) for n in range(3)]
    found = []
    for size in (1, 2, 3, 5):
        padded = rows + [Row()] * (-len(rows) % size)
        batches = [build_batch(Documents(), padded[n : n + size], ROW) for n in range(0, len(padded), size)]
        record = validate(model, batches, torch.device("cpu"), seq_len=ROW, vocab_size=97)
        assert record is not None
        found.append((record["loss"], record["num_targets"]))
    nll = [alone(model, number) for number in range(4 * len(rows))]
    wanted = float(torch.cat(nll).mean())
    assert {num_targets for _, num_targets in found} == {12 * (DOCUMENT - 1)}
    assert [loss for loss, _ in found] == pytest.approx([wanted] * len(found), rel=1e-6)


def alone(model: CausalLM, number: int) -> torch.Tensor:
    """The negative log-likelihoods of a document that is read alone."""
    ids = torch.from_numpy(Documents.whole(number).astype("int64"))[None]
    decoder = model.network
    with torch.no_grad():
        hidden = decoder(ids, torch.arange(DOCUMENT)[None])
        return decoder.token_nll(hidden, ids.roll(-1))[0, :-1]


def test_position_bins():
    assert position_edges(1) == [0]
    assert position_edges(9) == [0, 1, 2, 4, 8]
    assert position_edges(8) == [0, 1, 2, 4]


def test_unigram_entropy():
    assert entropy(torch.tensor([5, 5, 0, 0])) == pytest.approx(math.log(2))
    assert entropy(torch.tensor([3, 0])) == 0
    assert entropy(torch.zeros(3, dtype=torch.int64)) is None
