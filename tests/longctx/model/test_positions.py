"""Every kind of position through the whole decoder, against a decoder by definition; positions that do not fit."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from longctx.architecture.rope import Rope
from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.kernels.attention.bias import alibi_slopes, buckets
from longctx.kernels.attention.kernel_interface import RelativeBias
from longctx.model.attention.core import AttentionCore
from longctx.model.attention.kv_cache import KVCache
from longctx.model.decoder import Decoder
from longctx.model.mixers.grouped_query_attention import RelativePositions
from longctx.model.plans import check_learned
from longctx.model.rotary import sinusoidal_embedding
from tests.longctx.attention_cores import MaskIsPlan
from tests.longctx.model import plain_decoder
from tests.longctx.model.plain_decoder import PlainDecoder
from tests.longctx.samples import documents_of, gradients, one_document, packed_batch, randomize

EXACT = {"atol": 1e-12, "rtol": 1e-10}
"""float64: nothing but the order of additions, over scores and gradients of about 1."""


def odd_config(**changes) -> ModelConfig:
    """Sizes that are neither round nor equal."""
    sizes = {
        "vocab_size": 31,
        "hidden_size": 14,
        "num_layers": 3,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 10,
        "ffn_size": 11,
        "max_positions": 19,
        "init_std": 0.3,
    }
    return ModelConfig(**{**sizes, **changes})


STRETCHED = {"factor": 4.0, "original_max_positions": 8}
WINDOWS = {"layers": ("window", "full"), "window": 5}

POSITIONS = {
    "rope": {},
    "interleaved": {"rope": Rope(interleaved=True, theta=500.0)},
    "partial": {"rope": Rope(partial=0.6)},
    "linear": {"rope": Rope(kind="linear", factor=3.0)},
    "ntk": {"rope": Rope(kind="ntk", factor=3.0)},
    "dynamic": {"rope": Rope(kind="dynamic", **STRETCHED)},
    "yarn": {"rope": Rope(kind="yarn", mscale=1.0, mscale_all_dim=0.5, **STRETCHED)},
    "longrope": {
        "rope": Rope(
            kind="longrope", short_factor=(1.0, 1.1, 1.2, 1.3, 1.4), long_factor=(1.0, 2, 3, 4, 5), **STRETCHED
        )
    },
    "llama3": {"rope": Rope(kind="llama3", **STRETCHED)},
    "some layers know none": {"rope_layers": (True, False)},
    "local base": {"local_rope_theta": 100.0, "rope": Rope(kind="linear", factor=4.0), **WINDOWS},
    "none": {"position": "none"},
    "learned": {"position": "learned"},
    "sinusoidal": {"position": "sinusoidal"},
    "sinusoids in halves": {"position": "sinusoidal_halves"},
    "alibi": {"position": "alibi"},
    "alibi in windows": {"position": "alibi", **WINDOWS},
    "t5": {"position": "t5", "relative_buckets": 6, "relative_max_distance": 11},
    "t5 in windows": {"position": "t5", "relative_buckets": 7, "relative_max_distance": 11, **WINDOWS},
    "relative": {"position": "relative"},
    "relative of grouped heads": {"position": "relative", "num_heads": 6, "num_kv_heads": 2, "head_dim": 4},
    "relative in windows, with sinks": {"position": "relative", "sinks": True, **WINDOWS},
}


def build(name: str, core: AttentionCore | None = None, **changes) -> Decoder:
    decoder = Decoder(odd_config(**{**POSITIONS.get(name, {}), **changes}), core and {"softmax": core}).double()
    randomize(decoder)
    return decoder


def weigh(hidden: Tensor) -> Tensor:
    """A number that every hidden state enters with a weight of its own."""
    generator = torch.Generator().manual_seed(7)
    return (hidden * torch.randn(hidden.shape, generator=generator, dtype=torch.float64)).sum()


def check_against_definition(decoder: Decoder, batch) -> None:
    plain = PlainDecoder(decoder)
    wanted = plain(batch.tokens, batch.positions, batch.cu_seqlens)
    found = decoder(batch.tokens, batch.positions, batch.cu_seqlens)
    torch.testing.assert_close(found, wanted, **EXACT)
    decoder.zero_grad()
    weigh(found).backward()
    wanted_grads = dict(zip(plain.weights, grads_of(weigh(wanted), plain), strict=True))
    for name, parameter in decoder.named_parameters():
        if wanted_grads[name] is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        torch.testing.assert_close(
            parameter.grad, wanted_grads[name], atol=1e-11, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def grads_of(value: Tensor, plain: PlainDecoder):
    return torch.autograd.grad(value, list(plain.weights.values()), allow_unused=True)


@pytest.mark.parametrize("name", POSITIONS)
def test_values_and_gradients_equal_the_definition(name):
    check_against_definition(build(name), packed_batch([[5, 11, 1], [16, 1]], vocab_size=31))


BOTH_SIDES = {name: {} for name in POSITIONS} | {
    "t5 in windows": {"relative_buckets": 8},
    "sparse": {"layers": ("sparse", "full"), "window": 3, "sparse_stride": 4},
}


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_both_sides_equal_the_definition(name):
    decoder = build(name, causal=False, **BOTH_SIDES[name])
    check_against_definition(decoder, packed_batch([[5, 11, 1], [16, 1]], vocab_size=31))


@pytest.mark.parametrize("name", POSITIONS)
def test_packed_documents_equal_documents_alone(name):
    decoder, batch = build(name), packed_batch([[5, 11, 1], [16, 1]], vocab_size=31)
    whole = decoder(batch.tokens, batch.positions, batch.cu_seqlens).flatten(0, 1)
    if decoder.config.rope.depends_on_length:  # documents of a batch are stretched by the longest of them
        with patch("longctx.model.plans._longest", lambda *_: 16):
            alone = [decoder(part.tokens, part.positions) for part in documents_of(batch)]
    else:
        alone = [decoder(part.tokens, part.positions) for part in documents_of(batch)]
    torch.testing.assert_close(torch.cat(alone, 1)[0], whole, **EXACT)


@pytest.mark.few(22)
@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("num_padding", [1, 23, 88])
def test_padding_changes_nothing(name, num_padding):
    """More padding than there are rows in a learned table, and than any document has tokens."""
    decoder, alone = build(name), packed_batch([[5, 7, 1]], vocab_size=31)
    wanted = decoder(alone.tokens, alone.positions, alone.documents)
    padded = packed_batch([[5, 7, 1]], padding=num_padding, vocab_size=31)
    padded = replace(padded, tokens=torch.cat((alone.tokens, padded.tokens[:, 13:]), 1))
    much = alone.padded(13 + num_padding)
    unknown = PackedDocuments(padded.documents.bounds)
    for batch, documents in ((padded, padded.documents), (much, much.documents), (padded, unknown.cu_seqlens)):
        found = decoder(batch.tokens, batch.positions, documents, document_ids=batch.document_ids)
        torch.testing.assert_close(found[:, :13], wanted, **EXACT)
    nothing = decoder(
        padded.tokens[:, 13:],
        padded.positions[:, 13:],
        PackedDocuments((0, num_padding), (0,)),
        document_ids=padded.document_ids[:, 13:],
    )
    assert nothing.isfinite().all(), "a batch may be all padding"


class Recorder(MaskIsPlan):
    """Keeps the turned queries and keys of the first layer, and adds nothing to the residual stream."""

    def plan(self, mask, shapes, placement=None):
        self.first = True
        return super().plan(mask, shapes)

    def __call__(self, q_BtHD, k_BtKD, v_BtKV, **_):
        if self.first:
            self.seen, self.first = (q_BtHD.detach(), k_BtKD.detach()), False
        return torch.zeros(*q_BtHD.shape[:3], v_BtKV.shape[-1], dtype=q_BtHD.dtype)


@pytest.mark.parametrize("name", [*POSITIONS])
def test_a_share_of_the_sequence_knows_positions_and_length_of_the_whole(name):
    core, batch = Recorder(), packed_batch([[3, 13, 1]], vocab_size=31)
    decoder = build(name, core)
    decoder(batch.tokens, batch.positions, batch.cu_seqlens)
    whole = core.seen
    mine = torch.tensor([16, 2, 9, 10])  # tokens of all documents, out of order
    decoder(batch.tokens[:, mine], batch.positions[:, mine], batch.cu_seqlens)
    for part, of_whole in zip(core.seen, whole, strict=True):
        torch.testing.assert_close(part, of_whole[:, mine], **EXACT)


def test_stretching_follows_the_longest_document_and_not_the_row():
    core = Recorder()
    decoder = build("longrope", core)  # trained for 8 tokens
    short, longer = packed_batch([[8, 8]], vocab_size=31), packed_batch([[7, 9]], vocab_size=31)
    seen = []
    for batch in (short, longer):
        decoder(batch.tokens, torch.arange(16)[None], batch.cu_seqlens)  # the same positions in both
        seen.append(core.seen[0])
    assert not torch.allclose(*seen)
    rope = replace(decoder.config.rope, long_factor=(9.0,) * 5)  # which the batch with the shorter documents ignores
    other = Decoder(replace(decoder.config, rope=rope), {"softmax": core}).double()
    randomize(other)
    other(short.tokens, torch.arange(16)[None], short.cu_seqlens)
    assert torch.equal(core.seen[0], seen[0])


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_decoding_stretches_by_what_there_is_so_far(name):
    core, tokens = Recorder(), one_document(1, 13).tokens % 31
    decoder = build(name, core)
    decoder(tokens[:, :12], torch.arange(12)[None])
    prefix = core.seen[0]
    decoder(tokens[:, 11:12], torch.tensor([[11]]), cache=KVCache())
    torch.testing.assert_close(core.seen[0], prefix[:, 11:], **EXACT)


@pytest.mark.parametrize(
    "name", ["learned", "sinusoidal", "sinusoids in halves", "alibi", "t5", "relative", "none", "local base"]
)
def test_decoding_token_by_token_equals_the_whole(name):
    decoder, tokens = build(name), one_document(1, 13).tokens % 31
    whole = decoder(tokens, torch.arange(13)[None])
    cache = KVCache()
    parts = [decoder(tokens[:, a:b], torch.arange(a, b)[None], cache=cache) for a, b in ((0, 5), (5, 6), (6, 13))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **EXACT)


# Each kind against its reference


@pytest.mark.parametrize("halves", [False, True])
def test_sinusoids_equal_the_closed_form(halves):
    positions = torch.tensor([0, 1, 2, 1023, 9_999_999])
    for size in (2, 6, 64):
        wanted = plain_decoder.sinusoids(positions, size, halves=halves)
        exact = sinusoidal_embedding(positions, size, torch.float64, halves=halves)
        torch.testing.assert_close(exact, wanted, atol=2e-8, rtol=0)
        low = sinusoidal_embedding(positions, size, torch.bfloat16, halves=halves)
        assert low.dtype == torch.float32  # added in the model's dtype, rounded once
        torch.testing.assert_close(low.double(), wanted, atol=2e-7, rtol=0)


@pytest.mark.parametrize("num_heads", range(1, 34))
def test_alibi_slopes_equal_those_of_bloom_and_mpt(num_heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    found = alibi_slopes(num_heads).double()
    of_bloom = bloom.build_alibi_tensor(torch.ones(1, 3, dtype=torch.long), num_heads, torch.float32)[:, 0].double()
    of_mpt = mpt.build_mpt_alibi_tensor(num_heads, 3)[:, 0].double()
    # float32 powers of a rounded base
    torch.testing.assert_close(found[:, None] * torch.arange(3), of_bloom, rtol=1e-5, atol=0)
    torch.testing.assert_close(found[:, None] * torch.arange(-2, 1), of_mpt, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        found, torch.tensor(plain_decoder.alibi_slopes(num_heads), dtype=torch.float64).float().double()
    )


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (6, 11), (7, 11), (2, 3), (16, 20), (33, 1000)])
def test_t5_buckets_and_bias_equal_transformers(num_buckets, max_distance):
    import transformers

    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    settings = {"relative_attention_num_buckets": num_buckets, "relative_attention_max_distance": max_distance}
    config = transformers.T5Config(d_model=8, d_kv=4, num_heads=2, is_decoder=True, **settings)
    theirs = modeling.T5Attention(config, has_relative_attention_bias=True)
    T = min(2 * max_distance, 300) + 5
    with torch.no_grad():
        wanted = theirs.compute_bias(T, T)[0]
    table = theirs.relative_attention_bias.weight.detach()
    apart = torch.arange(T)[:, None] - torch.arange(T)
    found = table[buckets(apart, RelativeBias(table, max_distance=max_distance))].permute(2, 0, 1)
    assert torch.equal(found, wanted)
    assert torch.equal(
        plain_decoder.t5_buckets(apart.clamp(min=0), num_buckets, max_distance),
        buckets(apart, RelativeBias(table, max_distance=max_distance)),
    )


def test_relative_positions_keep_the_weight_itself_for_backward():
    """ZeRO-3 frees a gathered weight by emptying the parameter: a view that autograd keeps would hold its memory."""
    config = odd_config(position="relative", num_heads=2, num_kv_heads=2, head_dim=4)
    relative = RelativePositions(config)
    randomize(relative)
    kept: list[Tensor] = []
    q, k = torch.randn(2, 1, 5, 2, 4)
    table = torch.randn(2, 1, 5, 7)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        relative(q, k, *table)
    storage = relative.weight.untyped_storage().data_ptr()
    views = [x for x in kept if x.untyped_storage().data_ptr() == storage]
    assert views
    assert all(x is relative.weight for x in views)


# Positions beyond a learned table


def test_documents_beyond_a_learned_table_are_refused():
    decoder = build("learned")  # 19 rows
    fits, too_long = one_document(2, 19), one_document(2, 20)
    decoder(fits.tokens % 31, fits.positions)
    with pytest.raises(ConfigError, match=r"a document of 20 tokens is longer than model.max_positions=19"):
        decoder(too_long.tokens % 31, too_long.positions)
    with pytest.raises(ConfigError, match="a document of 24 tokens"):
        decoder(fits.tokens % 31, fits.positions + 5)
    with pytest.raises(ConfigError, match="a document of 20 tokens"):
        decoder(fits.tokens[:, :1] % 31, torch.full((2, 1), 19), cache=KVCache())
    packed = packed_batch([[19, 19]], vocab_size=31)
    decoder(packed.tokens, packed.positions, packed.cu_seqlens)  # rows may be longer than documents


def test_every_rank_refuses_a_document_that_one_of_them_cannot_place():
    mine = torch.tensor([[0, 1]])  # this rank's tokens would fit, another's would not: all must fail, or one waits
    with pytest.raises(ConfigError, match="a document of 20 tokens"):
        check_learned(mine, 20, 19)
    check_learned(mine[:, :0], 19, 19)  # a rank without tokens


def test_looking_at_positions_does_not_wait_for_another_device():
    check_learned(torch.zeros(1, 4, dtype=torch.long, device="meta"), 19, 19)  # meta has no values to read


def test_an_unused_table_row_gets_a_gradient_of_zero():
    decoder, batch = build("learned"), one_document(1, 7)
    decoder(batch.tokens % 31, batch.positions).sum().backward()
    grad = gradients(decoder.model)["embed_positions.weight"]
    assert grad[:7].any(1).all()
    assert not grad[7:].any()
