"""Tiny models and packed batches for the tests of ``longctx``."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch, PackedDocuments
from longctx.config import ModelConfig
from longctx.model.activation_offload import Keep
from longctx.model.attention.core import AttentionCore
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from longctx.objectives.causal_lm import CausalLM
from longctx.objectives.task import LossSum, weighed
from longctx.objectives.token_prediction import prediction_terms


def tiny_config(**changes) -> ModelConfig:
    """Two layers of everything: grouped-query heads, four experts, a shared expert; weights large enough to matter."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_size": 48,
        "num_experts": 4,
        "expert_ffn_size": 16,
        "shared_ffn_size": 24,
        "init_std": 0.1,
    }
    return ModelConfig(**{**sizes, **changes})


def dense_config(**changes) -> ModelConfig:
    """The same shape with a dense FFN and nothing of a mixture."""
    return tiny_config(num_experts=0, shared_ffn_size=0, **changes)


def packed_batch(rows: list[list[int]], *, padding: int = 0, vocab_size: int = 97, seed: int = 0) -> Batch:
    """A batch whose row b packs documents of ``rows[b]`` tokens and ends in ``padding`` tokens of padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [n for row in rows for n in (*row, padding) if n]
    packed = PackedDocuments.of(torch.tensor([0, *lengths]).cumsum(0))
    shape = (len(rows), sum(rows[0]) + padding)
    tokens = torch.randint(vocab_size, shape, generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths]).view(shape)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(shape)
    targets = tokens.flatten().roll(-1)
    targets[packed.cu_seqlens[1:] - 1] = IGNORED_TARGET
    targets = targets.view(shape)
    if padding:
        targets[:, -padding:], ids[:, -padding:] = IGNORED_TARGET, PADDING_DOCUMENT
    return Batch(tokens=tokens, targets=targets, positions=positions, document_ids=ids, documents=packed)


BATCH = packed_batch([[7, 11], [15, 3]], padding=2)


def exact_lm(*, core: AttentionCore | None = None, keep: Keep = "all", dispatcher=None, **changes) -> CausalLM:
    """A tiny model with experts in float64."""
    cores = core and {"softmax": core}
    return CausalLM(Decoder(tiny_config(**changes), cores, dispatcher=dispatcher, execution=Execution(keep))).double()


def ahead(batch: Batch) -> Batch:
    """The batch with what blocks for multi-token prediction read."""
    return replace(batch, next_token_ids=batch.targets)


def step_loss(sums: LossSum, balance: float, router_z: float = 0.0) -> Tensor:
    """What training differentiates, by its own formula with these weights; of all counts 1, so that sums stay sums."""
    experts = {} if "balance" in sums.sums else {"num_experts": 0}
    further = {"mtp_layers": 1} if "mtp" in sums.sums else {}
    config = tiny_config(balance_loss_weight=balance, router_z_loss_weight=router_z, **experts, **further)
    return weighed(prediction_terms(config, mtp_weight=0.3), sums, {"targets": 1, "tokens": 1, "ahead": 1})


def one_document(num_rows: int, num_tokens: int, *, seed: int = 0) -> Batch:
    """Rows of one document each."""
    return packed_batch([[num_tokens]] * num_rows, seed=seed)


def documents_of(batch: Batch) -> list[Batch]:
    """Every segment as a batch of its own."""
    flat = batch.flatten_rows()

    def cut(a: int, b: int) -> Batch:
        part = flat.map_tokens(lambda x: x[:, a:b])
        return Batch(
            tokens=part.tokens,
            targets=part.targets,
            positions=part.positions,
            document_ids=part.document_ids.clamp(max=0),
            documents=PackedDocuments.of([0, b - a]),
        )

    return [cut(a, b) for a, b in pairwise(batch.cu_seqlens.tolist())]


def randomize(module: torch.nn.Module, *, std: float = 0.3, seed: int = 0) -> None:
    """Give every parameter, norms and biases too, values that a test can tell apart from its neighbours'."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient by name, all of them present."""
    found = {name: p.grad for name, p in module.named_parameters()}
    missing = [name for name, grad in found.items() if grad is None]
    assert not missing, f"no gradient: {missing}"
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def hidden_and_gradients(decoder: Decoder, batch: Batch) -> dict[str, Tensor]:
    """Hidden states, and every gradient of a number that each of them enters."""
    decoder.zero_grad()
    hidden = decoder(batch.tokens, batch.positions, batch.cu_seqlens)
    hidden.sin().sum().backward()
    return {"hidden": hidden.detach()} | gradients(decoder)


def check_documents_are_alone(decoder: Decoder, batch: Batch) -> None:
    """Hidden states and gradients of packed documents are those of each by itself, in float64."""
    whole = hidden_and_gradients(decoder, batch)
    alone = [hidden_and_gradients(decoder, document) for document in documents_of(batch)]
    together = torch.cat([x["hidden"] for x in alone], 1).view_as(whole["hidden"])
    torch.testing.assert_close(whole["hidden"], together, rtol=1e-11, atol=1e-11)
    for name in set(whole) - {"hidden"}:
        torch.testing.assert_close(whole[name], sum(x[name] for x in alone), rtol=1e-10, atol=1e-10)
