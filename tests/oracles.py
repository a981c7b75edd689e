"""Training by definition in one process: full masks, whole logits, plain AdamW. None of our parallel code."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch, PackedDocuments, Stream
from longctx.config import ModelConfig
from longctx.model.decoder import Decoder


def mix64(x: int) -> int:
    """SplitMix64's next number, in Python's unbounded whole numbers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def mix32(x: int) -> int:
    """MurmurHash3's finaliser, in Python's unbounded whole numbers."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
    return x ^ (x >> 16)


class MaskedAttention:
    """A core that forms every score of the flattened rows; masks other documents and, if causal, what lies ahead."""

    def plan(self, mask, shapes, placement=None):
        return mask

    def __call__(self, q_BtHD, k_BtKD, v_BtKD, *, plan, cache=None, scores=None, weights=(), recompute_cache=None):
        assert cache is None
        assert not weights
        assert scores is None or not scores.rules
        B, T, H, D = q_BtHD.shape
        q, k, v = (x.reshape(1, B * T, -1, D).transpose(1, 2) for x in (q_BtHD, k_BtKD, v_BtKD))
        lengths = torch.tensor(plan.documents.bounds).diff()
        document = torch.arange(len(lengths)).repeat_interleave(lengths)
        seen = document[:, None] == document
        if plan.causal:
            seen = seen.tril()
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2).reshape(B, T, H, D)


@dataclass
class Curve:
    """What a training run shows at each step."""

    losses: list[float]
    norms: list[float]
    counts: list[Tensor]
    """Tokens by layer and expert, [L, E]; [0, 0] in a dense model."""


def train_alone(
    config: ModelConfig, steps: list[list[Batch]], *, lr: float, clip_norm: float, weight_decay: float = 0.1
) -> tuple[Curve, dict[str, Tensor]]:
    """Loss and gradient norm of every step, and the final weights; ``steps`` lists the batches of each step."""
    decoder = Decoder(config, {"softmax": MaskedAttention()}, seed=0)
    matrices = [p for p in decoder.parameters() if p.ndim >= 2]
    vectors = [p for p in decoder.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    curve = Curve([], [], [])
    for batches in steps:
        targets = sum(b.num_targets for b in batches)
        tokens = sum(int((b.document_ids != PADDING_DOCUMENT).sum()) for b in batches)
        nll, loss, counts_LE = torch.zeros(()), torch.zeros(()), torch.zeros(0, 0)
        for batch in batches:
            batch_nll, balance, batch_counts_LE = losses(decoder, batch)
            counts_LE = batch_counts_LE if batch is batches[0] else counts_LE + batch_counts_LE
            nll = nll + batch_nll.detach() / targets
            loss = loss + batch_nll / targets + config.balance_loss_weight * balance / tokens
        optimizer.zero_grad()
        loss.backward()
        curve.norms.append(float(torch.nn.utils.clip_grad_norm_(decoder.parameters(), clip_norm)))
        optimizer.step()
        curve.losses.append(float(nll))
        curve.counts.append(counts_LE)
    return curve, {name: p.detach().clone() for name, p in decoder.named_parameters()}


def losses(decoder: Decoder, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Summed negative log-likelihood, summed balance loss, and tokens by layer and expert of a batch."""
    hidden, stats = decoder(
        batch.tokens, batch.positions, batch.cu_seqlens, document_ids=batch.document_ids, return_stats=True
    )
    logits = decoder.logits(hidden).float()
    nll = functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )
    balance = torch.zeros(())
    for layer in stats:
        for counts, prob_sums in zip(layer.counts_SE, layer.prob_sums_SE, strict=True):
            if counts.sum():
                balance = balance + len(counts) * (counts * prob_sums).sum() / counts.sum()
    counts = [layer.counts_SE.sum(0) for layer in stats]
    return nll, balance, torch.stack(counts) if counts else torch.zeros(0, 0)


def packed_batch(*, rows: int, seq_len: int, vocab_size: int, seed: int, padding: bool = True) -> Batch:
    """Rows of random documents of very different lengths, one-token documents and padding included."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (rows, seq_len), generator=g)
    targets, positions, documents = tokens.clone(), torch.empty_like(tokens), torch.empty_like(tokens)
    bounds = [0]
    for row in range(rows):
        cuts = torch.randperm(seq_len - 1, generator=g)[: 2 + seed % 4] + 1
        ends = sorted({1, *cuts.tolist(), seq_len})
        for index, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
            padded = padding and stop == seq_len and index and row % 2 == 0
            targets[row, start : stop - 1] = tokens[row, start + 1 : stop]
            targets[row, stop - 1] = IGNORED_TARGET
            positions[row, start:stop] = torch.arange(stop - start)
            documents[row, start:stop] = PADDING_DOCUMENT if padded else len(bounds) - 1
            if padded:
                targets[row, start:stop] = IGNORED_TARGET
            bounds.append(row * seq_len + stop)
    packed = PackedDocuments.of(bounds)
    return Batch(tokens=tokens, targets=targets, positions=positions, document_ids=documents, documents=packed)


def stream_of(batch: Batch) -> Stream:
    """Return the stream that ``next_tokens`` makes the batch of."""
    values = {field.name: getattr(batch, field.name) for field in fields(Stream)}
    return Stream(**{**values, "next_token_ids": batch.targets})
