"""Verification finds what it is for; casts happen only when asked."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longctx.checkpoint_format import CheckpointReader, canonical_hash
from longctx.conversion import export_checkpoint, import_hf, load_hf, save_hf, verify_conversion
from longctx.conversion import hf_conversion as checkpoints
from longctx.conversion.casts import lossy_casts, read_master
from longctx.conversion.verify_conversion import (
    Fingerprints,
    check_logits,
    compare_logits,
    logit_distance,
    logits_skip_reason,
)
from longctx.errors import CheckpointError, ConfigError
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from tests.longctx.families import hf_models
from tests.longctx.samples import dense_config, randomize
from tests.rounding import both_ways, rounded

CONFIG = dense_config(qkv_bias=False, tie_embeddings=False, num_layers=1)


@pytest.fixture
def hf(tmp_path) -> Path:
    return save_model(tmp_path / "hf")


def save_model(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    return save_hf(CONFIG, decoder().state_dict(), folder, dtype=dtype)


def decoder() -> Decoder:
    model = Decoder(CONFIG, seed=None)
    randomize(model, std=0.15)
    return model


def rewrite(folder: Path, change) -> None:
    """Change a folder's tensors; ``change(name, tensor)`` returns what to write."""
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: change(name, tensor).contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )


class TestTensors:
    def test_what_is_equal_passes_with_its_numbers(self):
        tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}
        prints = Fingerprints()
        assert dict(prints.record(tensors.items())).keys() == tensors.keys()
        check = prints.check(((name, t.clone()) for name, t in tensors.items()), "here")
        assert (check.num_tensors, check.num_bytes) == (2, 58)

    @pytest.mark.parametrize(
        ("found", "said"),
        [
            ({"a": torch.zeros(3)}, r"b \(missing\)"),
            ({"a": torch.zeros(3), "b": torch.ones(2), "c": torch.ones(1)}, r"c \(unexpected\)"),
            ({"a": torch.zeros(3), "b": torch.ones(2).bfloat16()}, r"b \(bfloat16 \(2,\) instead of float32 \(2,\)"),
            ({"a": torch.zeros(1, 3), "b": torch.ones(2)}, r"a \(float32 \(1, 3\) instead of"),
            ({"a": torch.tensor([0.0, -0.0, 0.0]), "b": torch.ones(2)}, r"a \(other bytes\)"),
        ],
    )
    def test_any_difference_is_named(self, found, said):
        prints = Fingerprints()
        list(prints.record({"a": torch.zeros(3), "b": torch.ones(2)}.items()))
        with pytest.raises(CheckpointError, match=f"here does not match.*{said}"):
            prints.check(found.items(), "here")

    @pytest.mark.parametrize("direction", ["to", "from"])
    def test_a_converter_that_swaps_two_tensors_is_caught(self, hf, tmp_path, monkeypatch, direction):
        """Two tensors of one shape under each other's names: every file is whole, every name there, the model wrong."""
        import_hf(hf, tmp_path / "ours")
        name = "save_hf" if direction == "to" else "save_master_weights"
        right = getattr(checkpoints, name)
        names = {"g": "gate", "u": "up"}
        swap = {
            f"model.layers.0.mlp.{names[a]}_proj.weight": f"model.layers.0.mlp.{names[b]}_proj.weight"
            for a, b in ("gu", "ug")
        }
        monkeypatch.setattr(
            checkpoints, name, lambda c, items, *a, **k: right(c, [(swap.get(n, n), t) for n, t in items], *a, **k)
        )
        run, source = (export_checkpoint, tmp_path / "ours") if direction == "to" else (import_hf, hf)
        with pytest.raises(CheckpointError, match=r"2 tensors differ: .*gate_proj.*up_proj"):
            run(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".*"))
        assert run(source, tmp_path / "out", verify="none").tensors is None  # nothing else would have noticed


class TestCasts:
    def test_nothing_is_lost_unasked(self, tmp_path):
        """A trained checkpoint goes out as its masters, an imported one as it came, whatever the run computed in."""
        import_hf(save_model(tmp_path / "hf", torch.bfloat16), tmp_path / "ours")
        done = export_checkpoint(tmp_path / "ours", tmp_path / "as it came")
        assert (done.dtype, done.lossy_casts) == (torch.bfloat16, {})
        edit_manifest(tmp_path / "ours", lambda m: m["training"].pop("imported"))  # as a run writes it
        done = export_checkpoint(tmp_path / "ours", tmp_path / "masters")
        assert (done.dtype, done.lossy_casts) == (torch.float32, {})
        done = export_checkpoint(tmp_path / "ours", tmp_path / "asked", dtype=torch.bfloat16)
        count = len(CheckpointReader(tmp_path / "ours").names())
        assert (done.dtype, done.lossy_casts) == (torch.bfloat16, {"float32 → bfloat16": count})

    def test_asking_at_import_counts(self, hf, tmp_path):
        assert import_hf(hf, tmp_path / "ours", dtype=torch.bfloat16).lossy_casts == {}
        done = export_checkpoint(tmp_path / "ours", tmp_path / "out")
        assert done.dtype == torch.bfloat16
        assert list(done.lossy_casts) == ["float32 → bfloat16"]
        done = export_checkpoint(tmp_path / "ours", tmp_path / "whole", dtype=torch.float32)
        assert (done.dtype, done.lossy_casts) == (torch.float32, {})

    def test_what_loses_bits(self):
        dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float16, "d": torch.float16}
        after = {"a": torch.float32, "b": torch.float32, "c": torch.bfloat16, "d": torch.float16}
        assert lossy_casts(dtypes, after) == {"float16 → bfloat16": 1}

    def test_float16_overflow_is_refused(self, hf, tmp_path):
        rewrite(hf, lambda name, t: t * 1e6 if name == "model.norm.weight" else t)
        import_hf(hf, tmp_path / "ours")
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight has values beyond float16's 65504"):
            export_checkpoint(tmp_path / "ours", tmp_path / "out", dtype=torch.float16)
        assert not (tmp_path / "out").exists()

    def test_a_master_read_exactly_must_fit_its_dtype(self, hf, tmp_path):
        import_hf(hf, tmp_path / "ours")
        reader = CheckpointReader(tmp_path / "ours")
        name = "lm_head.weight"
        assert torch.equal(read_master(reader, name, torch.bfloat16), decoder().state_dict()[name].bfloat16())
        with pytest.raises(CheckpointError, match="without losing bits"):
            read_master(reader, name, torch.bfloat16, is_exact=True)


def edit_manifest(checkpoint: Path, change) -> None:
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest | {"hash": canonical_hash(manifest)}))


class TestLogits:
    def test_both_directions_agree_with_transformers(self, hf, tmp_path):
        for done in (
            import_hf(hf, tmp_path / "ours", verify="logits"),
            export_checkpoint(tmp_path / "ours", tmp_path / "out", verify="auto"),
        ):
            assert done.logits is not None
            assert done.logits.max_error <= 1e-5
            assert done.logits.max_kl <= 1e-10
            assert (done.logits.error_bound, done.logits.kl_bound) == (1e-5, 1e-10)
            assert done.logits.variants in (verify_conversion.TWO_ATTENTIONS, verify_conversion.TWO_POSITIONS)
            assert (done.logits.inputs, done.logits.dtype, done.logits_skip_reason) == (
                "256 tokens",
                torch.float32,
                None,
            )

    def test_a_rope_permutation_fails(self, hf, tmp_path):
        """Half-split rows given as interleaved pairs: every hash is right, only logits can tell."""

        def turned():
            for name, tensor in decoder().state_dict().items():
                if "q_proj" in name or "k_proj" in name:
                    heads = tensor.unflatten(0, (-1, 2, CONFIG.head_dim // 2))
                    tensor = heads.transpose(1, 2).flatten(0, 2)
                yield name, tensor

        with pytest.raises(CheckpointError, match="disagree") as refusal:
            compare_logits(CONFIG, turned, hf, num_parameters=10_000, dtype=torch.float32)
        assert "allowed 1.0e-05" in str(refusal.value)

    def test_nothing_appears_where_logits_disagree(self, hf, tmp_path, monkeypatch):
        monkeypatch.setattr(verify_conversion, "MAX_LOGIT_ERROR", 0.0)
        monkeypatch.setattr(verify_conversion, "VARIANT_FACTOR", 0)
        with pytest.raises(CheckpointError, match="disagree"):
            import_hf(hf, tmp_path / "ours", verify="logits")
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]

    def test_bars(self):
        logits = torch.randn(40, 97, generator=torch.Generator().manual_seed(0))
        near, far, farther = (logits + step * logits.sign() for step in (1e-6, 1e-4, 1e-3))

        def passes(ours, other, ways=verify_conversion.TWO_ATTENTIONS) -> bool:
            return check_logits(ours, {ways: (logits, other)}, dtype=torch.float32).passed

        assert passes(near, logits)
        assert not passes(far, logits)
        assert passes(far, far)  # no worse than transformers with itself
        assert not passes(farther, far)
        assert passes(farther, far, verify_conversion.TWO_PASSES)
        both = {verify_conversion.TWO_ATTENTIONS: (logits, near), verify_conversion.TWO_POSITIONS: (logits, far)}
        check = check_logits(far, both, dtype=torch.float32)
        assert check.passed
        assert check.variants == verify_conversion.TWO_POSITIONS
        assert not passes(logits * math.nan, logits)
        assert not passes(logits.roll(1, 0), logits)

    def test_sharp_attention_is_measured_where_positions_begin_elsewhere(self, tmp_path):
        """Both of transformers' attentions share the rounding of its angles, which is most of what is to be seen."""
        case = hf_models.CASES["llama yarn"]
        sizes = {"vocab_size": 600, "max_position_embeddings": 256}
        folder = tmp_path / "hf"
        hf_models.save(hf_models.build(dataclasses.replace(case, std=0.4, values={**case.values, **sizes})), folder)
        done = import_hf(folder, tmp_path / "ours", verify="logits")
        assert done.logits is not None
        assert done.logits.variants == verify_conversion.TWO_POSITIONS
        assert done.logits.max_error > 1e-5

    def test_a_model_with_one_attention_is_measured_by_two_passes(self, tmp_path):
        import transformers

        torch.manual_seed(0)
        config = transformers.Gemma2Config(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, max_position_embeddings=64,
        )  # fmt: skip
        transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path / "hf")
        done = import_hf(tmp_path / "hf", tmp_path / "ours", verify="logits")
        assert done.logits is not None
        assert done.logits.variants == verify_conversion.TWO_PASSES
        assert done.logits.max_error <= 1e-5
        assert done.logits.variant_error < 1e-5  # on some processors the two passes are equal to the last bit

    def test_distance_is_the_plain_formula(self):
        p, q = torch.randn(2, 45, 31, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        divergence = (p.softmax(-1) * (p.softmax(-1).log() - q.softmax(-1).log())).sum(-1)
        assert logit_distance(p, q) == pytest.approx((float((p - q).abs().max()), float(divergence.max())), rel=1e-12)

    def test_without_room_it_says_so(self, hf, tmp_path, monkeypatch):
        assert "GiB" in str(logits_skip_reason(CONFIG, 10**12, torch.float32))
        monkeypatch.setattr(verify_conversion, "available_bytes", lambda: 10**6)
        done = import_hf(hf, tmp_path / "ours", verify="auto")
        assert done.logits is None
        assert "free" in str(done.logits_skip_reason)
        with pytest.raises(ConfigError, match="cannot be compared"):
            import_hf(hf, tmp_path / "other", verify="logits")
        with pytest.raises(ConfigError, match="tensors, logits"):
            import_hf(hf, tmp_path / "other", verify="everything")

    def test_weights_in_a_pickle_and_under_other_names(self, hf, tmp_path):
        torch.save(load_file(hf / "model.safetensors"), hf / "pytorch_model.bin")
        (hf / "model.safetensors").unlink()
        done = import_hf(hf, tmp_path / "ours", verify="logits")
        assert done.logits is not None
        assert done.logits.max_error <= 1e-5
        (hf / "pytorch_model.bin").rename(hf / "weights.pt")
        done = import_hf(hf, tmp_path / "other", verify="auto")
        assert done.tensors is not None
        assert "does not find the weight files" in str(done.logits_skip_reason)
        with pytest.raises(ConfigError, match="does not find the weight files"):
            import_hf(hf, tmp_path / "third", verify="logits")

    def test_what_transformers_cannot_load_is_said(self, hf, tmp_path):
        (hf / "model.safetensors").rename(hf / "x.safetensors")
        with pytest.raises(CheckpointError, match="transformers cannot load"):
            compare_logits(CONFIG, lambda: decoder().state_dict().items(), hf, num_parameters=9, dtype=torch.float32)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_bfloat16_weights_are_compared_in_float32_if_that_fits(self, tmp_path, monkeypatch, dtype):
        folder = save_model(tmp_path / "hf", torch.bfloat16)
        config, weights = load_hf(folder)
        if dtype == torch.bfloat16:
            in_float32 = verify_conversion.bytes_needed(config, sum(t.numel() for t in weights.values()), torch.float32)
            monkeypatch.setattr(verify_conversion, "available_bytes", lambda: in_float32 - 1)
            monkeypatch.setattr(verify_conversion, "VARIANT_FACTOR", 1000)  # how near is the next test's question
        done = import_hf(folder, tmp_path / "ours", verify="logits")
        assert done.logits is not None
        assert done.logits.dtype == dtype
        assert done.logits.max_error <= 1e-5 or dtype == torch.bfloat16

    @both_ways
    def test_low_precision_is_as_near_as_rounding_lets_it_be(self, tmp_path, monkeypatch, products):
        """Two models round 30 times a layer each at most; the worst of 25,000 logits is 5 standard deviations off."""
        folder, weights = save_model(tmp_path / "hf", torch.bfloat16), decoder().bfloat16().state_dict()
        way = partial(Decoder, execution=Execution(matmul_mode=products))
        monkeypatch.setattr("longctx.model.decoder.Decoder", way)
        monkeypatch.setattr(verify_conversion, "logits_skip_reason", lambda *_: "no room for float32")
        monkeypatch.setattr(verify_conversion, "VARIANT_FACTOR", 1000)
        check = compare_logits(CONFIG, lambda: weights.items(), folder, num_parameters=9, dtype=torch.bfloat16)
        assert check.dtype == torch.bfloat16
        model, tokens_BT = decoder(), torch.arange(256)[None] % CONFIG.vocab_size
        logits = model.logits(model(tokens_BT, torch.arange(256)[None]))
        assert check.max_error <= 5 * rounded(2 * 30 * CONFIG.num_layers) * float(logits.std())


class TestPlaces:
    @pytest.mark.parametrize("inside", ["out", "deep/out", "."])
    def test_an_output_in_its_input_is_refused(self, hf, tmp_path, inside):
        import_hf(hf, tmp_path / "ours")
        for run, source in ((import_hf, hf), (export_checkpoint, tmp_path / "ours")):
            with pytest.raises(CheckpointError, match=r"is inside of|already exists"):
                run(source, source / inside)
        (tmp_path / "link").symlink_to(hf)
        with pytest.raises(CheckpointError, match="is inside of"):
            import_hf(hf, tmp_path / "link" / "out")
        assert sorted(path.name for path in hf.iterdir()) == [
            "config.json", "generation_config.json", "model.safetensors",
        ]  # fmt: skip

    def test_a_run_folder_may_hold_what_is_made_of_it(self, hf, tmp_path):
        step = tmp_path / "run" / "checkpoints" / "step_000001"
        step.parent.mkdir(parents=True)
        import_hf(hf, step)
        assert export_checkpoint(tmp_path / "run", tmp_path / "run" / "hf").folder.is_dir()
        with pytest.raises(CheckpointError, match="is inside of"):
            export_checkpoint(tmp_path / "run", step / "hf")

    def test_an_input_that_is_not_there(self, tmp_path):
        (tmp_path / "file").write_text("x")
        for run in (import_hf, export_checkpoint):
            with pytest.raises(CheckpointError, match="absent does not exist"):
                run(tmp_path / "absent", tmp_path / "out")
            with pytest.raises(CheckpointError, match="is not a folder"):
                run(tmp_path / "file", tmp_path / "out")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("run", [import_hf, export_checkpoint])
def test_stopping_at_any_tensor_leaves_nothing(hf, tmp_path, run, error):
    import_hf(hf, tmp_path / "ours")
    source = hf if run is import_hf else tmp_path / "ours"
    calls: list[tuple] = []
    run(source, tmp_path / "whole", progress=lambda *call: calls.append(call))
    before = sorted(path.name for path in tmp_path.iterdir())
    for stop in (0, len(calls) // 2, len(calls) - 1):
        left = list(calls[: stop + 1])

        def until(*call, left=left):
            left.pop()
            if not left:
                raise error

        with pytest.raises(error):
            run(source, tmp_path / "out", progress=until)
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_bfloat16_model_with_a_float32_correction_bias_comes_back_as_it_was(tmp_path):
    """Every tensor's name, dtype and bytes; and asked for another dtype, the bias keeps its own."""
    model = hf_models.build(hf_models.CASES["deepseek_v3"])
    for parameter in model.parameters():  # not its buffers
        parameter.data = parameter.data.bfloat16()
    source = hf_models.on_disk(hf_models.save(model, tmp_path / "hf"))
    bias = next(name for name in source if name.endswith("e_score_correction_bias"))
    assert {str(tensor.dtype) for tensor in source.values()} == {"torch.float32", "torch.bfloat16"}
    import_hf(tmp_path / "hf", tmp_path / "ours", verify="logits")
    done = export_checkpoint(tmp_path / "ours", tmp_path / "back", verify="logits")
    assert (done.dtype, done.lossy_casts) == (torch.bfloat16, {})
    back = hf_models.on_disk(tmp_path / "back")
    assert back.keys() == source.keys()
    for name, tensor in source.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8))
    export_checkpoint(tmp_path / "ours", tmp_path / "half", dtype=torch.float16)
    edit_manifest(tmp_path / "ours", lambda m: m["training"].pop("imported"))  # as a run writes it
    export_checkpoint(tmp_path / "ours", tmp_path / "trained", dtype=torch.bfloat16)
    for asked in ("half", "trained"):
        assert torch.equal(hf_models.on_disk(tmp_path / asked)[bias], source[bias])
