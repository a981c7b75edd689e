"""Models of several parts, made by transformers: the text model is read, and all parts are written again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from launcher.checkpoint.checkpoint_files import StaticFiles
from longctx.checkpoint_format import CheckpointReader
from longctx.config import ModelConfig
from longctx.conversion import HfReader, export_checkpoint, import_hf
from longctx.conversion.passthrough import passthrough_files, passthrough_from_checkpoint
from longctx.errors import CheckpointError, ConfigError
from tests.longctx.families.hf_models import CASES, build, on_disk, ours, save, tokens_of
from tests.longctx.families.whole_models import WHOLE, bits, edit, whole_model


@pytest.mark.parametrize("name", WHOLE)
def test_logits_are_those_of_the_whole_model_and_a_round_trip_keeps_every_bit(name, tmp_path):
    model = whole_model(name, tmp_path / "hf")
    (tmp_path / "hf" / "preprocessor_config.json").write_text('{"size": 16}')
    tokens_BT = tokens_of(ModelConfig.from_hf(json.loads((tmp_path / "hf" / "config.json").read_text()))) % 90
    decoder = ours(tmp_path / "hf")
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    with torch.no_grad():
        theirs = model(tokens_BT).logits
        error = decoder.logits(decoder(tokens_BT, positions_BT)) - theirs
    # Sums in another order.
    assert error.norm() <= 1e-5 * theirs.norm()
    done = import_hf(tmp_path / "hf", tmp_path / "ours", verify="logits")
    assert "preprocessor_config.json" in done.auxiliary_files
    back = export_checkpoint(tmp_path / "ours", tmp_path / "back", verify="logits").folder
    assert bits(tmp_path / "hf") == bits(back)
    before, after = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "hf", back))
    assert before["vision_config"] == after["vision_config"]
    assert before["architectures"] == after["architectures"]
    assert (back / "preprocessor_config.json").read_text() == '{"size": 16}'
    again = transformers.AutoModelForImageTextToText.from_pretrained(str(back), attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens_BT).logits, theirs)
    assert again.config.text_config.to_dict().get("rope_parameters") == model.config.text_config.rope_parameters
    # A folder that we wrote is read like any other.
    assert HfReader(back).config == HfReader(tmp_path / "hf").config


def test_a_text_model_alone_is_what_was_asked_for(tmp_path, caplog):
    whole_model("qwen3_5", tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ours", text_only=True)
    assert "left out as requested" in caplog.text
    assert passthrough_from_checkpoint(CheckpointReader(tmp_path / "ours")) is None
    back = export_checkpoint(tmp_path / "ours", tmp_path / "back", verify="logits").folder
    assert json.loads((back / "config.json").read_text())["model_type"] == "qwen3_5_text"
    assert not [name for name in on_disk(back) if "visual" in name or "mtp" in name]


def test_layers_beyond_the_decoders_go_out_as_they_came(tmp_path):
    save(build(CASES["deepseek_v3"]), tmp_path / "hf")
    extra = {"model.layers.3.enorm.weight": torch.randn(5), "model.layers.3.embed_tokens.weight": torch.randn(3, 5)}
    save_file(extra, tmp_path / "hf" / "mtp.safetensors")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(extra, "mtp.safetensors")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    edit(tmp_path / "hf", lambda config: config.update(num_nextn_predict_layers=1))
    import_hf(tmp_path / "hf", tmp_path / "ours")
    back = export_checkpoint(tmp_path / "ours", tmp_path / "back").folder
    assert bits(tmp_path / "hf") == bits(back)
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_makers_names_of_llava_are_read_and_kept(tmp_path):
    """Names as modules have them in memory, beside those of makers' files."""
    whole_model("gemma3", tmp_path / "hf")
    tensors = on_disk(tmp_path / "hf")
    made = {name.startswith("model.language_model.") or name.startswith("language_model.model.") for name in tensors}
    assert True in made
    in_memory = {}
    for name, tensor in tensors.items():
        if name.startswith("language_model.model."):
            name = "model.language_model." + name.removeprefix("language_model.model.")
        elif name.startswith(("vision_tower.", "multi_modal_projector.")):
            name = f"model.{name}"
        in_memory[name] = tensor
    other = tmp_path / "other"
    other.mkdir()
    save_file(in_memory, other / "model.safetensors")
    shutil.copy(tmp_path / "hf" / "config.json", other)
    import_hf(other, tmp_path / "ours")
    assert bits(export_checkpoint(tmp_path / "ours", tmp_path / "back").folder) == bits(other)


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda c: c["text_config"].update(model_type="llama"), "text_config.model_type='llama'"),
            (lambda c: c.update(text_config=None), "must be a table"),
            (lambda c: c.update(audio_config={}), "audio_config"),
            (lambda c: c.update(architectures=["Qwen3_5Model"]), "architectures"),
            (lambda c: c["text_config"].update(attn_output_gate=False), "attn_output_gate=False"),
        ],
    )
    def test_a_config_that_is_not_understood(self, change, message, tmp_path):
        whole_model("qwen3_5", tmp_path / "hf")
        edit(tmp_path / "hf", change)
        with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
            import_hf(tmp_path / "hf", tmp_path / "ours")
        assert not (tmp_path / "ours").exists()

    def test_a_tensor_of_no_part(self, tmp_path):
        whole_model("qwen3_5", tmp_path / "hf")
        file = tmp_path / "hf" / "model-mtp.safetensors"
        save_file(load_file(file) | {"model.audio.weight": torch.zeros(2)}, file)
        index = tmp_path / "hf" / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"]["model.audio.weight"] = file.name
        index.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"model\.audio\.weight"):
            import_hf(tmp_path / "hf", tmp_path / "ours")


class TestInARun:
    """Every checkpoint of a run has the files, once on the disk."""

    @pytest.fixture
    def origin(self, tmp_path) -> StaticFiles:
        whole_model("qwen3_5", tmp_path / "hf")
        import_hf(tmp_path / "hf", tmp_path / "ours")
        files = CheckpointReader(tmp_path / "ours").manifest["files"]
        return StaticFiles(origin=tmp_path / "ours", files={name: files[name] for name in passthrough_files(files)})

    def test_files_are_linked(self, origin, tmp_path):
        (tmp_path / "step").mkdir()
        written = origin.put_into(tmp_path / "step", tmp_path / "run")
        assert [file.name for file in written] == ["carried.safetensors", "imported_config.json"]
        assert (tmp_path / "step" / written[0].name).stat().st_nlink == 2

    def test_without_links_they_are_copied(self, origin, tmp_path, monkeypatch):
        def refuse(*_: Any) -> None:
            raise OSError("no links")

        monkeypatch.setattr(Path, "hardlink_to", refuse)
        (tmp_path / "step").mkdir()
        origin.put_into(tmp_path / "step", tmp_path / "run")
        copied = tmp_path / "step" / "carried.safetensors"
        assert copied.read_bytes() == (tmp_path / "ours" / "carried.safetensors").read_bytes()

    def test_what_is_gone_is_named(self, origin, tmp_path):
        (tmp_path / "ours" / "carried.safetensors").unlink()
        (tmp_path / "step").mkdir()
        with pytest.raises(CheckpointError, match=r"carried\.safetensors"):
            origin.put_into(tmp_path / "step", tmp_path / "run")
