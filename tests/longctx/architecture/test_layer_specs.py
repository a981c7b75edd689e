"""Layers as values: what a config's kinds come to."""

from __future__ import annotations

import pytest

from longctx.architecture.layer_specs import LayerSpec, layer_specs, mixers_of
from longctx.architecture.mixers.latent_mixer import LatentMixer
from longctx.architecture.mixers.linear_mixer import LatentLinearMixer, LinearMixer
from longctx.architecture.mixers.mixer import Mixer
from longctx.architecture.mixers.softmax_mixer import SoftmaxMixer
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.model.decoder import Decoder

LATENT = {"num_kv_heads": 2, "kv_lora_rank": 8, "rope_head_dim": 16}
SEEN = {"layers": ("full", "window", "sparse", "linear"), "window": 9, "sparse_stride": 4}


@pytest.mark.parametrize(
    ("latent", "mixers"),
    [
        ({}, [SoftmaxMixer(), SoftmaxMixer(window=9), SoftmaxMixer(window=9, stride=4), LinearMixer()]),
        (LATENT, [LatentMixer(), LatentMixer(window=9), LatentMixer(window=9, stride=4), LatentLinearMixer()]),
    ],
)
def test_kinds_are_mixers_whose_reach_is_known(latent, mixers: list[Mixer]):
    config = ModelConfig(num_layers=6, **SEEN, **latent)
    assert list(mixers_of(config)) == mixers
    assert list(mixers_of(config).values()) == [2, 2, 1, 1]
    assert [mixer.lookback_tokens for mixer in mixers] == [None, 9, None, 0]
    assert [mixer.has_scores for mixer in mixers] == [True, True, True, False]
    assert [spec.mixer for spec in layer_specs(config)] == [*mixers, *mixers[:2]]


def test_a_layer_has_its_ffn_and_its_rope():
    config = ModelConfig(
        num_layers=3,
        num_experts=4,
        dense_layers=(1,),
        layers=("window", "full", "full"),
        window=4,
        rope_layers=(True, True, False),
        local_rope_theta=100.0,
    )
    near, far, last = layer_specs(config)
    assert (near.ffn, far.ffn, last.ffn) == ("experts", "dense", "experts")
    assert near.rope is not None
    assert (near.rope.theta, far.rope, last.rope) == (100.0, config.rope, None)
    assert last == LayerSpec(SoftmaxMixer(), "experts", None, 0, "pre")


def test_a_core_that_no_mixer_has_is_refused():
    decoder = Decoder(ModelConfig())
    known = r"\['cross', 'gated_delta', 'image_windows', 'linear', 'softmax'\]"
    with pytest.raises(ConfigError, match=rf"mixer cores \['softmaks'\] are unknown. Try one of {known}"):
        Decoder(ModelConfig(), {"softmaks": decoder.cores["softmax"]}, seed=None)
