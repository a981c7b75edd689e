"""Encoders against transformers in float64: logits and gradients, packed here and padded there, and folders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from longctx.architecture.size import count_parameters
from longctx.batch import IGNORED_TARGET, PackedDocuments
from longctx.config import PRESETS, ModelConfig
from longctx.conversion import load_hf, save_hf
from longctx.conversion.tensor_layouts import tensor_specs
from longctx.conversion.verify_conversion import compare_logits
from longctx.errors import CheckpointError, ConfigError
from longctx.model.decoder import Decoder
from longctx.tokenizer import Tokenizer, load_tokenizer
from tests.longctx.families.hf_models import ENCODERS, build
from tests.longctx.tokenizer.byte_level import tokenizer_json, write_tokenizer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LENGTHS = (1, 17, 36, 5)
SMALL = {"hidden_size": 36, "num_layers": 1, "num_heads": 4, "num_kv_heads": 4, "head_dim": 9, "ffn_size": 20}


def byte_level_tokenizer(folder: Path) -> Tokenizer:
    write_tokenizer(folder / "tokenizer", tokenizer_json())
    return load_tokenizer(folder / "tokenizer")


def ours(folder: Path) -> Decoder:
    config, tensors = load_hf(folder)
    model = Decoder(config, seed=None).double()
    model.load_state_dict(tensors)
    return model


@pytest.mark.parametrize("name", ENCODERS)
def test_logits_and_gradients_packed_here_and_padded_there(name, tmp_path):
    theirs = build(ENCODERS[name])
    theirs.save_pretrained(tmp_path / "hf")
    theirs = theirs.double()
    model = ours(tmp_path / "hf")
    generator = torch.Generator().manual_seed(1)
    # Ids that nobody takes for padding.
    documents = [torch.randint(5, 97, (length,), generator=generator) for length in LENGTHS]
    tokens = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    bounds = PackedDocuments.of_lengths(LENGTHS)
    targets = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.6, IGNORED_TARGET)

    longest = max(LENGTHS)
    padded = torch.zeros(len(LENGTHS), longest, dtype=torch.int64)
    labels, mask = torch.full_like(padded, IGNORED_TARGET), torch.zeros_like(padded)
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    place = torch.full_like(padded, theirs.config.pad_token_id or 0)
    for row, (document, start) in enumerate(zip(documents, starts, strict=False)):
        padded[row, : len(document)], mask[row, : len(document)] = document, 1
        labels[row, : len(document)] = targets[0, start : start + len(document)]
        place[row, : len(document)] = torch.arange(len(document)) + model.config.position_offset
    found = theirs(padded, attention_mask=mask, position_ids=place, labels=labels)
    hidden = model(tokens, positions, bounds)
    theirs_packed = torch.cat([found.logits[row, :length] for row, length in enumerate(LENGTHS)])
    size = float(theirs_packed.abs().max())
    torch.testing.assert_close(model.logits(hidden)[0], theirs_packed, rtol=0, atol=1e-12 * max(1.0, size))

    loss = model.loss_sums(hidden, targets)[0] / (targets != IGNORED_TARGET).sum()
    torch.testing.assert_close(loss, found.loss, rtol=1e-12, atol=0)
    loss.backward()
    found.loss.backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    specs = {
        spec.name: spec.layouts[0].parts[0].name
        for spec in tensor_specs(model.config, model_type=theirs.config.model_type)
    }
    assert specs.keys() == model.state_dict().keys()
    for key, parameter in model.named_parameters():
        wanted = gradients[specs[key]]
        assert wanted.any(), key
        assert (parameter.grad - wanted).abs().max() <= 1e-10 * max(1.0, float(wanted.abs().max())), key


@pytest.mark.parametrize("name", ENCODERS)
def test_folders_come_back_bit_for_bit(name, tmp_path):
    theirs = build(ENCODERS[name])
    theirs.save_pretrained(tmp_path / "hf")
    config, tensors = load_hf(tmp_path / "hf")
    save_hf(config, tensors, tmp_path / "back", model_type=theirs.config.model_type)
    written, found = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert found.keys() <= written.keys()
    assert all(torch.equal(found[key], written[key]) for key in found)
    again, report = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    own = again.state_dict()
    assert all(torch.equal(own[key], value) for key, value in theirs.state_dict().items())
    assert load_hf(tmp_path / "back")[0] == config
    check = compare_logits(
        config, lambda: load_hf(tmp_path / "back")[1].items(), tmp_path / "back", num_parameters=1, dtype=torch.float32
    )
    assert check.passed, check


@pytest.mark.parametrize("name", ENCODERS)
def test_what_is_exported_fills_in_the_same_five_tokens(name, tmp_path):
    build(ENCODERS[name]).save_pretrained(tmp_path / "hf")
    config, tensors = load_hf(tmp_path / "hf")
    save_hf(config, tensors, tmp_path / "out")
    model = Decoder(config, seed=None).eval()
    model.load_state_dict(tensors)
    tokens = torch.randint(5, 96, (1, 30), generator=torch.Generator().manual_seed(4))
    # To RoBERTa a token of this id has no position.
    tokens[tokens == json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"]] = 5
    masked = torch.tensor([0, 11, 29])
    tokens[0, masked] = 96
    words = {f"<{n}>": n for n in range(97)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<3>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="<96>", unk_token="<3>")
    fill = transformers.pipeline("fill-mask", model=str(tmp_path / "out"), tokenizer=theirs, top_k=5)
    found = fill(" ".join(f"<{n}>" for n in tokens[0].tolist()))
    with torch.no_grad():
        logits = model.logits(model(tokens, torch.arange(30)[None]))[0, masked]
    assert [[guess["token"] for guess in of_one] for of_one in found] == logits.topk(5).indices.tolist()


def test_weights_may_have_their_old_names_and_copies(tmp_path):
    theirs = build(ENCODERS["bert"])
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {key.replace("LayerNorm.weight", "LayerNorm.gamma"): value for key, value in load_file(file).items()}
    weights = {key.replace("LayerNorm.bias", "LayerNorm.beta"): value for key, value in weights.items()}
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"].clone()
    weights["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"].clone()
    weights["bert.embeddings.position_ids"] = torch.arange(41)[None]
    save_file(weights, file)
    _, tensors = load_hf(tmp_path)
    assert torch.equal(tensors["lm_head.bias"], theirs.cls.predictions.bias)
    weights["cls.predictions.decoder.bias"] += 1
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=r"cls\.predictions\.decoder\.bias differs from cls\.predictions\.bias"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "bert", "is_decoder": True}, "is_decoder=True"),
        ({"model_type": "bert", "is_causal": True}, "is_causal=True"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"model_type": "bert", "hidden_act": "silu"}, "hidden_act='silu'"),
        ({"model_type": "bert", "num_attention_heads": 5}, "not a multiple of num_attention_heads=5"),
        ({"model_type": "bert", "tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"model_type": "roberta", "architectures": None, "hidden_act": "relu"}, "hidden_act='relu'"),
        ({"model_type": "roberta", "pad_token_id": 40}, "leaves no row after"),
    ],
)
def test_what_this_model_cannot_be_is_refused(values, said):
    config = json.loads(ENCODERS["bert"].config().to_json_string(use_diff=False))
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_hf(config | values)


@pytest.mark.parametrize(
    "preset", [name for name, config in PRESETS.items() if not config.causal and config.vocab_size]
)
def test_presets_have_as_many_parameters_as_theirs(preset):
    config = PRESETS[preset]
    described = config.to_hf()
    kind = preset.partition("-")[0].capitalize()
    assert described["model_type"] == kind.lower()
    assert ModelConfig.from_hf(described) == config
    with torch.device("meta"):
        theirs = transformers.AutoModelForMaskedLM.from_config(getattr(transformers, f"{kind}Config")(**described))
    assert sum(count_parameters(config).values()) == sum(p.numel() for p in theirs.parameters())


def test_keys_that_are_absent_mean_what_transformers_takes_for_them():
    for kind in ("Bert", "Roberta", "Albert"):
        described = getattr(transformers, f"{kind}Config")()
        bare = {"model_type": kind.lower(), "pad_token_id": 1}
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            bare[key] = getattr(described, key)
        config = ModelConfig.from_hf(bare)
        assert config.activation == {"gelu": "gelu", "gelu_new": "gelu_tanh"}[described.hidden_act]
        assert config.residual_dropout == described.hidden_dropout_prob
        assert config.norm_eps == described.layer_norm_eps


def test_a_tokenizer_whose_padding_is_another_one_is_not_exported_with_roberta(tmp_path):
    tokenizer = byte_level_tokenizer(tmp_path)
    offset = tokenizer.padding + 2
    config = dataclasses.replace(PRESETS["roberta-base"], **SMALL, vocab_size=300, position_offset=offset)
    with pytest.raises(ConfigError, match=rf"skips id {offset - 1} "):
        save_hf(config, Decoder(config).state_dict(), tmp_path / "out", tokenizer=tokenizer)
    fitting = dataclasses.replace(config, position_offset=tokenizer.padding + 1)
    save_hf(fitting, Decoder(fitting).state_dict(), tmp_path / "out", tokenizer=tokenizer)
