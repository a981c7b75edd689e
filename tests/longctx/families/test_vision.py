"""ViT, Swin and Image GPT's classifier against transformers in float64, and their folders there and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers

from longctx.architecture.size import count_parameters
from longctx.batch import Stream
from longctx.config import PRESETS, ModelConfig
from longctx.conversion import load_hf, save_hf
from longctx.conversion.verify_images import RandomImages
from longctx.errors import ConfigError
from longctx.model.decoder import Decoder
from longctx.model.image_stages import hidden_in_reading_order
from longctx.model.training_pass import Execution
from longctx.objectives.build import Objective, build_objective
from longctx.objectives.document_labels import LabelledDocuments, label_logits
from longctx.objectives.routed_task import hidden_states
from tests.launcher.cli.calls import call
from tests.longctx.families import hf_models
from tests.longctx.families.hf_models import VISION
from tests.longctx.image_samples import image_stream

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

CLASSIFIERS = tuple(name for name in VISION if "no head" not in name)
HEADLESS = tuple(name for name in VISION if "no head" in name)
EXECUTIONS = {"plain": Execution(), "chunks": Execution(chunk_tokens=7), "inputs": Execution(keep="inputs")}
IMAGES = 5


def pair(name: str, folder, execution: Execution | None = None):
    """Their model and ours, both in float64, from one folder."""
    theirs = hf_models.build(VISION[name])
    config, tensors = load_hf(hf_models.save(theirs, folder))
    ours = Decoder(config, execution=execution, seed=None).double()
    ours.load_state_dict(tensors)
    # By its definition their attention takes the softmax in float32.
    theirs.set_attn_implementation("sdpa")
    return theirs.double(), ours


def packed(config: ModelConfig) -> tuple[Stream, dict[str, torch.Tensor]]:
    """Labelled images as one row with padding behind them, and the same as transformers takes them."""
    stream, images, labels = image_stream(config, IMAGES, padding=0 if config.image.depths else 3)
    if not config.image.patch:
        # A classifier reads every pixel, and no begin token.
        tokens = stream.tokens.clone()
        tokens[0, : images.numel()] = images.flatten()
        return replace(stream, tokens=tokens), {"input_ids": images, "labels": labels}
    return stream, {"pixel_values": (images.double() / 255 - 0.5) / 0.5, "labels": labels}


def logits_of(ours: Decoder, stream: Stream) -> torch.Tensor:
    reduce_sums = (lambda sums, _: sums) if ours.config.class_pool == "mean" else None
    hidden, documents = hidden_states(ours, stream), LabelledDocuments.of(stream)
    return label_logits(ours, ours.class_head, hidden, stream, documents, reduce_sums)


@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=list(EXECUTIONS))
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_logits_loss_and_gradients_packed_here_and_as_a_batch_there(name, execution, tmp_path):
    theirs, ours = pair(name, tmp_path / "hf", execution)
    stream, given = packed(ours.config)
    wanted = theirs(**given)
    task = build_objective(ours, Objective("classes"))
    batch = task.prepare(stream)
    if not execution.chunk_tokens:
        torch.testing.assert_close(logits_of(ours, batch), wanted.logits, rtol=0, atol=1e-12)
    sums = task.loss_sum(task(batch))
    loss = task.loss(sums, task.denominators(batch))
    torch.testing.assert_close(loss, wanted.loss, rtol=1e-12, atol=0)
    assert float(sums["right_classes"]) == float((wanted.logits.argmax(1) == given["labels"]).sum())

    loss.backward()
    wanted.loss.backward()
    expected = hf_models.gradients_in_float64(theirs, ours.config, tmp_path / "gradients")
    assert expected.keys() == ours.state_dict().keys()
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert expected[key].any(), key
        error = (parameter.grad - expected[key]).abs().max()
        assert error <= 1e-10 * max(1.0, float(expected[key].abs().max())), key


@pytest.mark.parametrize("name", HEADLESS)
def test_hidden_states_without_a_head(name, tmp_path):
    theirs, ours = pair(name, tmp_path / "hf")
    assert ours.config.classes == 0
    stream, images, _ = image_stream(ours.config, IMAGES)
    with torch.no_grad():
        wanted = theirs(pixel_values=(images.double() / 255 - 0.5) / 0.5).last_hidden_state
        found = hidden_in_reading_order(ours.config, hidden_states(ours, stream))
    torch.testing.assert_close(found, wanted.flatten(0, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", VISION)
def test_a_folder_comes_back_bit_for_bit(name, tmp_path):
    theirs = hf_models.build(VISION[name])
    folder = hf_models.save(theirs, tmp_path / "hf")
    config, tensors = load_hf(folder)
    save_hf(config, tensors, tmp_path / "again", model_type=theirs.config.model_type, shard_bytes=50_000)
    before, after = hf_models.on_disk(folder), hf_models.on_disk(tmp_path / "again")
    # The pooler is a head for other tasks, and not read.
    assert before.keys() - after.keys() == {key for key in before if "pooler" in key}
    assert all(torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8)) for key in after)
    hf = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (hf["model_type"], hf["architectures"]) == (theirs.config.model_type, [type(theirs).__name__])
    assert ModelConfig.from_hf(hf) == config
    same, report = getattr(transformers, VISION[name].auto_class).from_pretrained(
        str(tmp_path / "again"), local_files_only=True, output_loading_info=True, attn_implementation="eager"
    )
    assert type(same) is type(theirs)
    assert {key.split(".")[0] for key in report["missing_keys"]} <= {"pooler"}
    assert not report["unexpected_keys"]
    images = RandomImages.of(config, 100)
    given = {"input_ids": images.tokens_NT} if images.pixels_NCHW is None else {}
    if images.pixels_NCHW is not None:
        given = {"pixel_values": images.normalized(torch.float32)}
    assert torch.equal(same(**given)[0], theirs(**given)[0])


@pytest.mark.parametrize("name", VISION)
def test_the_command_compares_outputs_both_ways(name, tmp_path, capsys):
    hf_models.save(hf_models.build(VISION[name]), tmp_path / "hf")
    code, out, err = call(capsys, "convert", "--from", "hf", tmp_path / "hf", tmp_path / "ours", "--verify", "logits")
    assert code == 0, err
    assert ("hidden states at most" if "no head" in name else "logits at most") in out
    code, out, err = call(capsys, "convert", "--to", "hf", tmp_path / "ours", tmp_path / "back", "--verify", "logits")
    assert code == 0, err
    assert "transformers' eager and sdpa are" in out
    assert VISION[name].auto_class in out


def test_a_wrong_order_of_channels_is_found(tmp_path, capsys, monkeypatch):
    hf_models.save(hf_models.build(VISION["vit"]), tmp_path / "hf")
    right = RandomImages.patches
    monkeypatch.setattr(RandomImages, "patches", lambda images: right(images).flip(2))
    code, _, err = call(capsys, "convert", "--from", "hf", tmp_path / "hf", tmp_path / "ours", "--verify", "logits")
    assert code == 1
    assert "the decoder and transformers disagree" in err
    assert not (tmp_path / "ours").exists()


CLASSIFIER = {"architectures": ["ViTForImageClassification"]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"patch_size": [4, 2]}, r"patch_size=\[4, 2\] in config.json is not supported; supported: squares"),
        ({"image_size": [12, 20, 3]}, "image_size=.* must be one number, or height and width"),
        ({"image_size": [12, 21]}, r"image.width=21 is not a multiple of .*patch=4.\nTry model.image.width=20 or 24"),
        ({"patch_size": 30}, r"image.height=12 is not a multiple of .*patch=30.\nTry model.image.height=30"),
        ({"num_attention_heads": 4}, "hidden_size=30 in config.json is not a multiple of num_attention_heads=4"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not supported.*quick_gelu"),
        ({"num_channels": 0}, "channels=0 must be between 1 and 16"),
        (CLASSIFIER | {"id2label": {"0": "cat", "2": "dog"}}, "no name for class 1"),
        (CLASSIFIER | {"id2label": ["cat", "dog"]}, "must be a table with a name per class"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, "vit means ViTModel"),
        ({"is_causal": True}, "is_causal=True is not supported"),
        ({"window": 3}, "keys that longctx does not read for a vit model: window=3"),
    ],
)
def test_a_vit_that_we_cannot_be_is_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_hf(VISION["vit"].config_json() | values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"use_absolute_embeddings": True}, "use_absolute_embeddings=True is not supported"),
        ({"num_heads": [2, 2]}, r"num_heads=\[2, 2\] .* each twice the one before"),
        ({"num_heads": [2, 4, 8]}, r"one number per stage of depths=\[2, 3\]"),
        ({"depths": [1] * 9}, "depths=.* must list 1 to 8 numbers"),
        ({"hidden_size": 32}, r"hidden_size=32 .* contradict embed_dim=8 and depths=\[2, 3\]"),
        ({"image_size": [24, 50]}, r"image.width=50 does not divide into windows.*multiple of 12.\n.*width=48 or 60"),
        ({"window_size": 5}, r"image.height=24 does not divide .*multiple of 20.\nTry model.image.height=20 or 40"),
        ({"patch_size": [2, 4]}, "supported: squares"),
        ({"hidden_dropout_prob": 0.1}, "hidden_dropout_prob=0.1 is not supported"),
    ],
)
def test_a_swin_that_we_cannot_be_is_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_hf(VISION["swin"].config_json() | values)


def test_absent_keys_mean_what_transformers_takes_for_them():
    required = {
        "vit": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        "swin": ("embed_dim", "depths", "num_heads"),
    }
    for kind in (transformers.ViTConfig, transformers.SwinConfig):
        described = json.loads(kind().to_json_string(use_diff=False)) | {"architectures": None}
        bare = {"model_type": kind.model_type} | {key: described[key] for key in required[kind.model_type]}
        assert ModelConfig.from_hf(bare) == ModelConfig.from_hf(described)


@pytest.mark.parametrize("name", ["vit-base-16", "vit-large-16", "swin-tiny", "swin-base"])
def test_presets_have_as_many_parameters_as_transformers_models(name):
    written = PRESETS[name].to_hf()
    described = transformers.AutoConfig.for_model(**written)
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageClassification.from_config(described)
    assert described.num_labels == 1000
    assert sum(count_parameters(PRESETS[name]).values()) == sum(p.numel() for p in theirs.parameters())


def test_dropped_branches_are_logged_and_other_architectures_have_no_head(caplog):
    values = VISION["swin"].config_json() | {"drop_path_rate": 0.2, "architectures": ["SwinModel"]}
    assert ModelConfig.from_hf(values).classes == 0
    assert "drop_path_rate=0.2 of config.json is ignored" in caplog.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"class_pool": "mean"}, r"nearest is vit.*\n.*model.class_pool: 'mean' .it would become 'first'"),
        ({"norm": "rmsnorm"}, r"nearest is vit.*\n.*model.norm: 'rmsnorm'"),
    ],
)
def test_models_that_no_folder_describes_are_named(changes, said):
    config = ModelConfig.from_hf(VISION["vit"].config_json() | CLASSIFIER)
    assert config.to_hf()["architectures"] == ["ViTForImageClassification"]
    with pytest.raises(ConfigError, match=said):
        config.from_dict(vars(config) | changes).to_hf()


def test_both_heads_of_an_image_gpt_have_no_class():
    values = VISION["imagegpt, classes"].config_json() | {"architectures": ["ImageGPTForImageClassification"]}
    config = ModelConfig.from_hf(values)
    assert (config.class_pool, config.class_bias, config.token_head) == ("mean", False, False)
    # A run that leaves the token head unread keeps its number of outputs.
    assert config.from_dict(vars(config) | {"output_vocab_size": 0}).to_hf() == config.to_hf()
    with pytest.raises(ConfigError, match=r"nearest is imagegpt.*\n.*model.token_head: True .it would become False"):
        config.from_dict(vars(config) | {"token_head": True}).to_hf()
