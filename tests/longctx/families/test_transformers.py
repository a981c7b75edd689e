"""Every family against transformers: logits, loss, gradients, and folders that come back bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from longctx.architecture.layer_specs import mixers_of
from longctx.config import ModelConfig
from longctx.conversion import HfReader, load_hf, save_hf
from longctx.errors import CheckpointError
from longctx.generation.loop import generate
from tests.longctx.families import hf_models
from tests.longctx.families.hf_models import CASES

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

MAX_ERROR = 1e-5
"""Of logits, and of gradients beside the largest of their tensor; transformers' float32 is 6e-6 from its float64."""
MAX_KL = 1e-10
"""Per token, in nats."""
IGNORED = -100


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Case -> (transformers' model, its folder), each built once."""
    built = {}

    def get(name: str):
        if name not in built:
            model = hf_models.build(CASES[name])
            built[name] = model, hf_models.save(model, tmp_path_factory.mktemp("hf") / "model")
        return built[name]

    return get


@pytest.mark.few(10)
@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients(name, models, tmp_path):
    theirs, folder = models(name)
    ours, bound = hf_models.ours(folder), MAX_ERROR
    if any(mixer.core == "gated_delta" for mixer in mixers_of(ours.config)):
        # Queries and keys of length 1 come from short ones, so float32 says too little: both compute in float64.
        theirs, ours, bound = hf_models.in_float64(theirs), ours.double(), 1e-9
    tokens_BT = hf_models.tokens_of(ours.config)
    with hf_models.computing_in(theirs.dtype, theirs):
        loss = theirs(tokens_BT, labels=tokens_BT).loss
        logits = theirs(tokens_BT).logits
        theirs.zero_grad()
        loss.backward()
    hidden = ours(tokens_BT, torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT))
    error, kl = difference(logits, ours.logits(hidden))
    assert error <= bound
    assert kl <= MAX_KL

    targets_BT = torch.cat((tokens_BT[:, 1:], torch.full_like(tokens_BT[:, :1], IGNORED)), dim=1)
    mine = ours.loss_sums(hidden, targets_BT)[0] / (targets_BT != IGNORED).sum()
    torch.testing.assert_close(mine, loss, rtol=2e-6, atol=0)

    mine.backward()
    expected = hf_models.gradients_by_our_names(theirs, tmp_path / "gradients")
    found = dict(ours.named_parameters())
    assert expected.keys() == ours.state_dict().keys()
    for key, parameter in found.items():
        assert parameter.grad is not None, key
        scale = expected[key].abs().max()
        assert scale > 0, f"{key} has no gradient to compare"
        # Those of float64 went through a file of float32.
        limit = max(bound, 1e-7)
        assert (parameter.grad - expected[key]).abs().max() <= limit * max(1.0, float(scale)), key


@pytest.mark.few(8)
@pytest.mark.parametrize("name", CASES)
def test_generation_chooses_the_same_tokens(name, models):
    theirs, folder = models(name)
    ours = hf_models.ours(folder)
    if any(mixer.core == "gated_delta" for mixer in mixers_of(ours.config)):
        theirs, ours = hf_models.in_float64(theirs), ours.double()
    # Longer than the shortest context that a scaled rope begins with: there transformers changes its mind on the way.
    prompts_BT = hf_models.tokens_of(ours.config, rows=3, length=20)
    options = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
    with hf_models.computing_in(theirs.dtype, theirs), torch.no_grad():
        wanted = theirs.generate(prompts_BT, attention_mask=torch.ones_like(prompts_BT), **options)[:, 20:].tolist()
    assert [generate(ours, prompt, 8) for prompt in prompts_BT.tolist()] == wanted
    # The tied one repeats a token from every prompt; the case beside it has another head.
    assert name == "gpt2" or len({token for row in wanted for token in row}) > 2


def difference(theirs, ours) -> tuple[float, float]:
    """Largest difference of logits, and largest KL of a token."""
    theirs, ours = theirs.detach().double(), ours.detach().double()
    p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
    return float((theirs - ours).abs().max()), float((p.exp() * (p - q)).sum(-1).max())


FOLDERS = [name for name in CASES if not name.startswith("llama ")] + ["llama with biases", "llama longrope"]
"""Ropes change a folder's config alone, which ``test_conversion_families`` looks at."""


MAKERS_NAMES = ("kimi_linear", "olmo_hybrid", "olmo_hybrid rotary")
"""Cases whose makers' files have names and parts that transformers reads, and of which it writes others."""


@pytest.mark.few(8)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_comes_back_bit_for_bit(name, models, tmp_path):
    theirs, folder = models(name)
    config, tensors = load_hf(folder)
    model_type = theirs.config.model_type
    save_hf(config, tensors, tmp_path / "again", model_type=model_type, shard_bytes=50_000)
    before, after = hf_models.on_disk(folder), hf_models.on_disk(tmp_path / "again")
    if name in MAKERS_NAMES:
        assert before.keys() != after.keys()
        before, after = tensors, load_hf(tmp_path / "again")[1]
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8)), key

    hf = json.loads((tmp_path / "again" / "config.json").read_text())
    assert hf["model_type"] == model_type
    assert ModelConfig.from_hf(hf) == config
    same, report = getattr(transformers, CASES[name].auto_class).from_pretrained(
        str(tmp_path / "again"), local_files_only=True, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    assert type(same) is type(theirs)
    tokens_BT = hf_models.tokens_of(config)
    assert torch.equal(same(tokens_BT).logits, theirs(tokens_BT).logits)


FUSED = ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss"]


@pytest.mark.parametrize("name", FUSED)
def test_the_layout_of_memory_is_read_too(name, models, tmp_path):
    theirs, folder = models(name)
    theirs.save_pretrained(tmp_path / "fused", save_original_format=False)
    stacked = [key for key in hf_models.on_disk(tmp_path / "fused") if key.endswith("mlp.experts.down_proj")]
    assert stacked
    expected, found = load_hf(folder)[1], load_hf(tmp_path / "fused")[1]
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name", ["gpt2", "gpt2 untied", "openai-gpt", "imagegpt"])
def test_gpt_without_its_prefix_and_with_old_buffers(name, models, tmp_path):
    _, folder = models(name)
    bare = {key.removeprefix("transformer."): tensor for key, tensor in hf_models.on_disk(folder).items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    found = load_hf(rewritten(folder, tmp_path / "bare", bare | masks))[1]
    assert all(torch.equal(found[key], tensor) for key, tensor in load_hf(folder)[1].items())
    with pytest.raises(CheckpointError, match=r"h\.0\.attn\.sias"):
        load_hf(rewritten(folder, tmp_path / "odd", bare | {"h.0.attn.sias": torch.ones(2)}))


def test_rotary_frequencies_of_old_files_are_left_out(models, tmp_path):
    _, folder = models("llama")
    old = hf_models.on_disk(folder) | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert load_hf(rewritten(folder, tmp_path / "old", old))[1].keys() == load_hf(folder)[1].keys()


def test_layers_for_multi_token_prediction_are_carried(models, tmp_path):
    _, folder = models("deepseek_v3")
    further = hf_models.on_disk(folder) | {"model.layers.3.eh_proj.weight": torch.ones(4)}
    changed = rewritten(folder, tmp_path / "mtp", further, num_nextn_predict_layers=1)
    assert load_hf(changed)[1].keys() == load_hf(folder)[1].keys()
    assert HfReader(changed).passthrough.names == ("model.layers.3.eh_proj.weight",)
    with pytest.raises(CheckpointError, match=r"unexpected .*model\.layers\.3\.eh_proj"):
        load_hf(rewritten(folder, tmp_path / "none", further, num_nextn_predict_layers=0))


def rewritten(folder, output, tensors, **keys):
    """The folder with other tensors, and other keys in its config."""
    output.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, output / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(config | keys))
    return output


def test_the_correction_bias_stays_float32_in_any_dtype(models, tmp_path):
    _, folder = models("deepseek_v3")
    config, tensors = load_hf(folder)
    save_hf(config, tensors, tmp_path / "bf16", dtype=torch.bfloat16)
    written = load_file(tmp_path / "bf16" / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(written[name], tensors[name])
    assert {tensor.dtype for key, tensor in written.items() if not key.endswith("correction_bias")} == {torch.bfloat16}
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    assert HfReader(tmp_path / "bf16").dtype == torch.bfloat16
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "bf16"), local_files_only=True)
    assert torch.equal(loaded.state_dict()[name].float(), tensors[name])


def test_parameters_may_come_in_any_order(models, tmp_path):
    _, folder = models("gpt2")
    config, tensors = load_hf(folder)
    save_hf(config, list(reversed(tensors.items())), tmp_path / "again")
    assert all(torch.equal(hf_models.on_disk(folder)[k], t) for k, t in hf_models.on_disk(tmp_path / "again").items())


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "mixtral"])
def test_a_tensor_too_few_or_too_many_is_named(name, models, tmp_path):
    _, folder = models(name)
    tensors = hf_models.on_disk(folder)
    victim = {
        "gpt2": "h.1.attn.c_attn.weight",
        "gpt_oss": "1.mlp.experts.down_proj",
        "mixtral": "1.block_sparse_moe.experts.3.w2",
    }[name]
    gone = {key: tensor for key, tensor in tensors.items() if victim not in key}
    assert len(gone) < len(tensors)
    with pytest.raises(CheckpointError, match="missing"):
        load_hf(rewritten(folder, tmp_path / "gone", gone))
    with pytest.raises(CheckpointError, match=r"unexpected .*model\.layers\.0\.extra"):
        load_hf(rewritten(folder, tmp_path / "more", tensors | {"model.layers.0.extra": torch.ones(2)}))
