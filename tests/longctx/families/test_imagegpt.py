"""Image GPT against transformers in float64, its folders there and back, and what its head never predicts."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from longctx.batch import IGNORED_TARGET, PackedDocuments
from longctx.config import ModelConfig
from longctx.conversion import load_hf
from longctx.errors import ConfigError
from longctx.generation.loop import generate
from longctx.generation.sampling import Sampling
from longctx.model.decoder import Decoder
from longctx.tokenizer import load_tokenizer
from tests.launcher.cli.calls import call
from tests.longctx.families import hf_models
from tests.longctx.families.hub_configs import HUB

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LENGTHS = (1, 17, 36, 5)
BEGIN = 96
PALETTE = {"clusters": [[-1.0, 0.5, 0.25]] * BEGIN, "size": {"height": 6, "width": 6}}


@pytest.fixture(scope="module")
def theirs():
    return hf_models.build(hf_models.CASES["imagegpt"])


@pytest.fixture
def folder(theirs, tmp_path) -> Path:
    """No tokenizer, but a palette, as in the published folders."""
    hf_models.save(theirs, tmp_path / "hf")
    (tmp_path / "hf" / "preprocessor_config.json").write_text(json.dumps(PALETTE))
    return tmp_path / "hf"


def test_logits_and_gradients_of_packed_images_in_float64(theirs, folder, tmp_path):
    config, tensors = load_hf(folder)
    ours = Decoder(config, seed=None).double()
    ours.load_state_dict(tensors)
    images = [hf_models.tokens_of(config, rows=1, length=length, seed=length)[0] for length in LENGTHS]
    assert all(image[0] == BEGIN and (image[1:] < BEGIN).all() for image in images)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    hidden = ours(torch.cat(images)[None], positions, PackedDocuments.of_lengths(LENGTHS))
    model = copy.deepcopy(theirs).double()
    logits = torch.cat([model(image[None]).logits[0] for image in images])
    torch.testing.assert_close(ours.logits(hidden)[0], logits, rtol=0, atol=1e-12)

    ends = [torch.cat((image[1:], torch.tensor([IGNORED_TARGET]))) for image in images]
    targets = torch.cat(ends)[None]
    torch.nn.functional.cross_entropy(logits, targets[0], ignore_index=IGNORED_TARGET, reduction="sum").backward()
    ours.loss_sums(hidden, targets)[0].backward()
    wanted = hf_models.gradients_in_float64(model, config, tmp_path / "gradients")
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert wanted[name].any(), name
        error = (parameter.grad - wanted[name]).abs().max()
        assert error <= 1e-10 * max(1.0, float(wanted[name].abs().max())), name


def test_a_folder_goes_through_a_checkpoint_byte_for_byte(folder, tmp_path, capsys):
    """The command compares logits both ways; there is no tokenizer, and the palette is kept."""
    words: tuple[Any, ...] = ("--verify", "logits")
    code, out, err = call(capsys, "convert", "--from", "hf", folder, tmp_path / "ours", *words)
    assert code == 0, err
    assert "transformers' one pass and two are" in out
    code, _, err = call(capsys, "convert", "--to", "hf", tmp_path / "ours", tmp_path / "back", *words)
    assert code == 0, err
    before, after = hf_models.on_disk(folder), hf_models.on_disk(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)
    files = [json.loads((at / "preprocessor_config.json").read_text()) for at in (folder, tmp_path / "back")]
    assert files[0]["clusters"] == files[1]["clusters"]
    hf, again = (json.loads((at / "config.json").read_text()) for at in (folder, tmp_path / "back"))
    # Dropout of attention weights is never applied here, and is logged; the other is where transformers' class has it.
    left = {key for key in hf if again.get(key) != hf[key]}
    assert left == {"attn_pdrop", "add_cross_attention", "transformers_version"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported.*supported: False"),
        ({"vocab_size": 1}, "vocab_size=1 in config.json must be at least 2"),
        ({"vocab_size": None}, "vocab_size=None in config.json must be of type int"),
        ({"activation_function": "silu"}, "activation_function='silu' is not supported.*quick_gelu"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"embd_pdrop": 0.2}, "'embd_pdrop': 0.2.*the same for both"),
        ({"n_head": 7}, "n_embd=512 in config.json is not a multiple of n_head=7"),
        ({"architectures": ["ImageGPTModel"]}, "imagegpt means ImageGPTForCausalImageModeling"),
        ({"color_order": 3}, "keys that longctx does not read for a imagegpt model: color_order=3"),
    ],
)
def test_what_this_model_cannot_be_is_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_hf(HUB["imagegpt-small"] | values)


def test_absent_keys_mean_what_transformers_takes_for_them():
    described = transformers.ImageGPTConfig()
    bare = {"model_type": "imagegpt"}
    bare |= {key: getattr(described, key) for key in ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")}
    config = ModelConfig.from_hf(bare)
    assert (config.activation, config.tie_embeddings) == (described.activation_function, described.tie_word_embeddings)
    assert (config.ffn_size, config.norm_eps) == (4 * described.n_embd, described.layer_norm_epsilon)
    assert config.residual_dropout == described.resid_pdrop


def test_only_a_head_without_the_last_id_is_image_gpts():
    config = ModelConfig.from_hf(HUB["imagegpt-small"])
    fewer = config.from_dict(vars(config) | {"output_vocab_size": 511})
    with pytest.raises(ConfigError, match=r"nearest is imagegpt.*\n.*output_vocab_size: 511 .it would become 512."):
        fewer.to_hf()


def test_an_import_builds_data_and_continues_pictures(theirs, tmp_path, capsys):
    """Its palette is the tokenizer of new images, and of pictures that it continues."""
    random = np.random.default_rng(0)
    # Of one name, which pictures have in their titles.
    hf, ours = tmp_path / "hf" / "model", tmp_path / "ours" / "model"
    hf_models.save(theirs, hf)
    palette = {"clusters": random.uniform(-1, 1, (BEGIN, 3)).tolist()}
    (hf / "preprocessor_config.json").write_text(json.dumps(palette))
    (tmp_path / "pictures" / "cats").mkdir(parents=True)
    picture = tmp_path / "pictures" / "cats" / "0.png"
    Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(picture)
    assert call(capsys, "convert", "--from", "hf", hf, ours)[0] == 0
    words = ("--source", tmp_path / "pictures", "--tokenizer", ours, "--output", tmp_path / "shards")
    code, _, err = call(capsys, "data", "build", "--kind", "images", *words)
    assert code == 0, err
    built, imported = load_tokenizer(tmp_path / "shards").format, load_tokenizer(ours).format
    assert built == replace(imported, classes=("cats",))
    for folder in (hf, ours):
        words = ("--checkpoint", folder, "--image", picture, "--output", folder / "continued.png")
        code, _, err = call(capsys, "generate", *words)
        assert code == 0, err
    drawn = np.asarray(Image.open(hf / "continued.png"))
    assert np.array_equal(drawn, np.asarray(Image.open(ours / "continued.png")))
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) > 20


def test_samples_begin_with_the_last_id_and_never_have_it_again(theirs, folder):
    config, tensors = load_hf(folder)
    ours = Decoder(config, seed=None).eval()
    ours.load_state_dict(tensors)
    # So hot that every color is about as likely.
    drawn = [token for seed in range(6) for token in generate(ours, [BEGIN], 60, Sampling(temperature=50, seed=seed))]
    assert max(drawn) < BEGIN
    assert len(set(drawn)) > 80
    for strategy in (Sampling(top_k=200, seed=2), Sampling(top_p=0.9, seed=2), Sampling(min_p=0.01, seed=2)):
        assert max(generate(ours, [BEGIN], 20, strategy)) < BEGIN
