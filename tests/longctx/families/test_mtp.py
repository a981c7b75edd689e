"""Blocks for multi-token prediction in Hugging Face folders: against transformers' layers, and back bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from longctx.conversion import export_checkpoint, import_hf, load_hf
from longctx.errors import CheckpointError, ConfigError
from longctx.model.decoder import Decoder
from tests.longctx.families import hf_models
from tests.longctx.families.hf_models import CASES
from tests.longctx.families.mtp_models import COUNTED, QWEN, build, build_mimo

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.mark.parametrize(
    ("name", "count"), [("deepseek_v3", 1), ("deepseek_v3", 2), ("glm4_moe", 1), *((q, 1) for q in QWEN)]
)
def test_hidden_states_further_ahead_are_transformers(name, count, tmp_path):
    model, layers = build(name, tmp_path / "hf", count)
    config, tensors = load_hf(tmp_path / "hf", mtp=True)
    assert config.mtp_layers == count
    ours = Decoder(config, seed=None)
    ours.load_state_dict(tensors)
    dtype, bound = torch.float64, 1e-9
    if config.is_latent:
        # Whose stretched rotary positions transformers computes in float32.
        dtype, bound = torch.float32, 1e-5
    else:
        ours, model, layers = ours.double(), hf_models.in_float64(model), layers.double()
    tokens_BT = hf_models.tokens_of(config)
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    ahead = [tokens_BT.roll(-n, 1) for n in range(1, count + 1)]
    found = ours(tokens_BT, positions_BT, mtp_tokens=ahead)
    T = tokens_BT.shape[1]
    mask = torch.full((T, T), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
    with hf_models.computing_in(dtype, model), torch.no_grad():
        decoder = model.get_decoder()
        hidden_BTM = decoder(tokens_BT).last_hidden_state
        embeddings = decoder.rotary_emb(hidden_BTM, position_ids=positions_BT)
        for layer, tokens, of_block in zip(layers, ahead, found[1:], strict=True):
            hidden_BTM = layer(
                decoder.embed_tokens(tokens), hidden_BTM, position_embeddings=embeddings, attention_mask=mask,
                position_ids=positions_BT, cache=None,
            )  # fmt: skip
            error = (of_block.hidden_BtM - hidden_BTM).norm() / hidden_BTM.norm()
            assert error <= bound


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", *QWEN])
def test_a_folder_comes_back_bit_for_bit(name, tmp_path):
    build(name, tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ours", mtp=True)
    back = export_checkpoint(tmp_path / "ours", tmp_path / "back").folder
    first, second = hf_models.on_disk(tmp_path / "hf"), hf_models.on_disk(back)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    key = COUNTED.get(name, "mtp_num_hidden_layers")
    assert json.loads((back / "config.json").read_text())[key] == 1


def test_mimo_as_its_makers_define_it(tmp_path):
    model, block = build_mimo(tmp_path / "hf")
    config, tensors = load_hf(tmp_path / "hf", mtp=True)
    ours = Decoder(config, seed=None)
    ours.load_state_dict(tensors)
    ours, model, block = ours.double(), hf_models.in_float64(model), block.double()
    tokens_BT = hf_models.tokens_of(config)
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    ahead_BT = tokens_BT.roll(-1, 1)
    found = ours(tokens_BT, positions_BT, mtp_tokens=[ahead_BT])
    mask = torch.full((tokens_BT.shape[1],) * 2, -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with hf_models.computing_in(torch.float64, model), torch.no_grad():
        decoder = model.model
        hidden_BTM = decoder(tokens_BT).last_hidden_state
        embeddings = decoder.rotary_emb(hidden_BTM, position_ids=positions_BT)
        wanted_BTM = block(
            decoder.embed_tokens(ahead_BT), hidden_BTM, position_embeddings=embeddings, attention_mask=mask
        )
    assert (found[0].hidden_BtM - hidden_BTM).norm() <= 1e-9 * hidden_BTM.norm()
    assert (found[1].hidden_BtM - wanted_BTM).norm() <= 1e-9 * wanted_BTM.norm()


@pytest.mark.parametrize("mtp", [True, False])
def test_mimo_comes_back_bit_for_bit(mtp, tmp_path):
    build_mimo(tmp_path / "hf")
    done = import_hf(tmp_path / "hf", tmp_path / "ours", mtp=mtp, verify="auto")
    assert done.logits_skip_reason == "this version of transformers has no mimo"
    exported = export_checkpoint(tmp_path / "ours", tmp_path / "back", verify="auto")
    assert exported.logits_skip_reason == done.logits_skip_reason
    back = exported.folder
    first, second = hf_models.on_disk(tmp_path / "hf"), hf_models.on_disk(back)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    config = json.loads((back / "config.json").read_text())
    assert (config["model_type"], config["num_nextn_predict_layers"]) == ("mimo", 1)


def test_a_copy_that_differs_is_refused(tmp_path):
    build("deepseek_v3", tmp_path / "hf")
    tensors = hf_models.on_disk(tmp_path / "hf")
    tensors["model.layers.3.embed_tokens.weight"] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight differs from model\.embed_tokens\.weight"):
        load_hf(tmp_path / "hf", mtp=True)
    # Untouched it goes along.
    load_hf(tmp_path / "hf")


def test_a_folder_without_them_is_refused(tmp_path):
    hf_models.save(hf_models.build(CASES["llama"]), tmp_path / "hf")
    with pytest.raises(ConfigError, match="no multi-token prediction blocks"):
        load_hf(tmp_path / "hf", mtp=True)
