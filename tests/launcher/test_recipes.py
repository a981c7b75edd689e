"""Every shipped recipe: its model is the published one and fits its GPUs; a miniature of it trains and is exported."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

from data_pipeline.shards.references import write_references
from launcher.cli import main
from launcher.config.config_sections import RunConfig
from launcher.config.load_config import load_run_config
from launcher.config.run_config_rules import check_run
from launcher.plan.estimate import peak_bytes
from launcher.plan.hardware import load_hardware
from launcher.plan.memory_estimate import GIB, memory_of_rank
from launcher.plan.planned_world import World
from launcher.recipes.find import recipes
from launcher.training.setup import build_run
from launcher.training.trainer import Trainer
from longctx.architecture.size import count_parameters
from longctx.checkpoint_format import CheckpointReader, find_checkpoint
from longctx.generation import load_model
from longctx.tokenizer import load_tokenizer
from tests.data_pipeline.preference_records import write_preferences
from tests.launcher.runs import STARTED, STARTS, recipe_flags, resolved
from tests.launcher.workers import leave_out_pictures, run
from tests.longctx.families.hub_configs import PARAMETERS

RANKS = 2
SEQ_LEN = 128


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a recipe is made for."""

    ranks: int
    gpu_gib: int = 80
    source: str = ""
    """Published model of the same size, where it starts from none (``STARTS``)."""
    parameters: int = 0
    """Published number, where ``source`` has none."""


PLANS = {
    "quickstart": Plan(ranks=2, parameters=2_133_376),
    "quickstart-experts": Plan(ranks=2, parameters=1_739_136),
    "recall": Plan(ranks=2, parameters=508_736),
    "dense-1b": Plan(ranks=8, parameters=1_235_814_400),
    "moe-fine-7b-a1b": Plan(ranks=8, source="OLMoE-1B-7B-0924"),
    "llama-3.1-8b-128k": Plan(ranks=8, source="Llama-3.1-8B"),
    "extend-yarn": Plan(ranks=16),
    "mistral-7b-32k": Plan(ranks=8, gpu_gib=40),
    "qwen3-8b-256k-yarn": Plan(ranks=8),
    "qwen3-30b-a3b-128k": Plan(ranks=16),
    "sft-qwen3-8b-128k": Plan(ranks=8),
    "sft-llama-3.1-8b-256k": Plan(ranks=8),
    "sft-recall": Plan(ranks=2, parameters=508_736),
    "lora-llama-3.1-8b-256k": Plan(ranks=1),
    "lora-gpt-oss-20b-512k": Plan(ranks=1),
    "lora-recall": Plan(ranks=2, parameters=508_736),
    "dpo-qwen3-8b-64k": Plan(ranks=8),
    "dpo-recall": Plan(ranks=2, parameters=508_736),
    "transformer-base": Plan(ranks=1, parameters=63_082_496),
    "translate-small": Plan(ranks=2, parameters=1_435_904),
    "three-architectures": Plan(ranks=2, parameters=922_880),
    "vit-tiny": Plan(ranks=1, parameters=205_066),
    "swin-tiny-28": Plan(ranks=1, parameters=136_854),
    "igpt-small": Plan(ranks=1, parameters=251_776),
}
OF_NO_FAMILY = ("transformer-base", "translate-small", "three-architectures", "vit-tiny", "swin-tiny-28", "igpt-small")
"""Recipes whose models transformers has no class for, or which read pairs or images: their own demos, tests and
benchmarks train them."""


def test_every_recipe_has_a_plan():
    assert PLANS.keys() == recipes().keys()


@pytest.mark.parametrize("name", PLANS)
class TestWhole:
    """The recipe as it stands: read, checked, counted. Nothing is allocated."""

    @pytest.mark.few(5)
    def test_is_a_run_on_its_ranks(self, name):
        config = load_run_config(recipe_flags(recipes()[name]))
        for native in (True, False):
            check_run(resolved(config, native_bfloat16=native), PLANS[name].ranks)
        assert config.accumulation(PLANS[name].ranks) >= 1
        assert config.run.output_dir != config.run.start_from

    @pytest.mark.few(5)
    def test_has_the_published_number_of_parameters(self, name):
        plan = PLANS[name]
        model = load_run_config(recipe_flags(recipes()[name])).model.config()
        assert sum(count_parameters(model).values()) == (plan.parameters or PARAMETERS[STARTS.get(name, plan.source)])

    @pytest.mark.few(5)
    def test_fits_its_gpus_as_its_comment_reckons(self, name):
        plan, config = (
            PLANS[name],
            resolved(load_run_config(recipe_flags(recipes()[name])), native_bfloat16=True, device_type="cuda"),
        )
        need = memory_of_rank(config, config.model.config(), plan.ranks).on_device
        if config.train.store == "host":
            # Most of what is left on the device passes, which only the plan counts.
            need = peak_bytes(config, World(ranks=plan.ranks, ranks_per_node=min(plan.ranks, 8)), load_hardware("h100"))
        gib = need / GIB
        assert gib < 0.75 * plan.gpu_gib, "the rest is for kernels, collectives and CUDA itself"
        reckoned = re.search(r"^#   together +(\d+) +GiB$", recipes()[name].read_text(), re.M)
        if reckoned:
            # The comment counts what one block needs while it is recomputed, too.
            assert 0.65 * int(reckoned[1]) < gib <= int(reckoned[1])


SMALL = {
    "data.seq_len": SEQ_LEN,
    "train.steps": 2,
    "train.tokens_per_step": RANKS * SEQ_LEN,
    "train.micro_batch_rows": 1,
    "train.dtype": "float32",
    "train.warmup_steps": 1,
    "run.hostfile": "none",
    "run.timeout_seconds": 40.0,
    "validation.rows": 2,
}
"""What is small in a miniature's run. What the recipe says of anything else, it keeps."""
SMALL_MODEL = {
    "model.vocab_size": 512,
    "model.hidden_size": 64,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.head_dim": 16,
    "model.ffn_size": 48,
    "model.expert_ffn_size": 16,
}
SMALL_HF = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "intermediate_size": 48, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 8,
    "num_experts_per_tok": 3, "experts_per_token": 3, "num_local_experts": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
"""The same in the config.json of a model that a recipe starts from, of keys that it has."""


@dataclass(frozen=True, kw_only=True)
class Miniature:
    """A recipe's run in small."""

    recipe: str
    output: Path
    start: Path | None
    """Hugging Face folder of a small model to start from."""

    def config(self, shards: Path) -> RunConfig:
        """The recipe for a tiny model on two ranks."""
        named = ["--config", self.recipe]
        if self.start is not None:
            named += ["--run.start_from", str(self.start)]
        whole = load_run_config(named)
        keys: dict[str, Any] = {**SMALL, "data.train": shards, "run.output_dir": self.output}
        if self.start is None:
            keys |= SMALL_MODEL
            keys["model.num_kv_heads"] = 4 if whole.model.num_kv_heads == whole.model.num_heads else 2
            if whole.model.num_experts:
                keys["model.num_experts"] = min(8, whole.model.num_experts)
                keys["model.experts_per_token"] = min(3, whole.model.experts_per_token)
        keys["parallel.context"] = min(RANKS, whole.parallel.context)
        if whole.train.objective == "preferences":
            # Their log-likelihoods are made up.
            keys |= {"data.train": self.output.parent / "preferences", "preference.reference": "any"}
        if whole.train.chunk_tokens:
            keys |= {"train.chunk_tokens": SEQ_LEN // 2, "train.head_groups": 2}
        keys["parallel.expert"] = min(RANKS, whole.parallel.expert)
        return load_run_config([*named, *(word for key, value in keys.items() for word in (f"--{key}", str(value)))])


def small_hf(source: str, folder: Path) -> None:
    """Save a random model of a published one's config, its sizes reduced, as transformers does."""
    torch.manual_seed(0)
    keys = STARTED[source] | {key: value for key, value in SMALL_HF.items() if key in STARTED[source]}
    config = transformers.AutoConfig.for_model(**keys)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_records(shards: Path, folder: Path) -> None:
    """Write pairs of replies with log-likelihoods, to train and to validate."""
    tokenizer = load_tokenizer(shards)
    for place in (folder, folder / "validation"):
        write_preferences(place, tokenizer, [(30, 10, 8)] * 24)
        write_references(place, -np.ones((24, 2)), {"weights": "made up"})


def train_each(shards: Path, runs: Sequence[Miniature]) -> None:
    leave_out_pictures()
    if dist.get_rank() == 0:
        write_records(shards, runs[0].output.parent / "preferences")
    for miniature in runs:
        if miniature.start is not None and dist.get_rank() == 0:
            small_hf(STARTS[miniature.recipe], miniature.start)
        dist.barrier()
        Trainer(build_run(miniature.config(shards), torch.device("cpu"))).train()


FEW = ("quickstart-experts", "mistral-7b-32k")
"""With experts, and dense from weights: those whose export the quick suite tries."""


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of each recipe's miniature under its name, all trained in one start of the ranks."""
    folder = tmp_path_factory.mktemp("miniatures")
    runs = []
    for name in request.param:
        # Made by a rank: the process that starts the ranks may not run a tensor operation before.
        start = folder / f"{name}-start" if name in STARTS else None
        runs.append(Miniature(recipe=name, output=folder / name, start=start))
    run(train_each, RANKS, shards, runs)
    return folder


REST = tuple(name for name in PLANS if name not in FEW + OF_NO_FAMILY)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("trained", "name"),
    [*((FEW, name) for name in FEW), *(pytest.param(REST, name, marks=pytest.mark.slow) for name in REST)],
    indirect=["trained"],
)
def test_a_miniature_is_trained_and_exported(name: str, trained: Path, tmp_path: Path):
    """Transformers loads the export and computes the same logits."""
    exported = tmp_path / "hf"
    assert main(["convert", "--to", "hf", str(trained / name), str(exported), "--verify", "tensors"]) == 0
    if name in STARTS:
        # Noted in each checkpoint of the run: without it the first type that fits would be written.
        training = CheckpointReader(find_checkpoint(trained / name)).manifest["training"]
        assert training["model_type"] == STARTED[STARTS[name]]["model_type"]
        assert json.loads((exported / "config.json").read_text())["model_type"] == STARTED[STARTS[name]]["model_type"]
    tokens = torch.randint(512, (1, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
        theirs = model(tokens).logits
        model = load_model(trained / name)
        ours = model.logits(model(tokens, torch.arange(48)[None]))
    # Two float32 forward passes of the same products, in other orders.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert ours.std() > 1e-3, "logits that say something"
