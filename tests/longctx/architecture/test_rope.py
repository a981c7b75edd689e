"""Rotary frequencies against transformers' and closed forms; tables and turns against complex numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.architecture.rope import ROPE_KINDS, Rope
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.model.rotary import RotaryTable, apply_rotary, apply_rotary_to_both, rotary_table

FP32 = 3e-6
"""Relative. transformers forms frequencies in float32: a power and a few products, in YaRN a sum of two terms."""

EXAMPLES = settings(max_examples=60, deadline=None)

THETAS = st.sampled_from([500.0, 10_000.0, 500_000.0, 1e6, 1e7])
FACTORS = st.floats(1, 64)
LENGTHS = st.integers(64, 131_072)


def sizes():
    """(head size, share that is rotary): even numbers of rotary channels, from 4 on."""
    return st.tuples(st.sampled_from([8, 16, 40, 64, 128]), st.sampled_from([0.25, 0.5, 0.75, 1.0])).filter(
        lambda x: int(x[0] * x[1]) % 2 == 0 and x[0] * x[1] >= 4
    )


def theirs(rope: Rope, head_dim: int, *, length: int | None = None, omit: tuple[str, ...] = ()):
    """transformers' frequencies and factor of cosines and sines."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    given_ = {
        "rope_theta": rope.theta,
        "partial_rotary_factor": rope.partial,
        "factor": rope.factor,
        "attention_factor": rope.attention_factor or None,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
        "truncate": rope.truncate,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "short_factor": list(rope.short_factor),
        "long_factor": list(rope.long_factor),
        "original_max_position_embeddings": rope.original_max_positions,
    }
    config = SimpleNamespace(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=rope.original_max_positions,
        rope_parameters={name: value for name, value in given_.items() if name not in omit},
        standardize_rope_params=lambda: None,
    )
    return utils.ROPE_INIT_FUNCTIONS[rope.kind](config, device=torch.device("cpu"), seq_len=length)


def same(
    rope: Rope, head_dim: int, *, length: int | None = None, omit: tuple[str, ...] = (), rtol: float = FP32
) -> None:
    wanted, factor = theirs(rope, head_dim, length=length, omit=omit)
    found = torch.tensor(rope.frequencies(int(head_dim * rope.partial), length or 0), dtype=torch.float64)
    torch.testing.assert_close(found, wanted.double(), rtol=rtol, atol=0)
    assert rope.scale() == pytest.approx(factor, rel=1e-12)


@EXAMPLES
@given(sizes(), THETAS, FACTORS)
def test_linear_equals_transformers(size, theta, factor):
    same(Rope(kind="linear", theta=theta, factor=factor, partial=size[1]), size[0])


@EXAMPLES
@given(sizes(), THETAS, FACTORS, LENGTHS, st.integers(1, 10_000_000))
def test_dynamic_equals_transformers(size, theta, factor, original, length):
    rope = Rope(kind="dynamic", theta=theta, factor=factor, original_max_positions=original, partial=size[1])
    same(rope, size[0], length=length)
    same(rope, size[0])


@EXAMPLES
@given(
    sizes(),
    THETAS,
    FACTORS,
    LENGTHS,
    st.booleans(),
    st.sampled_from([(32.0, 1.0), (64.0, 2.0), (8.0, 8.0), (32.0, 0.5)]),
    st.sampled_from([(0.0, 0.0), (1.0, 1.0), (0.707, 0.707), (1.0, 0.5), (1.0, 0.0), (0.0, 1.0)]),
    st.sampled_from([0.0, 0.5, 1.3]),
)
def test_yarn_equals_transformers(size, theta, factor, original, truncate, betas, weights, attention_factor):
    rope = Rope(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_positions=original,
        partial=size[1],
        truncate=truncate,
        beta_fast=betas[0],
        beta_slow=betas[1],
        mscale=weights[0],
        mscale_all_dim=weights[1],
        attention_factor=attention_factor,
    )
    same(rope, size[0])


def test_yarn_whose_slow_bound_lies_beyond_the_last_channel_equals_transformers():
    same(Rope(kind="yarn", theta=20.0, factor=8, original_max_positions=2000, beta_slow=0.5), 128)


def test_yarn_that_leaves_everything_out_equals_transformers():
    left_out = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor")
    same(Rope(kind="yarn", factor=16, original_max_positions=4096), 128, omit=left_out)


@EXAMPLES
@given(sizes(), THETAS, FACTORS, LENGTHS, st.integers(0, 2), st.sampled_from([0.0, 1.19]), st.data())
def test_longrope_equals_transformers(size, theta, factor, original, step, attention_factor, data):
    pairs = int(size[0] * size[1]) // 2
    divisors = st.lists(st.floats(0.5, 80), min_size=pairs, max_size=pairs).map(tuple)
    rope = Rope(
        kind="longrope",
        theta=theta,
        factor=factor,
        original_max_positions=original,
        partial=size[1],
        attention_factor=attention_factor,
        short_factor=data.draw(divisors),
        long_factor=data.draw(divisors),
    )
    same(rope, size[0], length=original - 1 + step)  # just below, at and beyond the original length
    same(rope, size[0])


@EXAMPLES
@given(sizes(), THETAS, FACTORS, LENGTHS, st.sampled_from([(1.0, 4.0), (0.5, 8.0), (2.0, 2.5)]))
def test_llama3_equals_transformers(size, theta, factor, original, bounds):
    rope = Rope(
        kind="llama3",
        theta=theta,
        factor=factor,
        original_max_positions=original,
        partial=size[1],
        low_freq_factor=bounds[0],
        high_freq_factor=bounds[1],
    )
    # theirs blends in float32: what its share of the kept frequency is off by weighs factor times in the result
    same(rope, size[0], rtol=FP32 + 5e-7 * factor)


@pytest.mark.parametrize("size", [2, 6, 64, 128])
def test_default_and_fixed_ntk_equal_their_closed_forms(size):
    c = torch.arange(0, size, 2, dtype=torch.float64) / size
    plain = torch.tensor(Rope(theta=5e5).frequencies(size), dtype=torch.float64)
    torch.testing.assert_close(plain, 5e5**-c, rtol=1e-15, atol=0)
    if size == 2:  # one pair, which turns by 1 a token whatever theta is
        assert Rope(kind="ntk", factor=8).frequencies(2) == [1.0]
        return
    stretched = torch.tensor(Rope(kind="ntk", theta=5e5, factor=8).frequencies(size), dtype=torch.float64)
    torch.testing.assert_close(stretched, (5e5 * 8 ** (size / (size - 2))) ** -c, rtol=1e-14, atol=0)
    # what the growth of theta is for: the fastest pair keeps its speed, the slowest is interpolated
    assert stretched[0] == plain[0]
    assert float(stretched[-1]) == pytest.approx(float(plain[-1]) / 8, rel=1e-12)


def test_score_scale_is_that_of_deepseek():
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    for factor, weight in ((40.0, 1.0), (40.0, 0.707), (4.0, 0.1), (1.0, 1.0), (40.0, 0.0)):
        rope = Rope(kind="yarn", factor=factor, original_max_positions=4096, mscale=1.0, mscale_all_dim=weight)
        parameters = {"rope_type": "yarn", "factor": factor, "mscale_all_dim": weight}
        wanted = modeling.yarn_apply_mscale(parameters, 192**-0.5)
        latent = {"num_heads": 2, "num_kv_heads": 2, "kv_lora_rank": 8, "head_dim": 192, "rope_head_dim": 64}
        assert ModelConfig(**latent, rope=rope).scale == pytest.approx(wanted, rel=1e-14)
        # a wish for the scale itself is stretched too
        assert ModelConfig(**latent, rope=rope, attention_scale=0.5).scale == pytest.approx(wanted * 192**0.5 / 2)
    assert Rope(kind="linear", factor=8).score_scale() == 1


def test_angles_are_exact_at_ten_million_tokens():
    places = [0, 1, 999_999, 9_999_999, 10_000_000]
    rope = Rope(theta=5e5)
    cos, sin = rotary_table(torch.tensor([places]), rope, 64, torch.float32)
    assert cos.dtype == torch.float32
    assert cos.shape == (1, 5, 1, 32)
    wanted = torch.tensor([[p * f for f in rope.frequencies(64)] for p in places], dtype=torch.float64)
    # 1e7 radians in float64 are 2e-9 coarse; float32 angles would be off by half a radian
    torch.testing.assert_close(cos[0, :, 0].double(), wanted.cos(), atol=1e-7, rtol=0)
    torch.testing.assert_close(sin[0, :, 0].double(), wanted.sin(), atol=1e-7, rtol=0)
    exact = rotary_table(torch.tensor([places]), rope, 64, torch.float64)[0]
    assert exact.dtype == torch.float64
    # by an addition theorem in whole numbers of tokens: no angle above a thousand radians is formed
    short = rotary_table(torch.tensor([[1000]]), rope, 64, torch.float64)
    turn = torch.complex(*(x[0, 0, 0] for x in short)) ** 10_000
    torch.testing.assert_close(exact[0, 4, 0], turn.real, atol=1e-8, rtol=0)


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_turns_are_products_with_complex_numbers(kind):
    more = {"factor": 4.0, "original_max_positions": 64} if kind == "yarn" else {}
    rope, size = Rope(kind=kind, **more), 6
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 9, generator=g, dtype=torch.float64)  # 9 channels, of which 6 turn
    positions = torch.randint(100_000, (2, 5), generator=g)
    angles = positions.double()[..., None, None] * torch.tensor(rope.frequencies(size), dtype=torch.float64)
    turned = torch.complex(x[..., :6:2].contiguous(), x[..., 1:6:2].contiguous()) * torch.polar(
        torch.full_like(angles, rope.scale()), angles
    )
    table = rotary_table(positions, rope, size, x.dtype)
    out = apply_rotary(x, *table, interleaved=True)
    torch.testing.assert_close(out[..., :6], torch.view_as_real(turned).flatten(-2), atol=1e-13, rtol=1e-13)
    assert torch.equal(out[..., 6:], x[..., 6:])
    # half-split is the same turn of channels in another order
    order = [0, 2, 4, 1, 3, 5, 6, 7, 8]
    assert torch.equal(apply_rotary(x[..., order], *table), out[..., order])


@pytest.mark.parametrize("tokens", [1, 8, 4000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_rotated_as_each_alone(tokens, dtype):
    g = torch.Generator().manual_seed(0)
    for size, interleaved in ((16, False), (16, True), (8, False)):
        q, k = (torch.randn(1, tokens, heads, 16, generator=g).to(dtype) for heads in (4, 2))
        positions = torch.randint(100_000, (1, tokens), generator=g)
        table = rotary_table(positions, Rope(), size, dtype)
        with torch.no_grad():
            of_both = RotaryTable.build(positions, Rope(), size, dtype, length=0, is_whole=size == 16)
            both = apply_rotary_to_both(q, k, of_both, interleaved=interleaved)
        assert torch.equal(of_both.cos, table[0])
        assert torch.equal(of_both.sin, table[1])
        alone = (apply_rotary(x, *table, interleaved=interleaved) for x in (q, k))
        assert all(torch.equal(a, b) for a, b in zip(both, alone, strict=True))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_of_a_turn_is_the_turn_back(interleaved):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, 2, 7, generator=g, dtype=torch.float64, requires_grad=True)
    table = rotary_table(torch.tensor([[0, 17, 4000]]), Rope(), 4, x.dtype)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, *table, interleaved=interleaved), (x,))


def test_only_kinds_that_stretch_with_the_sequence_read_its_length():
    longer = {"factor": 4.0, "original_max_positions": 64}
    lists = {"short_factor": (1.0,) * 4, "long_factor": (3.0,) * 4}
    for kind in ROPE_KINDS:
        rope = Rope(kind=kind, **({} if kind == "default" else longer), **(lists if kind == "longrope" else {}))
        differs = rope.frequencies(8, 64) != rope.frequencies(8, 65)
        assert differs == rope.depends_on_length == (kind in ("dynamic", "longrope"))
        assert rope.frequencies(8, 1) == rope.frequencies(8, 64)


YARN = {"kind": "yarn", "original_max_positions": 4096}

BAD = {
    "unknown kind": ({"kind": "su"}, r"kind='su' is unknown. Try one of \['default'"),
    "theta": ({"theta": 1.0}, "theta=1.0 must be a number above 1"),
    "theta nan": ({"theta": math.nan}, "theta=nan"),
    "shrinks": ({"kind": "linear", "factor": 0.5}, "factor=0.5 must be at least 1"),
    "factor of nothing": ({"factor": 8.0}, r"factor=8.0 has no effect with model.rope.kind='default'. .*linear"),
    "no length": ({"kind": "yarn", "factor": 4.0}, "original_max_positions=0: it needs the model"),
    "length of a float": ({**YARN, "original_max_positions": 4096.5}, "4096.5 must be a whole number"),
    "too short": ({**YARN, "original_max_positions": 5}, "Try original_max_positions=7"),
    "betas": ({**YARN, "beta_fast": 1.0, "beta_slow": 32.0}, "beta_fast=1.0 must not be below .*beta_slow=32.0"),
    "mscale alone": ({**YARN, "mscale": 0.7}, "mscale=0.7 has no effect without"),
    "negative": ({**YARN, "attention_factor": -1.0}, "attention_factor=-1.0 must not be negative"),
    "of another kind": ({**YARN, "low_freq_factor": 2.0}, r"low_freq_factor=2.0 has no effect .*\['llama3'\]"),
    "bounds": ({"kind": "llama3", "original_max_positions": 64, "low_freq_factor": 4.0}, "high_freq_factor=4.0"),
    "partial": ({"partial": 1.5}, "partial=1.5 must be above 0 and at most 1"),
    "no list": ({"kind": "longrope", "original_max_positions": 64, "short_factor": 1.0}, "short_factor=1.0 must be"),
    "not boolean": ({"interleaved": 1}, "interleaved=1 must be true or false"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_rope_that_cannot_be_is_refused(name):
    values, said = BAD[name]
    with pytest.raises(ConfigError, match=said):
        Rope(**values)


@pytest.mark.parametrize(
    ("rope", "size", "said"),
    [
        (Rope(), 0, "0 rotary channels"),
        (
            Rope(kind="longrope", original_max_positions=8, short_factor=(1.0, 2.0), long_factor=(1.0, 0.0)),
            4,
            "long_factor has 2 values; longrope needs 2 positive",
        ),
    ],
)
def test_heads_that_cannot_turn_are_refused(rope, size, said):
    with pytest.raises(ConfigError, match=said):
        rope.check_size(size)
