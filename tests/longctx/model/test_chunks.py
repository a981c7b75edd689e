"""Layers by chunks: the values and gradients of whole layers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from longctx.batch import Batch
from longctx.errors import ConfigError
from longctx.model.activation_offload import Keep, Store
from longctx.model.block import Block
from longctx.model.chunks import token_table
from longctx.model.chunks.chunk_store import DeviceStore
from longctx.model.decoder import Decoder
from longctx.model.experts.replay import RoutingReplay
from longctx.model.experts.router import RouterStats
from longctx.model.rotary import RotaryTable
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.samples import ahead, dense_config, gradients, packed_batch, randomize, step_loss, tiny_config

KEEPS: tuple[Keep, ...] = ("all", "attention", "inputs")
STORES: tuple[Store, ...] = ("device", "host", "disk")
EVERY_WAY = list(itertools.product(KEEPS, STORES, (1, 7, 100), (1, 2, 4)))
WAYS = EVERY_WAY[::11]
"""Every eleventh: each way to keep, store, length of a chunk and number of groups is among them."""
FEW = 2
"""So many others for each kind of layer where all have to be quick: over all kinds each way has its turn."""
RANDOM = {"num_layers": 3, "residual_dropout": 0.2}
CONFIGS = {
    "dense": dense_config(**RANDOM),
    "experts": tiny_config(**RANDOM, router_jitter=0.1),
    "experts, capacity": tiny_config(**RANDOM, router_jitter=0.1, capacity_factor=1.0),
    "experts, sandwich": tiny_config(**RANDOM, norm_order="sandwich", shared_gate=False, score_function="sigmoid"),
    "experts, post": tiny_config(**RANDOM, norm_order="post", shared_ffn_size=0),
    "linear": dense_config(**RANDOM, layers=("linear", "window", "full"), window=7),
    "gated delta": dense_config(
        **RANDOM, layers=("gated_delta", "full", "gated_delta"), delta_value_heads=8, attention_gate=True
    ),
    "mamba": dense_config(
        **RANDOM, layers=("mamba2", "full", "mamba2"), delta_key_heads=2, delta_value_heads=8, delta_value_dim=6
    ),
    "kimi": dense_config(**RANDOM, layers=("kda", "full", "kda"), delta_negative=True),
    "t5, sinks": dense_config(**RANDOM, position="t5"),
    "sinks": dense_config(**RANDOM, sinks=True),
    "alibi": dense_config(**RANDOM, position="alibi"),
    "relative": dense_config(**RANDOM, position="relative"),
    "ahead": dense_config(**RANDOM, mtp_layers=2, embedding_scale=2.0),
    "experts, ahead": tiny_config(**RANDOM, mtp_layers=1, layers=("gated_delta", "gated_delta", "full")),
    "norms of queries and keys": dense_config(**RANDOM, qk_norm="head"),
    "latent": dense_config(
        **RANDOM, num_kv_heads=4, q_lora_rank=16, kv_lora_rank=12, rope_head_dim=4, value_head_dim=8
    ),
}
BATCH = ahead(packed_batch([[9, 14], [20, 3]], padding=1))


def train(
    config, execution: Execution, dtype: torch.dtype, batch: Batch = BATCH, **loss_options: float
) -> dict[str | int, torch.Tensor]:
    """Loss sums and gradients of one step."""
    lm = CausalLM(Decoder(config, execution=execution), **loss_options)
    randomize(lm)
    lm.to(dtype)
    loss = lm.loss_sum(lm(batch, TrainingPass(seed=3)))
    step_loss(loss, 0.1).backward()
    return {**dict(enumerate(loss.tensors())), **gradients(lm)}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "ways"),
    [
        *((name, [EVERY_WAY[(7 * n + 29 * k) % len(EVERY_WAY)] for k in range(FEW)]) for n, name in enumerate(CONFIGS)),
        *(pytest.param(name, WAYS, marks=pytest.mark.slow) for name in CONFIGS),
    ],
)
def test_chunks_give_the_gradients_of_whole_layers(name, ways, tmp_path):
    wanted = train(CONFIGS[name], Execution(), torch.float64)
    for keep, store, chunk_tokens, head_groups in ways:
        execution = Execution(keep, store, chunk_tokens=chunk_tokens, head_groups=head_groups, store_path=str(tmp_path))
        got = train(CONFIGS[name], execution, torch.float64)
        for key, value in wanted.items():
            torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-12, msg=lambda t, k=key: f"{k}: {t}")


def chosen_and_dropped(execution: Execution) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    """The ids that routers chose, and their statistics, in a pass with a capacity."""
    lm, replay = CausalLM(Decoder(CONFIGS["experts, capacity"], execution=execution)), RoutingReplay()
    randomize(lm)
    _, stats = lm.network.to(torch.float64)(
        BATCH.tokens,
        BATCH.positions,
        BATCH.documents,
        document_ids=BATCH.document_ids,
        training_pass=TrainingPass(seed=3, replay=replay),
        return_stats=True,
    )
    return replay.experts_LNk, [layer.tensors() for layer in stats]


def test_a_capacity_drops_what_it_drops_of_whole_rows():
    wanted, wanted_stats = chosen_and_dropped(Execution())
    assert all(RouterStats.from_tensors(layer).diagnostics.dropped_assignments > 0 for layer in wanted_stats)
    got, got_stats = chosen_and_dropped(Execution("attention", chunk_tokens=7))
    assert torch.equal(got, wanted)
    torch.testing.assert_close(got_stats, wanted_stats, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("store", ["device", "host"])
def test_a_second_backward_pass_is_refused(store):
    lm = CausalLM(Decoder(CONFIGS["dense"], execution=Execution("attention", store, chunk_tokens=7)))
    loss = lm.loss_sum(lm(BATCH, TrainingPass(seed=3)))["objective"]
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="a second one through the same graph"):
        loss.backward()


@pytest.mark.parametrize("name", ["dense", "linear"])
def test_the_second_run_of_a_projection_computes_a_norm_and_nothing_else(name):
    """Values that nobody reads are not there; the gradients are."""
    block = Decoder(CONFIGS[name]).double().model.layers[0]
    assert isinstance(block, Block)
    x = torch.randn(2, 9, CONFIGS[name].hidden_size, dtype=torch.float64, requires_grad=True)
    table: RotaryTable | None = None
    if name == "dense":
        cos, sin = torch.randn(2, 2, 9, 1, CONFIGS[name].head_dim // 2, dtype=torch.float64)
        table = RotaryTable(cos, sin)
    weights, found = [x, *block.self_attn.parameters()], []
    for only_graph in (False, True):
        values = block.before_core(x, table, False, only_graph)
        factors = [
            torch.randn(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            for value in values
        ]
        found.append(torch.autograd.grad(values, weights, factors, allow_unused=True))
    assert all(value.isnan().all() and not any(value.stride()[:2]) for value in values)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_chunks_stay_on_the_device_as_they_were_computed():
    values, place = torch.arange(24.0).view(1, 6, 4), DeviceStore().empty_chunks(6, torch.empty(1, 3, 4))
    first, last = values[:, :3].clone(), values[:, 3:]
    place.write(slice(0, 3), first)
    place.write(slice(3, 6), last)
    assert place.fetch(slice(0, 3)).wait() is first
    kept = place.fetch(slice(3, 6)).wait()
    assert kept.untyped_storage().nbytes() == kept.nbytes, "all of a larger tensor would stay for a part of it"
    assert torch.equal(place.whole().wait(), values)


def test_chunks_replace_those_of_a_whole_tensor():
    """Which is somebody else's, and goes when the last of it is replaced."""
    whole = torch.zeros(1, 6, 4)
    place, alive = DeviceStore().put(whole), StorageWeakRef(whole.untyped_storage())
    place.write(slice(3, 6), torch.ones(1, 3, 4))
    assert torch.equal(place.fetch(slice(0, 3)).wait(), torch.zeros(1, 3, 4))
    assert torch.equal(whole, torch.zeros(1, 6, 4))
    del whole
    assert not alive.expired()
    place.write(slice(0, 3), torch.ones(1, 3, 4))
    assert alive.expired()
    assert torch.equal(place.whole().wait(), torch.ones(1, 6, 4))


def test_the_output_heads_gradient_does_not_outlive_its_use():
    """In float32 it may be the largest tensor of all: nothing may hold it while the layers go backward."""
    lm = CausalLM(Decoder(CONFIGS["dense"], execution=Execution("attention", chunk_tokens=7)))
    shape = lm.network.model.embed_tokens.weight.shape
    loss = lm.loss_sum(lm(BATCH, TrainingPass(seed=3)))["objective"]
    (dweight,) = (x for x in loss.grad_fn.saved_tensors if x is not None and x.shape == shape)  # type: ignore[union-attr]
    held, alive = StorageWeakRef(dweight.untyped_storage()), []
    del dweight
    lm.get_parameter("network.model.layers.2.self_attn.q_proj.weight").register_hook(
        lambda _: alive.append(not held.expired())
    )
    loss.backward()
    assert alive
    assert not any(alive)


@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize(("name", "loss"), [("dense", {}), ("ahead", {"z_loss": 0.1, "label_smoothing": 0.2})])
def test_gradients_of_tables_are_summed_by_rows(name, loss, rows, monkeypatch):
    """Rows whose logits are computed again, of tables of their own and tied ones, capped and scaled logits.

    Without dropout those of the embedding table, too.
    """
    for tied, dropout in ((True, 0.0), (False, 0.0), (False, 0.2)):
        config = replace(
            CONFIGS[name], tie_embeddings=tied, logit_softcap=3.0, logit_scale=0.5, residual_dropout=dropout
        )
        wanted = train(config, Execution(), torch.float64, **loss)
        with monkeypatch.context() as patch:
            patch.setattr(token_table, "SUMMED_VALUES", rows * config.hidden_size)
            got = train(config, Execution("attention", "host", chunk_tokens=7), torch.float64, **loss)
        for key, value in wanted.items():
            torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-12, msg=lambda t, k=key: f"{k}: {t}")
