"""An encoder beside the decoder: against ``torch.nn.Transformer``, packed against alone, and by chunks against
whole.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from longctx.architecture.size import count_parameters
from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.pairs import PAIRS, one_row, pair_batch, pair_tokens
from tests.longctx.samples import dense_config, gradients, randomize, step_loss

TRANSFORMER = ModelConfig(
    vocab_size=31,
    hidden_size=24,
    num_layers=2,
    encoder_layers=3,
    num_heads=3,
    num_kv_heads=3,
    head_dim=8,
    ffn_size=40,
    norm="layernorm",
    norm_eps=1e-5,
    activation="relu",
    ffn_bias=True,
    o_bias=True,
    position="none",
)
BOTH = {"num_layers": 2, "encoder_layers": 3}
CONFIGS = {
    "rope": dense_config(**BOTH),
    "post, learned": dense_config(**BOTH, norm_order="post", position="learned", norm="layernorm", max_positions=32),
    "t5": dense_config(**BOTH, position="t5", qkv_bias=False, attention_scale=1.0),
    "window, sinks": dense_config(**BOTH, layers=("window", "full"), window=3, sinks=True),
    "sparse": dense_config(**BOTH, layers=("sparse",), window=2, sparse_stride=3),
    "linear": dense_config(**BOTH, layers=("linear", "full")),
    "relative, softcap": dense_config(**BOTH, position="relative", attention_softcap=5.0),
    "norms of queries and keys": dense_config(**BOTH, qk_norm="full", position="alibi"),
    "front": dense_config(
        **BOTH, embedding_size=12, embedding_norm=True, head_transform=True, head_bias=True, activation="gelu"
    ),
}


def torch_transformer(decoder: Decoder) -> nn.Transformer:
    """PyTorch's own module with the decoder's weights."""
    config = decoder.config
    pre = config.norm_order == "pre"
    theirs = nn.Transformer(
        config.hidden_size,
        config.num_heads,
        config.encoder_layers,
        config.num_layers,
        config.ffn_size,
        0.0,
        config.activation,
        batch_first=True,
        norm_first=pre,
        dtype=torch.float64,
    )
    if not pre:
        # A last norm behind a norm, which the article does not have.
        theirs.encoder.norm, theirs.decoder.norm = nn.Identity(), nn.Identity()
    state = {}

    def copy(name: str, module: nn.Module) -> None:
        state.update({f"{name}.{key}": x.detach() for key, x in module.named_parameters()})

    def attention(name: str, module: nn.Module) -> None:
        for key in ("weight", "bias"):
            rows = [getattr(module.get_submodule(f"{x}_proj"), key).detach() for x in "qkv"]
            state[f"{name}.in_proj_{key}"] = torch.cat(rows)
        copy(f"{name}.out_proj", module.get_submodule("o_proj"))

    for side, stack in (("encoder", decoder.encoder), ("decoder", decoder.model)):
        for number, block in enumerate(stack.layers):
            at = f"{side}.layers.{number}"
            attention(f"{at}.self_attn", block.self_attn)
            copy(f"{at}.linear1", block.mlp.up_proj)
            copy(f"{at}.linear2", block.mlp.down_proj)
            norms = [block.post_attention_layernorm]
            if pre:
                norms.insert(0, block.input_layernorm)
            else:
                norms.append(block.post_feedforward_layernorm)
            if side == "decoder":
                attention(f"{at}.multihead_attn", block.cross_attn)
                norms.insert(1, block.cross_layernorm)
            for place, norm in enumerate(norms, start=1):
                copy(f"{at}.norm{place}", norm)
        if pre:
            copy(f"{side}.norm", stack.norm)
    theirs.load_state_dict(state)
    return theirs


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(("order", "activation"), itertools.product(("pre", "post"), ("relu", "gelu")))
def test_packed_pairs_give_what_torch_gives_of_each(order, activation):
    config = replace(TRANSFORMER, norm_order=order, activation=activation)
    lm = CausalLM(Decoder(config)).double()
    randomize(lm)
    decoder = lm.network
    assert sum(count_parameters(config).values()) == sum(p.numel() for p in decoder.parameters())
    theirs = torch_transformer(decoder)
    pairs = [pair for pair in PAIRS if all(pair)]
    batch = pair_batch(pairs, vocab=config.vocab_size)
    hidden = decoder(
        batch.tokens,
        batch.positions,
        batch.documents,
        document_ids=batch.document_ids,
        source=decoder.encode(batch.source),
    )
    logits = decoder.logits(hidden)
    table, of_each = decoder.model.embed_tokens.weight, []
    for target, source in pair_tokens(pairs, vocab=config.vocab_size):
        mask = nn.Transformer.generate_square_subsequent_mask(len(target), dtype=torch.float64)
        of_each.append(theirs(table[source][None], table[target][None], tgt_mask=mask) @ table.T)
    wanted = torch.cat(of_each, dim=1)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-12)
    (got,) = torch.autograd.grad(logits.sin().sum(), [table], retain_graph=True)
    (of_table,) = torch.autograd.grad(wanted.sin().sum(), [table], retain_graph=True)
    torch.testing.assert_close(got, of_table, rtol=0, atol=1e-10)
    weights = [decoder.encoder.layers[0].self_attn.q_proj.weight, decoder.model.layers[1].cross_attn.k_proj.weight]
    ours = torch.autograd.grad(logits.sin().sum(), weights)
    of_theirs = [
        theirs.encoder.layers[0].self_attn.in_proj_weight,
        theirs.decoder.layers[1].multihead_attn.in_proj_weight,
    ]
    q, k = (x.chunk(3) for x in torch.autograd.grad(wanted.sin().sum(), of_theirs))
    torch.testing.assert_close(ours, (q[0], k[1]), rtol=0, atol=1e-10)


def train(config: ModelConfig, batch, execution: Execution | None = None) -> dict[str | int, torch.Tensor]:
    """Loss sums and gradients of one step in float64."""
    lm = CausalLM(Decoder(config, execution=execution))
    randomize(lm)
    lm.double()
    loss = lm.loss_sum(lm(batch, TrainingPass(seed=3)))
    step_loss(loss, 0.1).backward()
    return {**dict(enumerate(loss.tensors())), **gradients(lm)}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pair_reads_its_own_source_alone(name):
    config = CONFIGS[name]
    together = train(config, pair_batch(vocab=config.vocab_size, padding=(3, 2)))
    alone = []
    for target, source in pair_tokens(PAIRS, vocab=config.vocab_size):
        if not len(target):
            continue
        batch = pair_batch([(len(target), len(source))], vocab=config.vocab_size)
        tokens = (one_row([target]), one_row([source]))
        batch = replace(batch, tokens=tokens[0].tokens, targets=tokens[0].next_token_ids, source=tokens[1])
        alone.append(train(config, batch))
    for key, value in together.items():
        torch.testing.assert_close(sum(x[key] for x in alone), value, rtol=1e-10, atol=1e-10)


EVERY_WAY = list(itertools.product(("all", "attention", "inputs"), ("device", "host", "disk"), (0, 1, 7, 100), (1, 2)))
WAYS = [way for way in EVERY_WAY if way[2] or (way[1] != "disk" and way[3] == 1)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "ways"),
    [
        *((name, [WAYS[(7 * n + 13 * k) % len(WAYS)] for k in range(3)]) for n, name in enumerate(CONFIGS)),
        *(pytest.param(name, WAYS, marks=pytest.mark.slow) for name in CONFIGS),
    ],
)
def test_whatever_is_kept_and_however_much_at_a_time(name, ways, tmp_path):
    config = replace(CONFIGS[name], residual_dropout=0.2)
    batch = pair_batch(vocab=config.vocab_size, padding=(3, 2))
    wanted = train(config, batch)
    for keep, store, chunk_tokens, head_groups in ways:
        execution = Execution(keep, store, chunk_tokens=chunk_tokens, head_groups=head_groups, store_path=str(tmp_path))
        got = train(config, batch, execution)
        for key, value in wanted.items():
            torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-12, msg=lambda t, k=key: f"{k}: {t}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": False}, "model.causal=False is not supported with an encoder"),
        ({"num_experts": 4}, "model.num_experts=4 is not supported with an encoder"),
        ({"shared_layers": True}, "model.shared_layers=True is not supported with an encoder"),
        (
            {"kv_lora_rank": 8, "rope_head_dim": 4, "num_kv_heads": 4},
            "model.kv_lora_rank=8 is not supported with an encoder",
        ),
        ({"norm_order": "sandwich"}, "model.norm_order='sandwich' is not supported with an encoder"),
        ({"encoder_layers": 1, "layers": ("full", "linear")}, "the encoder has model.encoder_layers=1"),
        ({"position": "t5", "relative_buckets": 3}, "model.relative_buckets=3 must be an even number"),
        ({"encoder_layers": -1}, "must not be negative"),
    ],
)
def test_what_cannot_stand_beside_an_encoder(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(dense_config(**BOTH), **changes)


def test_a_source_comes_with_an_encoder():
    batch = pair_batch(vocab=97)
    with pytest.raises(ConfigError, match="has no encoder"):
        CausalLM(Decoder(dense_config()))(batch)
    with pytest.raises(ConfigError, match="none was given"):
        CausalLM(Decoder(CONFIGS["rope"]))(replace(batch, source=None))


def test_sides_whose_documents_have_other_numbers_are_refused():
    batch = pair_batch(((4, 3), (5, 6), (2, 2)), vocab=97)
    short = pair_batch(((4, 3), (5, 6)), vocab=97, padding=(0, 4)).source
    assert short is not None
    own = PackedDocuments(batch.documents.bounds, ())
    source = replace(short, documents=PackedDocuments(short.documents.bounds, (2,)))
    task = CausalLM(Decoder(CONFIGS["rope"]))
    with pytest.raises(ConfigError, match="document 2 is padding on one side and has 4 tokens on the other"):
        task(replace(batch, documents=own, source=source))
    # Behind all documents padding may be on one side alone.
    source = replace(short, documents=PackedDocuments((0, 3, 9, 9, 13), (3,)))
    task(replace(batch, documents=own, source=source))


def test_what_is_added_to_a_stream_is_as_small_as_the_stack_is_deep():
    decoder = Decoder(dense_config(num_layers=1, encoder_layers=24, init_std=0.1, hidden_size=64, num_heads=8))
    assert decoder.encoder is not None
    for block, sums in ((decoder.encoder.layers[0], 48), (decoder.model.layers[0], 3)):
        for projection in (block.self_attn.o_proj, block.mlp.down_proj):
            assert float(projection.weight.detach().std()) == pytest.approx(0.1 / sums**0.5, rel=0.1)
