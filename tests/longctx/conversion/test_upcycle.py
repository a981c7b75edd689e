"""Dense models as mixtures of experts: the same function and gradients at the start, and checkpoints of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from longctx.checkpoint_format import CheckpointReader, model_config
from longctx.config import ModelConfig
from longctx.conversion.checkpoint_writer import save_master_weights
from longctx.conversion.upcycle import Upcycling, upcycle_checkpoint, upcycle_config, upcycle_tensors
from longctx.errors import CheckpointError, ConfigError
from longctx.generation.load_decoder import load_model
from longctx.model.decoder import Decoder
from longctx.model.layers.initialize import initial_value
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.samples import dense_config, gradients, packed_batch, randomize, step_loss

WAYS = {
    "copy": Upcycling(num_experts=4),
    "copy, three experts a token": Upcycling(num_experts=5, experts_per_token=3),
    "copy, all experts": Upcycling(num_experts=3, experts_per_token=3),
    "granular": Upcycling(num_experts=8, granularity=2),
    "granular, the dense compute": Upcycling(num_experts=12, experts_per_token=4, granularity=4),
    "granular, thirds": Upcycling(num_experts=9, experts_per_token=6, granularity=3),
    "granular, one copy": Upcycling(num_experts=6, experts_per_token=6, granularity=6),
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"qkv_bias": False, "tie_embeddings": False},
    "biases": {"ffn_bias": True, "activation": "geglu"},
    "post norms, capped gates": {"norm_order": "post", "activation": "swiglu_oai", "ffn_bias": True},
}


def both(config: ModelConfig, upcycling: Upcycling, dtype: torch.dtype) -> tuple[CausalLM, CausalLM]:
    """A dense model with weights that differ everywhere, and what it is upcycled to."""
    dense = CausalLM(Decoder(config).to(dtype))
    randomize(dense, std=0.4)
    upcycled = Decoder(upcycle_config(config, upcycling), seed=None).to(dtype)
    upcycled.load_state_dict(dict(upcycle_tensors(dense.network.state_dict().items(), config, upcycling)))
    return dense, CausalLM(upcycled)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_the_logits_are_the_dense_models(way, model):
    batch, logits = packed_batch([[9, 15], [20, 4]]), []
    for part in both(dense_config(**MODELS[model]), WAYS[way], torch.float32):
        decoder = part.network
        with torch.no_grad():
            logits.append(decoder.logits(decoder(batch.tokens, batch.positions, batch.cu_seqlens)))
    assert (logits[0] - logits[1]).abs().max() <= 1e-5
    assert logits[0].std() > 0.5, "they are no constants"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_dense_models(way, model):
    """Of all that is shared, and of the copies of a shard together."""
    batch, g = packed_batch([[9, 15], [20, 4]]), WAYS[way].granularity
    wanted, got = [], []
    for part, found in zip(both(dense_config(**MODELS[model]), WAYS[way], torch.float64), (wanted, got), strict=True):
        loss = step_loss(part.loss_sum(part(batch)), 0.0)
        loss.backward()
        found += [loss.detach(), gradients(part.network)]
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-12, atol=0)
    for name, grad in got[1].items():
        if "mlp" not in name:
            torch.testing.assert_close(grad, wanted[1][name], rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    for name in (n for n in wanted[1] if "mlp" in n):
        layer, which, kind = name.rsplit(".", 2)
        suffix = "_bias" if kind == "bias" else ""
        part = got[1][f"{layer}.experts.{'down_proj' if which == 'down_proj' else 'gate_up_proj'}{suffix}"]
        shards = part.unflatten(0, (-1, g)).sum(0)  # [g, …], over copies
        if which != "down_proj":
            together = shards.chunk(2, dim=1)[which == "up_proj"].flatten(0, 1)
        else:
            together = shards.sum(0) if suffix else g * shards.transpose(0, 1).flatten(1)
        torch.testing.assert_close(together, wanted[1][name], rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_tokens_visit_whole_copies_and_all_copies_are_used():
    upcycling, batch = WAYS["granular, thirds"], packed_batch([[48]])
    _, model = both(dense_config(), upcycling, torch.float32)
    for layer in model.network(batch.tokens, batch.positions, return_stats=True)[1]:
        copies = layer.counts_SE.sum(0).view(3, 3)
        assert (copies == copies[:, :1]).all(), "shards of one copy are visited together"
        assert copies.sum() == 6 * 48
        assert (copies > 0).all()


def test_routers_are_initial_values_of_the_seed_and_their_name():
    config, name = dense_config(), "model.layers.1.mlp.gate.weight"
    tensors = list(Decoder(config).state_dict().items())
    routers = {
        seed: dict(upcycle_tensors(tensors, config, Upcycling(num_experts=4, seed=seed)))[name] for seed in (0, 7)
    }
    of_copies = upcycle_config(config, Upcycling(num_experts=4))
    for seed, router in routers.items():
        assert torch.equal(router, initial_value(name, (4, 32), of_copies, seed))
    assert not torch.equal(routers[0], routers[7])
    granular = dict(upcycle_tensors(tensors, config, Upcycling(num_experts=8, granularity=2)))[name]
    assert torch.equal(granular, routers[0].repeat_interleave(2, 0))


def test_tensors_may_come_in_any_order_and_dtype():
    config, upcycling = dense_config(ffn_bias=True), WAYS["granular"]
    tensors = [(name, tensor.bfloat16()) for name, tensor in Decoder(config).state_dict().items()]
    forward, backward = (dict(upcycle_tensors(order, config, upcycling)) for order in (tensors, tensors[::-1]))
    assert {t.dtype for t in forward.values()} == {torch.bfloat16}
    torch.testing.assert_close(backward, forward, rtol=0, atol=0)
    lacking = [(n, t) for n, t in tensors if n != "model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"lacks the matching .*layers\.1"):
        list(upcycle_tensors(lacking, config, upcycling))


def test_fields_that_a_dense_model_does_not_read_do_not_matter():
    config = dense_config(normalize_gates=False, routed_scale=3.0, score_function="sigmoid", selection_bias=True)
    upcycled = upcycle_config(config, Upcycling(num_experts=4))
    assert upcycled == upcycle_config(dense_config(), Upcycling(num_experts=4))
    assert (upcycled.experts_per_token, upcycled.expert_ffn_size, upcycled.normalize_gates) == (2, 48, True)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("8", (8, 0, 1)), ("8,2", (8, 2, 1)), ("64,16,8", (64, 16, 8))],
)
def test_the_command_lines_spelling(text, wanted):
    assert dataclasses.astuple(Upcycling.parse(text))[:3] == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "EXPERTS"), ("a", "EXPERTS"), ("1,2,3,4", "EXPERTS"), ("8,2,0", "granularity=0 must be at least 1"),
        ("9,2,2", "Try 8 or 10"), ("0", "0 experts"), ("8,3,2", "3 experts per token .* Try 2 or 4"),
        ("8,-1", "-1 experts per token"), ("8,1", "would not train the router.* Try 2"),
    ],
)  # fmt: skip
def test_what_is_no_upcycling_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        Upcycling.parse(text)


@pytest.mark.parametrize(
    ("changes", "upcycling", "said"),
    [
        ({"num_experts": 4}, Upcycling(num_experts=4), "num_experts=4 already"),
        ({"activation": "relu2"}, Upcycling(num_experts=4), "activation='relu2' is not gated"),
        ({}, Upcycling(num_experts=10, granularity=5), r"granularity=5 does not divide .*=48\. Try one of \[3, 4, 6\]"),
        ({}, Upcycling(num_experts=1), "experts_per_token=2"),
    ],
)
def test_models_that_cannot_be_upcycled_are_refused(changes, upcycling, said):
    with pytest.raises(ConfigError, match=said):
        upcycle_config(dataclasses.replace(dense_config(), **changes), upcycling)


def test_a_checkpoint_is_upcycled_as_a_whole(tmp_path):
    config, upcycling = dense_config(tie_embeddings=False), WAYS["granular"]
    dense = Decoder(config)
    randomize(dense, std=0.4)
    (tmp_path / "tokenizer.model").write_bytes(b"a tokenizer")
    origin = {"imported": {"model_type": "llama", "token_ids": {"eos_token_id": 7}, "dtype": "bfloat16"}}
    save_master_weights(
        config, dense.state_dict().items(), tmp_path / "dense",
        dtype=torch.bfloat16, training=origin, auxiliary_files={"tokenizer.model": tmp_path / "tokenizer.model"},
    )  # fmt: skip
    seen = []
    upcycle_checkpoint(
        tmp_path / "dense", tmp_path / "out", upcycling, shard_bytes=20_000, progress=lambda *n: seen.append(n)
    )
    reader = CheckpointReader(tmp_path / "out")
    assert (reader.verify(), reader.step, reader.roles, reader.dtype) == ([], 0, ("master",), torch.float32)
    assert model_config(reader) == upcycle_config(config, upcycling)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"a tokenizer"
    said = reader.manifest["training"]
    assert said["imported"] == origin["imported"] | {"dtype": "float32", "dtypes": {}}
    assert said["upcycled"] == {"from": "dense", "step": 0, **dataclasses.asdict(upcycling)}
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert seen == [(n, len(reader.names())) for n in range(1, len(reader.names()) + 1)]
    batch, logits = packed_batch([[24]]), []
    for model in (dense, load_model(tmp_path / "out")):
        with torch.no_grad():
            logits.append(model.logits(model(batch.tokens, batch.positions)))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=0)


def test_a_damaged_or_wrong_checkpoint_leaves_nothing(tmp_path):
    config = dense_config()
    tensors, save = list(Decoder(config).state_dict().items()), {"dtype": torch.float32, "training": {}}
    with pytest.raises(CheckpointError, match=r"missing \(1\)"):
        save_master_weights(config, tensors[1:], tmp_path / "wrong", **save)
    save_master_weights(config, tensors, tmp_path / "dense", **save)
    path = next((tmp_path / "dense").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="is damaged"):
        upcycle_checkpoint(tmp_path / "dense", tmp_path / "out", Upcycling(num_experts=4))
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
