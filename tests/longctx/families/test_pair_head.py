"""``BertForPreTraining`` and ``AlbertForPreTraining`` against ours in float64: both losses, every gradient, and
folders.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from longctx.architecture.size import count_parameters
from longctx.batch import IGNORED_TARGET, PackedDocuments, Stream
from longctx.config import ModelConfig
from longctx.conversion import load_hf, save_hf
from longctx.conversion.tensor_layouts import tensor_specs
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from longctx.objectives.build import Objective, build_objective
from tests.longctx.families.hf_models import ENCODERS, build

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SEGMENTS = ((3, 1), (8, 9), (1, 2), (20, 13))
"""Tokens of the two segments of each document."""
NAMES = {"bert": ("nsp", "seq_relationship_logits"), "albert": ("sop", "sop_logits")}


def pretrained(name: str):
    return build(replace(ENCODERS[name], auto_class="AutoModelForPreTraining"))


def packed(generator: torch.Generator) -> Stream:
    """Documents of two segments in one row, some tokens masked, and three of padding."""
    lengths = [a + b for a, b in SEGMENTS]
    total = sum(lengths)
    tokens = torch.randint(5, 97, (1, total + 3), generator=generator)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((3,), -1)])[None]
    segments = torch.cat([torch.tensor([0] * a + [1] * b) for a, b in SEGMENTS] + [torch.zeros(3, dtype=torch.int64)])
    masked = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.6, IGNORED_TARGET)
    order = torch.full_like(tokens, IGNORED_TARGET)
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    order[0, starts] = torch.tensor([0, 1, 1, 0])
    return Stream(
        tokens=tokens,
        positions=torch.cat([torch.arange(n) for n in (*lengths, 3)])[None],
        document_ids=ids,
        documents=PackedDocuments.of_lengths([*lengths, 3]),
        masked=masked.masked_fill(ids < 0, IGNORED_TARGET),
        segments=segments[None],
        labels=order,
    )


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_packed_here_and_padded_there(name, tmp_path):
    kind, logits_name = NAMES[name]
    theirs = pretrained(name)
    theirs.save_pretrained(tmp_path / "hf")
    theirs = theirs.double()
    config, tensors = load_hf(tmp_path / "hf")
    assert config.pair_head == kind
    model = Decoder(config, seed=None).double()
    model.load_state_dict(tensors)
    task = build_objective(model, Objective("masked"))
    stream = packed(torch.Generator().manual_seed(1))
    batch = task.prepare(stream)
    counts = task.denominators(batch)
    assert counts["pairs"] == len(SEGMENTS)
    sums = task.loss_sum(task(batch))
    loss = task.loss(sums, counts)

    lengths, longest = [a + b for a, b in SEGMENTS], max(a + b for a, b in SEGMENTS)
    given = {key: torch.zeros(len(lengths), longest, dtype=torch.int64) for key in ("input_ids", "token_type_ids")}
    labels, mask = torch.full((len(lengths), longest), IGNORED_TARGET), torch.zeros(len(lengths), longest)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for row, (length, start) in enumerate(zip(lengths, starts, strict=False)):
        own = slice(start, start + length)
        given["input_ids"][row, :length] = stream.tokens[0, own]
        given["token_type_ids"][row, :length] = stream.segments[0, own]
        labels[row, :length], mask[row, :length] = stream.masked[0, own], 1
    order = stream.labels[stream.labels != IGNORED_TARGET]
    asked = {"bert": "next_sentence_label", "albert": "sentence_order_label"}[name]
    found = theirs(**given, attention_mask=mask.long(), labels=labels, **{asked: order})
    torch.testing.assert_close(loss, found.loss, rtol=1e-12, atol=0)
    said = getattr(found, logits_name).argmax(1)
    assert float(sums["right_pairs"]) == float((said == order).sum())

    loss.backward()
    found.loss.backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    specs = {spec.name: spec.layouts[0].parts[0].name for spec in tensor_specs(config, model_type=name)}
    for key, parameter in model.named_parameters():
        wanted = gradients[specs[key]]
        assert wanted.any(), key
        assert (parameter.grad - wanted).abs().max() <= 1e-10 * max(1.0, float(wanted.abs().max())), key


@pytest.mark.parametrize("store", ["device", "host", "disk"])
@pytest.mark.parametrize("name", NAMES)
def test_by_chunks_both_heads_read_one_residual_stream(name, store, tmp_path):
    pretrained(name).save_pretrained(tmp_path / "hf")
    config, tensors = load_hf(tmp_path / "hf")
    found = []
    for execution in (Execution(), Execution("attention", store, chunk_tokens=7, store_path=str(tmp_path))):
        model = Decoder(config, seed=None, execution=execution).double()
        model.load_state_dict(tensors)
        task = build_objective(model, Objective("masked", label_smoothing=0.1))
        batch = task.prepare(packed(torch.Generator().manual_seed(1)))
        sums = task.loss_sum(task(batch))
        task.loss(sums, task.denominators(batch)).backward()
        found.append({**sums.sums, **{key: parameter.grad for key, parameter in model.named_parameters()}})
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-12, atol=1e-12, msg=lambda t, k=key: f"{k}: {t}")


@pytest.mark.parametrize("name", NAMES)
def test_folders_come_back_bit_for_bit(name, tmp_path):
    theirs = pretrained(name)
    theirs.save_pretrained(tmp_path / "hf")
    config, tensors = load_hf(tmp_path / "hf")
    assert sum(count_parameters(config).values()) == sum(p.numel() for p in theirs.parameters())
    save_hf(config, tensors, tmp_path / "back", model_type=name)
    written, found = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert found.keys() == written.keys()
    assert all(torch.equal(found[key], written[key]) for key in found)
    again, report = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"], report
    assert type(again) is type(theirs)
    assert load_hf(tmp_path / "back")[0] == config


def test_other_classes_of_the_family_have_no_pair_head():
    values = ENCODERS["bert"].config().to_dict() | {"architectures": ["BertForMaskedLM"]}
    assert ModelConfig.from_hf(values).pair_head == "none"
    assert ModelConfig.from_hf(values | {"architectures": ["BertForPreTraining"]}).pair_head == "nsp"


def test_a_rank_without_first_tokens_adds_nothing_and_takes_part(tmp_path):
    config = load_hf_config(tmp_path)
    model = Decoder(config, seed=0)
    task = build_objective(model, Objective("masked"))
    stream = packed(torch.Generator().manual_seed(2))
    batch = task.prepare(replace(stream, labels=torch.full_like(stream.labels, IGNORED_TARGET)))
    sums = task.loss_sum(task(batch))
    assert float(sums["pair"].detach()) == float(sums["right_pairs"]) == 0
    task.loss(sums, {"targets": 1, "tokens": 1, "pairs": 1}).backward()
    assert model.pair_head is not None
    assert all(p.grad is not None and not p.grad.any() for p in model.pair_head.parameters())


def load_hf_config(folder) -> ModelConfig:
    pretrained("bert").save_pretrained(folder / "hf")
    return load_hf(folder / "hf")[0]
