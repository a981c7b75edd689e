"""Whole models to Hugging Face and back: the same logits, the same bytes, the same tokens."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from longctx.checkpoint_format import CheckpointReader
from longctx.config import PRESETS, ModelConfig
from longctx.conversion import HfReader, export_checkpoint, import_hf, load_hf, save_hf
from longctx.conversion.tensor_layouts import tensor_specs
from longctx.errors import CheckpointError, ConfigError
from longctx.generation.load_decoder import load_model
from longctx.generation.loop import generate
from longctx.model.decoder import Decoder
from tests.longctx.conversion.tiny_tokenizer import train_tokenizer
from tests.longctx.families.hf_models import on_disk
from tests.longctx.samples import dense_config, randomize, tiny_config

MOE = tiny_config(tie_embeddings=False)
MODELS = {
    "qwen2_moe": MOE,
    "qwen2_moe tied": tiny_config(normalize_gates=False),
    "qwen2_moe without bias": tiny_config(qkv_bias=False),
    "qwen2": dense_config(tie_embeddings=False),
    "llama": dense_config(qkv_bias=False, tie_embeddings=False),
    "llama tied": dense_config(qkv_bias=False, num_kv_heads=4),
}


def decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    model = Decoder(config, seed=None)
    randomize(model, std=0.15, seed=seed)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


def assert_same_tensors(a: Path, b: Path) -> None:
    first, second = on_disk(a), on_disk(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


@pytest.mark.parametrize("preset", ["quickstart", "quickstart-dense"])
def test_a_preset_exports_with_its_tokenizer_and_generates_the_same_text(preset, tmp_path, tokenizer):
    import transformers

    model = decoder(dataclasses.replace(PRESETS[preset], vocab_size=640, num_layers=2, tie_embeddings=False))
    folder = str(save_hf(model.config, model.state_dict(), tmp_path / "hf", tokenizer=tokenizer))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    fast = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompt = fast("def main():\n", return_tensors="pt")
    theirs = reference.generate(**prompt, max_new_tokens=24, do_sample=False)[0].tolist()
    ids = prompt["input_ids"][0].tolist()
    assert ids + generate(model, ids, 24, stop_ids=[fast.eos_token_id]) == theirs
    assert reference.generation_config.eos_token_id == fast.eos_token_id == 2


class TestRoundTrip:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_every_byte_survives(self, name, dtype, tmp_path):
        model = decoder(MODELS[name])
        ids = {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": None}
        save_hf(model.config, model.state_dict(), tmp_path / "a", dtype=dtype, token_ids=ids)
        import_hf(tmp_path / "a", tmp_path / "ours")
        export_checkpoint(tmp_path / "ours", tmp_path / "b", shard_bytes=30_000)
        assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
        assert_same_tensors(tmp_path / "a", tmp_path / "b")
        assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "b" / "config.json").read_text()
        assert ("lm_head.weight" in on_disk(tmp_path / "a")) == (not model.config.tie_embeddings)

    def test_mixed_dtypes_import_into_the_narrowest_that_holds_them_all(self, tmp_path):
        model = decoder(MOE)
        tensors = {n: t.to(torch.float32 if "norm" in n else torch.bfloat16) for n, t in model.state_dict().items()}
        save_hf(MOE, tensors, tmp_path / "hf")
        assert HfReader(tmp_path / "hf").dtype == torch.float32
        assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float32"
        assert import_hf(tmp_path / "hf", tmp_path / "ours").folder == tmp_path / "ours"
        assert CheckpointReader(tmp_path / "ours").dtype == torch.float32
        assert export_checkpoint(tmp_path / "ours", tmp_path / "again").lossy_casts == {}
        assert_same_tensors(tmp_path / "hf", tmp_path / "again")

    def test_a_run_folder_exports_its_newest_checkpoint_in_the_runs_dtype(self, tmp_path, tokenizer):
        config = dataclasses.replace(MOE, vocab_size=600)
        for step, seed in ((5, 0), (20, 1)):
            save_hf(config, decoder(config, seed).state_dict(), tmp_path / f"hf{step}", tokenizer=tokenizer)
            import_hf(
                tmp_path / f"hf{step}",
                tmp_path / "run" / "checkpoints" / f"step_{step:06d}",
                dtype=torch.bfloat16,
            )
        (tmp_path / "run" / "checkpoints" / "step_000030").mkdir()  # a save that was killed
        calls = []
        export_checkpoint(tmp_path / "run", tmp_path / "hf", progress=lambda *call: calls.append(call))
        count = len(tensor_specs(config))
        assert calls == [(what, done, count) for what in ("written", "verified") for done in range(1, count + 1)]
        expected = {n: t.to(torch.bfloat16) for n, t in on_disk(tmp_path / "hf20").items()}
        found = on_disk(tmp_path / "hf")
        assert all(found[n].dtype == torch.bfloat16 and torch.equal(found[n], t) for n, t in expected.items())
        assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == tokenizer.read_bytes()
        assert json.loads((tmp_path / "hf" / "config.json").read_text())["bos_token_id"] == 1

    def test_load_model_holds_the_masters(self, tmp_path):
        model = decoder(MOE)
        save_hf(MOE, model.state_dict(), tmp_path / "hf")
        import_hf(tmp_path / "hf", tmp_path / "ours")
        loaded = load_model(tmp_path / "ours")
        assert loaded.config == MOE
        assert all(torch.equal(t, model.state_dict()[n]) for n, t in loaded.state_dict().items())
        assert load_model(tmp_path / "ours", torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


class TestRefusals:
    def save(self, folder: Path, config: ModelConfig = MOE, **changes) -> Path:
        tensors = dict(decoder(config).state_dict()) | changes
        return save_hf(config, {n: t for n, t in tensors.items() if t is not None}, folder)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"model.norm.weight": None}, r"missing \(1\): model.norm.weight"),
            ({"model.extra": torch.zeros(3)}, "unexpected .*model.extra"),
            ({"model.norm.weight": torch.zeros(31)}, r"wrong shape .*model.norm.weight \(31,\) instead of \(32,\)"),
            ({"model.norm.weight": torch.zeros(32, dtype=torch.float64)}, "float64"),
        ],
    )
    def test_save_takes_each_parameter_once(self, tmp_path, change, said):
        with pytest.raises((CheckpointError, ConfigError), match=said):
            self.save(tmp_path / "hf", **change)
        assert list(tmp_path.iterdir()) == []

    def test_save_refuses_a_tensor_given_twice(self, tmp_path):
        tensors = list(decoder(MOE).state_dict().items())
        with pytest.raises(CheckpointError, match="given twice"):
            save_hf(MOE, [*tensors, tensors[3]], tmp_path / "hf")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"model.layers.1.mlp.experts.2.up_proj.weight": None}, r"missing \(1\): .*experts.2.up_proj"),
            ({"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(4, 32, 32)}, r"unexpected \(1\): .*gate_up_proj"),
            ({"model.layers.0.mlp.experts.4.up_proj.weight": torch.zeros(16, 32)}, "unexpected .*experts.4"),
            ({"model.embed_tokens.weight": torch.zeros(96, 32)}, r"\(96, 32\) instead of \(97, 32\)"),
            ({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}, "I8"),
        ],
    )
    def test_load_uses_each_tensor_once(self, tmp_path, change, said):
        folder = self.save(tmp_path / "hf")
        changed = on_disk(folder) | change
        save_file({n: t for n, t in changed.items() if t is not None}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=said):
            load_hf(folder)

    def test_a_tied_head_may_be_on_disk_if_it_is_equal(self, tmp_path):
        folder = self.save(tmp_path / "hf", tiny_config())
        tensors = on_disk(folder)
        head = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
        assert "lm_head.weight" not in load_hf(folder)[1]
        head[3, 5] += 1
        save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match="tie_word_embeddings"):
            load_hf(folder)

    def test_an_existing_output_is_kept(self, tmp_path):
        (tmp_path / "hf").mkdir()
        self.save(tmp_path / "hf")
        before = (tmp_path / "hf" / "model.safetensors").read_bytes()
        with pytest.raises(CheckpointError, match="already exists"):
            self.save(tmp_path / "hf")
        with pytest.raises(CheckpointError, match="already exists"):
            import_hf(tmp_path / "hf", tmp_path / "hf")
        assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before
        assert len(list(tmp_path.iterdir())) == 1
