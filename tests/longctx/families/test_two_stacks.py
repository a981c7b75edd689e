"""BART, Marian and T5 against transformers: logits and gradients, packed here and padded there, and folders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from longctx.architecture.size import count_parameters
from longctx.batch import IGNORED_TARGET
from longctx.config import PRESETS, ModelConfig
from longctx.conversion import export_checkpoint, import_hf, load_hf, save_hf
from longctx.conversion.tensor_layouts import tensor_specs
from longctx.errors import CheckpointError, ConfigError
from longctx.generation import Beams, Greedy, generate, generate_batch
from longctx.model.decoder import Decoder
from longctx.model.rotary import sinusoidal_embedding
from longctx.tokenizer import load_tokenizer
from tests.longctx.families.hf_models import TWO_STACKS, build
from tests.longctx.pairs import pair_batch, pair_tokens
from tests.longctx.tokenizer.byte_level import tokenizer_json, write_tokenizer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

PAIRS = ((5, 9), (1, 4), (31, 2), (7, 37), (6, 1))
"""Tokens of the target and of the source of each pair."""
SMALL: dict[str, Any] = {
    "hidden_size": 36,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 9,
    "ffn_size": 20,
}


def ours(folder: Path) -> Decoder:
    config, tensors = load_hf(folder)
    model = Decoder(config, seed=None).double()
    model.load_state_dict(tensors)
    return model


def in_float64(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model in float64 all through: T5 norms by float32 means, and Marian's sinusoids are a table of float32."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(transformers.models.t5.modeling_t5.T5LayerNorm, "forward", norm)
    theirs = theirs.double()
    if theirs.config.model_type == "marian":
        for stack in (theirs.model.encoder, theirs.model.decoder):
            rows, width = stack.embed_positions.weight.shape
            exact = sinusoidal_embedding(torch.arange(rows)[None], width, torch.float64, halves=True)[0]
            torch.testing.assert_close(stack.embed_positions.weight.detach(), exact, rtol=0, atol=1e-7)
            stack.embed_positions.weight.data.copy_(exact)
    return theirs


def padded(rows: list[Tensor], fill: int) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


@pytest.mark.parametrize("exact", [True, False], ids=["in float64", "as it is"])
@pytest.mark.parametrize("name", TWO_STACKS)
def test_logits_and_gradients_packed_here_and_padded_there(name, exact, tmp_path, monkeypatch):
    case, bound, of_gradients = TWO_STACKS[name], 1e-12, 1e-10
    if not exact and case.name != "Bart":
        # Sharp attention would make much of their float32.
        case, bound, of_gradients = dataclasses.replace(case, std=0.1), 1e-6, 1e-6
    theirs = build(case)
    theirs.save_pretrained(tmp_path / "hf")
    theirs = in_float64(theirs, monkeypatch) if exact else theirs.double()
    # A buffer there, which gets no gradient.
    if hasattr(theirs, "final_logits_bias"):
        values = theirs.final_logits_bias
        del theirs.final_logits_bias
        theirs.final_logits_bias = nn.Parameter(values)
    model = ours(tmp_path / "hf")
    # Without the last id, which is padding there.
    batch = pair_batch(PAIRS, vocab=96, padding=(3, 2))
    pairs = pair_tokens(PAIRS, vocab=96)
    assert batch.source is not None

    sources, targets = ([pair[side] for pair in pairs] for side in (1, 0))
    following = [torch.cat([target[1:], torch.tensor([IGNORED_TARGET])]) for target in targets]
    mask = padded([torch.ones_like(source) for source in sources], 0)
    found = theirs(
        padded(sources, 0), attention_mask=mask, decoder_input_ids=padded(targets, 0),
        labels=padded(following, IGNORED_TARGET),
    )  # fmt: skip
    hidden = model(
        batch.tokens, batch.positions, batch.documents, document_ids=batch.document_ids,
        source=model.encode(batch.source),
    )  # fmt: skip
    of_theirs = torch.cat([found.logits[row, : len(target)] for row, target in enumerate(targets)])
    size = max(1.0, float(of_theirs.detach().abs().max()))
    logits = model.logits(hidden)[0, : len(of_theirs)]
    torch.testing.assert_close(logits, of_theirs, rtol=0, atol=bound * size)

    loss = model.loss_sums(hidden, batch.targets)[0] / batch.num_targets
    torch.testing.assert_close(loss, found.loss, rtol=bound, atol=0)
    loss.backward()
    found.loss.backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    specs = tensor_specs(model.config, model_type=theirs.config.model_type)
    names = {spec.name: spec.layouts[0].parts[0].name for spec in specs}
    assert names.keys() == model.state_dict().keys()
    for key, parameter in model.named_parameters():
        wanted = gradients[names[key]].view(parameter.shape)
        assert wanted.any(), key
        assert (parameter.grad - wanted).abs().max() <= of_gradients * max(1.0, float(wanted.abs().max())), key


@pytest.mark.few(3)
@pytest.mark.parametrize("name", TWO_STACKS)
def test_folders_come_back_bit_for_bit(name, tmp_path):
    theirs = build(TWO_STACKS[name])
    theirs.save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ours", verify="logits")
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify="logits")
    written, found = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert found.keys() == written.keys()
    assert all(torch.equal(found[key], written[key]) for key in found)
    again, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    own = again.state_dict()
    assert all(torch.equal(own[key], value) for key, value in theirs.state_dict().items())
    assert load_hf(tmp_path / "back")[0] == load_hf(tmp_path / "hf")[0]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id"):
        meant = getattr(theirs.config, key, None)
        assert getattr(again.config, key, None) == getattr(again.generation_config, key) == meant, key


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["bart", "marian", "t5", "t5, version 1.1"])
def test_transformers_writes_the_same_of_what_is_exported(name, tmp_path):
    """Greedy and with four beams, each source by itself and all of them at once."""
    build(TWO_STACKS[name]).save_pretrained(tmp_path / "hf")
    config, tensors = load_hf(tmp_path / "hf")
    model = Decoder(config, seed=None).eval()
    model.load_state_dict(tensors)
    # Sharper than it was made: else all that is written is one token again and again.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    save_hf(config, model.state_dict(), tmp_path / "out", token_ids={"pad_token_id": 0})
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    theirs.generation_config.forced_eos_token_id = theirs.generation_config.eos_token_id = None
    sources = [torch.randint(5, 90, (n,), generator=torch.Generator().manual_seed(n)) for n in (7, 1, 12, 4)]
    start = [theirs.generation_config.decoder_start_token_id]
    written: set[tuple[int, ...]] = set()
    for beams in (1, 4):
        strategy = Beams(num_beams=beams, length_penalty=0.6) if beams > 1 else Greedy()
        options = {"num_beams": beams, "do_sample": False, "max_new_tokens": 12, "length_penalty": 0.6}
        for stops in ([], [11, 30]):
            wanted = []
            for source in sources:
                found = theirs.generate(source[None], eos_token_id=stops or None, **options)[0, 1:].tolist()
                end = next((n + 1 for n, token in enumerate(found) if token in stops), len(found))
                wanted.append(found[:end])
            each = [generate(model, start, 12, strategy, source_ids=s.tolist(), stop_ids=stops) for s in sources]
            assert each == wanted
            asked = {"sources": [s.tolist() for s in sources], "stop_ids": stops}
            together = dict(generate_batch(model, [start] * len(sources), 12, strategy, **asked))
            assert [together[n] for n in range(len(sources))] == wanted
            written |= set(map(tuple, wanted))
    assert len(written) > len(sources), "sources and settings must matter"


def test_bart_without_a_head_and_files_without_a_bias_are_read(tmp_path):
    theirs = build(TWO_STACKS["bart"])
    theirs.final_logits_bias.zero_()
    theirs.half().model.save_pretrained(tmp_path / "body")
    assert json.loads((tmp_path / "body" / "config.json").read_text())["architectures"] == ["BartModel"]
    theirs.save_pretrained(tmp_path / "whole")
    (config, body), (_, whole) = load_hf(tmp_path / "body"), load_hf(tmp_path / "whole")
    assert config.head_bias
    assert body.keys() == whole.keys()
    assert all(torch.equal(body[key], whole[key]) and body[key].dtype == torch.float16 for key in whole)
    import_hf(tmp_path / "body", tmp_path / "ours", verify="logits")
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify="logits")
    assert load_file(tmp_path / "back" / "model.safetensors")["final_logits_bias"].dtype == torch.float16


@pytest.mark.parametrize("own", [False, True], ids=["as it is", "with --tokenizer"])
def test_ids_of_targets_travel_also_where_a_file_leaves_them_out(own, tmp_path):
    case = dataclasses.replace(TWO_STACKS["bart"], values=TWO_STACKS["bart"].values | {"vocab_size": 300})
    build(case).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").unlink(missing_ok=True)
    described = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"forced_bos_token_id": 3}
    del described["decoder_start_token_id"], described["forced_eos_token_id"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(described))
    write_tokenizer(tmp_path / "hf", tokenizer_json())
    import_hf(tmp_path / "hf", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back", **({"tokenizer": tmp_path / "hf"} if own else {}))
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    generation = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert written["forced_bos_token_id"] == generation["forced_bos_token_id"] == 3
    if not own:
        # What transformers' class means by their absence.
        assert (written["decoder_start_token_id"], written["forced_eos_token_id"]) == (2, 2)


@pytest.mark.parametrize("name", ["bart", "marian", "t5"])
def test_files_may_have_a_table_several_times_and_the_same_everywhere(name, tmp_path):
    theirs = build(TWO_STACKS[name])
    theirs.save_pretrained(tmp_path)
    file, prefix = tmp_path / "model.safetensors", "" if name == "t5" else "model."
    weights, table = load_file(file), f"{prefix}shared.weight"
    copies = ("lm_head.weight", f"{prefix}encoder.embed_tokens.weight", f"{prefix}decoder.embed_tokens.weight")
    weights |= {copy: weights[table].clone() for copy in copies}
    if name == "marian":
        weights["model.encoder.embed_positions.weight"] = torch.zeros(41, 36)
    if name == "t5":
        weights["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 5)
    save_file(weights, file)
    assert torch.equal(load_hf(tmp_path)[1]["model.embed_tokens.weight"], weights[table])
    for copy in copies:
        save_file(weights | {copy: weights[copy] + 1}, file)
        with pytest.raises(CheckpointError, match=f"{copy} differs from {table}"):
            load_hf(tmp_path)


def test_a_new_t5_of_version_1_1_has_its_table_for_a_head(tmp_path):
    """transformers 5 ties it, and says so; what it reads with a head of its own it keeps, and says the same."""
    case = TWO_STACKS["t5, version 1.1"]
    transformers.AutoModelForSeq2SeqLM.from_config(case.config()).save_pretrained(tmp_path)
    config, tensors = load_hf(tmp_path)
    assert not config.tie_embeddings
    assert config.logit_scale == 1
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


REFUSED = {
    # case: (changes, what the message says: the value, the rule, what works)
    "heads": (
        "bart",
        {"encoder_attention_heads": 2},
        "encoder_attention_heads=2 and decoder_attention_heads=4 .*equal",
    ),
    "width": ("bart", {"decoder_ffn_dim": 48}, "encoder_ffn_dim=50 and decoder_ffn_dim=48 .*equal.*model.ffn_size"),
    "one stack": ("bart", {"is_encoder_decoder": False}, "is_encoder_decoder=False .*supported: True"),
    "decoder alone": ("marian", {"is_decoder": True}, "is_decoder=True .*supported: False"),
    "one side": ("bart", {"is_causal": True}, "is_causal=True .*supported: absent"),
    "no encoder": ("bart", {"encoder_layers": 0}, "encoder_layers=0 .*at least 1"),
    "which layers": ("bart", {"num_hidden_layers": 2}, "contradicts itself.*encoder_layers.*Keep one"),
    "an untied head": ("bart", {"tie_word_embeddings": False}, "tie_word_embeddings=False .*supported: True"),
    "norms before": ("bart", {"normalize_before": True}, "normalize_before=True .*supported: False"),
    "no first norm": ("bart", {"normalize_embedding": False}, "normalize_embedding=False .*supported: True"),
    "a first norm": ("marian", {"normalize_embedding": True}, "normalize_embedding=True .*supported: False"),
    "uneven heads": (
        "bart",
        {"encoder_attention_heads": 5, "decoder_attention_heads": 5},
        "d_model=36 .*not a multiple of encoder_attention_heads=5",
    ),
    "unknown activation": ("marian", {"activation_function": "mish"}, "activation_function='mish' .*swish"),
    "a word for truth": ("bart", {"scale_embedding": "yes"}, "scale_embedding='yes' .*bool"),
    "two tables": (
        "marian",
        {"share_encoder_decoder_embeddings": False},
        "share_encoder_decoder_embeddings=False is not supported: .*one table.*supported",
    ),
    "two vocabularies": ("marian", {"decoder_vocab_size": 90}, "decoder_vocab_size=90 and vocab_size=97 .*equal"),
    "t5, no encoder": ("t5", {"num_layers": 0}, "num_layers=0 .*at least 1"),
    "t5, one stack": ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder=False .*supported: True"),
    "t5, gated by relu": ("t5", {"feed_forward_proj": "gated-relu"}, "feed_forward_proj='gated-relu' .*gated-gelu"),
    "t5, two activations": (
        "t5",
        {"dense_act_fn": "gelu"},
        "dense_act_fn='gelu' .*contradicts feed_forward_proj='relu'",
    ),
    "t5, gated or not": ("t5", {"is_gated_act": True}, "is_gated_act=True .*contradicts feed_forward_proj='relu'"),
    "t5, a scaled head": ("t5", {"tie_word_embeddings": False}, "scale_decoder_outputs=True with .*Supported"),
    "t5, odd buckets": ("t5", {"relative_attention_num_buckets": 7}, "relative_buckets=7 must be an even number"),
    "unknown": ("t5", {"router_jitter": 0.1}, "does not read for a t5 model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(case):
    name, values, said = REFUSED[case]
    described = TWO_STACKS[name].config_json()
    ModelConfig.from_hf(described)
    with pytest.raises(ConfigError, match=f"(?s){said}") as refused:
        ModelConfig.from_hf(described | values)
    assert len(str(refused.value)) < 600  # one screen


@pytest.mark.parametrize("name", ["bart", "marian", "t5"])
def test_what_generation_alone_reads_says_nothing(name):
    described = TWO_STACKS[name].config_json()
    generation = {
        "decoder_start_token_id": 7, "forced_bos_token_id": 0, "forced_eos_token_id": 3, "num_beams": 4,
        "max_length": 99, "min_length": 2, "early_stopping": True, "no_repeat_ngram_size": 3, "length_penalty": 2.0,
        "bad_words_ids": [[96]], "task_specific_params": {"summarization": {"prefix": "summarize: "}},
    }  # fmt: skip
    assert ModelConfig.from_hf(described | generation) == ModelConfig.from_hf(described)


def test_dropout_of_other_kinds_is_left_out_with_a_warning(caplog):
    described = TWO_STACKS["bart"].config_json()
    ModelConfig.from_hf(described | {"attention_dropout": 0.1, "activation_dropout": 0.2, "encoder_layerdrop": 0.3})
    for said in ("attention_dropout=0.1", "never drops FFN activations", "never drops layers"):
        assert said in caplog.text


def test_a_model_of_ours_is_written_with_the_ids_that_its_targets_start_with(tmp_path):
    write_tokenizer(tmp_path / "tokenizer", tokenizer_json())
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    config = dataclasses.replace(PRESETS["bart-base"], **SMALL, vocab_size=300)
    save_hf(config, Decoder(config).state_dict(), tmp_path / "out", tokenizer=tokenizer)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    ids = {
        "bos_token_id": tokenizer.special.bos,
        "pad_token_id": tokenizer.special.padding,
        "forced_eos_token_id": None,
    }
    start = [*tokenizer.suffix_ids, *tokenizer.prefix_ids][-1]
    assert written.items() >= {**ids, "decoder_start_token_id": start}.items()
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["decoder_start_token_id"] == start
    # T5's tokens have no begin; where a file names no start it is padding.
    named = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 3}
    save_hf(config, Decoder(config).state_dict(), tmp_path / "padding", token_ids=named)
    assert json.loads((tmp_path / "padding" / "generation_config.json").read_text())["decoder_start_token_id"] == 3
    # A decoder alone starts with what it is given.
    plain = dataclasses.replace(ModelConfig(), **SMALL | {"head_dim": 10}, vocab_size=300)
    save_hf(plain, Decoder(plain).state_dict(), tmp_path / "plain", tokenizer=tokenizer)
    assert "decoder_start_token_id" not in (tmp_path / "plain" / "config.json").read_text()


_T5 = {"vocab_size": 32128, "d_kv": 64, "decoder_start_token_id": 0}
_OF_1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
PUBLISHED = {
    "bart-base": {
        "vocab_size": 50265, "max_position_embeddings": 1024, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
        "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
    },
    "bart-large": {
        "vocab_size": 50265, "max_position_embeddings": 1024, "d_model": 1024, "encoder_layers": 12,
        "decoder_layers": 12, "encoder_attention_heads": 16, "decoder_attention_heads": 16, "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
    },
    "opus-mt": {
        "vocab_size": 58101, "max_position_embeddings": 512, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6,
        "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
        "scale_embedding": True, "activation_function": "swish",
    },
    "t5-small": {**_T5, "d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5-base": {**_T5, "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "t5-large": {**_T5, "d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "t5-v1.1-base": {**_T5, **_OF_1_1, "d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12},
    "t5-v1.1-large": {**_T5, **_OF_1_1, "d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16},
}  # fmt: skip
"""The published numbers of each preset."""


@pytest.mark.parametrize("preset", [name for name, config in PRESETS.items() if config.encoder_layers])
def test_presets_are_what_was_published_to_the_parameter(preset):
    config = PRESETS[preset]
    kind = {"bart": "Bart", "opus": "Marian", "t5": "T5"}[preset.partition("-")[0]]
    described = getattr(transformers, f"{kind}Config")(**PUBLISHED[preset])
    plain = json.loads(described.to_json_string(use_diff=False)) | {"architectures": None}
    assert ModelConfig.from_hf(plain) == config
    assert ModelConfig.from_hf(config.to_hf()) == config
    with torch.device("meta"):
        theirs = transformers.AutoModelForSeq2SeqLM.from_config(described)
    wanted = sum(p.numel() for p in theirs.parameters())
    if kind == "T5":
        # Of version 1.1 the head is its own, and transformers 5 ties what it makes.
        wanted += (not config.tie_embeddings) * config.vocab_size * config.hidden_size
    else:
        wanted += theirs.final_logits_bias.numel()
    if kind == "Marian":
        # Its sinusoids are parameters there that are not trained.
        wanted -= 2 * config.max_positions * config.hidden_size
    assert sum(count_parameters(config).values()) == wanted
