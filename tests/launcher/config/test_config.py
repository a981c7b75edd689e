"""The run's config: what wins, what is refused and how it is said, recipes, and that every key means something."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from launcher.cluster import exit as exit_module
from launcher.cluster.exit import USAGE_ERROR, run_to_exit_code
from launcher.config.config_sections import RunConfig
from launcher.config.load_config import config_from_values, known_keys, load_run_config
from launcher.config.run_config_rules import check_run
from launcher.config.unsupported_keys import _OTHER_TRAINER_KEYS
from launcher.pretrain import main
from launcher.recipes.find import QUICKSTART
from longctx.architecture.rope import Rope
from longctx.config import PRESETS, ModelConfig
from longctx.errors import ConfigError
from longctx.kernels.processor import MATMUL_MODES
from longctx.untrusted.git_lfs import POINTER_LINE
from tests.helpers import REPOSITORY
from tests.launcher.runs import SCREEN, resolved

DENSE = ["--model.preset", "quickstart-dense"]
STAGE_3 = ["--zero.stage", "3"]
OF_ZERO = [
    (["--zero.stage", "many"], ["many", "auto"]),
    (["--zero.allgather_bucket_size", "7"], ["zero.allgather_bucket_size=7 must be even", "Try 8."]),
    (["--zero.reduce_bucket_size", "0"], ["zero.reduce_bucket_size=0 must be at least 1"]),
    (
        ["--train.optimizer", "adamw", "--zero.offload", "nvme"],
        ["zero.offload=nvme needs zero.stage=3", "Try zero.stage=3"],
    ),
    (
        ["--train.optimizer", "adamw", "--zero.offload", "nvme", *STAGE_3],
        ["zero.offload=nvme needs zero.nvme_path", "Try --zero.nvme_path"],
    ),
    (["--zero.offload_parameters", "nvme", *STAGE_3], ["zero.offload_parameters=nvme needs zero.nvme_path"]),
    (["--zero.nvme_path", "/x", *STAGE_3], ["zero.nvme_path='/x' has no effect", "set zero.offload=nvme"]),
    (["--zero.nvme_path", "/x"], ["zero.nvme_path=/x has no effect", "only stage 3 reads it"]),
    (
        [*STAGE_3, "--zero.offload_parameters", "nvme", "--zero.nvme_path", "/x", "--zero.hpz_partition_size", "2"],
        ["zero.offload_parameters=nvme with zero.hpz_partition_size=2"],
    ),
    (["--zero.mics_shard_size", "2"], ["zero.mics_shard_size", "has removed MiCS ZeRO-3 sharding", "hpz"]),
    (["--zero.offload", "disk"], ["disk", "cpu"]),
    (["--zero.offload_parameters", "cpu"], ["zero.offload_parameters=cpu has no effect", "only stage 3 reads it"]),
    (["--zero.offload", "cpu", "--zero.stage", "0"], ["zero.offload=cpu has no effect", "stages 1, 2, 3"]),
    (["--zero.allgather_bucket_size", "8", *STAGE_3], ["has no effect in zero.stage=3", "set zero.stage=2"]),
    (["--zero.pin_memory", "false"], ["zero.pin_memory=False has no effect", "zero.offload=cpu"]),
    (["--zero.sub_group_size", "0", *STAGE_3], ["zero.sub_group_size=0 must be at least 1"]),
    (["--zero.hpz_partition_size", "4", *STAGE_3], ["zero.hpz_partition_size=4 does not divide the 2 ranks", "Try 2."]),
    (["--zero.hpz_partition_size", "2", "--parallel.expert", "2", *STAGE_3], ["hpZeRO"]),
]
CHUNKS = ["--train.chunk_tokens", "8"]
ONE_A_KEY = ["--model.num_heads", "2", "--model.num_kv_heads", "2"]
OF_KEPT = [
    (
        ["--train.recompute", "true"],
        ["there is no key train.recompute", 'keep = "attention"', "--train.keep attention"],
    ),
    (["--train.store", "disk"], ["train.store=disk and train.store_path='' conflict"]),
    (["--train.store_path", "x"], ["train.store=device and train.store_path='x' conflict"]),
    (["--train.store", "disk", "--train.store_path", "x"], ["layers by chunks", "--train.chunk_tokens 8192"]),
    (["--train.chunk_tokens", "-1"], ["train.chunk_tokens=-1 must be at least 0"]),
    (["--train.head_groups", "2"], ["train.head_groups=2 needs layers by chunks"]),
    ([*CHUNKS, *ONE_A_KEY, "--train.head_groups", "3"], ["must divide the 2 key heads"]),
    (
        [*CHUNKS, "--train.head_groups", "2", "--parallel.context", "2", "--parallel.ulysses", "2", *ONE_A_KEY],
        ["parallel.ulysses=2 must divide"],
    ),
    (
        [*CHUNKS, "--model.num_heads", "3", "--model.num_kv_heads", "3", "--parallel.ulysses", "2"],
        ["needs parallel.ulysses=2 to divide the 3 query heads"],
    ),
    ([*CHUNKS, "--train.recompute_experts", "none"], ["train.recompute_experts=none has no effect", "chunk_tokens=8"]),
    (
        ["--train.keep", "inputs", "--train.recompute_experts", "none"],
        ["train.recompute_experts=none has no effect with train.keep=inputs"],
    ),
    (["--train.store", "host", "--model.num_layers", "1"], ["a one-layer model", "train.store=device"]),
    (
        ["--train.optimizer", "adamw", "--train.store", "host", "--zero.offload", "cpu", "--zero.pin_memory", "false"],
        ["zero.pin_memory=False"],
    ),
]
MASKED = ["--train.objective", "masked", "--model.causal", "false"]
OF_OBJECTIVES = [
    (["--model.causal", "false"], ["train.objective=causal predicts the next token", "Try --train.objective masked"]),
    (MASKED[:2], ["train.objective=masked needs context", "Try --model.causal false"]),
    ([*MASKED, "--data.mask_rate", "0"], ["data.mask_rate=0.0 must be above 0"]),
    ([*MASKED, "--data.fim_rate", "0.5"], ["data.fim_rate=0.5 is for train.objective=causal"]),
    ([*MASKED, "--validation.sample_tokens", "8"], ["validation.sample_tokens=8", "a bidirectional one cannot"]),
    (["--data.mask_rate", "0.3"], ["data.mask_rate=0.3 has no effect with train.objective=causal"]),
    (["--data.mask_static", "true"], ["data.mask_static=True has no effect", "Leave it out"]),
    ([*MASKED, "--model.position", "t5", "--model.relative_buckets", "7"], ["model.relative_buckets=7", "even number"]),
    ([*MASKED, "--train.objective", "spans"], ["spans", "masked"]),
    (["--model.position_offset", "2"], ["model.position_offset=2", "model.position='learned'"]),
    (["--model.embedding_size", "8"], ["model.embedding_size=8", "model.head_transform=true"]),
    (["--model.head_transform", "true"], ["model.activation='swiglu' is gated", "gelu"]),
    (["--model.shared_layers", "true"], ["model.shared_layers=true is not supported with experts"]),
    (
        ["--model.shared_layers", "true", *DENSE, "--model.layers", "full", "window", "--model.window", "8"],
        ["model.shared_layers=true uses one block for all layers", "List one kind"],
    ),
]
OF_EXPERTS = [
    (["--parallel.expert", "0"], ["parallel.expert=0 must be at least 1"]),
    (["--parallel.expert", "3"], ["parallel.expert=3 does not divide the 2 ranks", "parallel.expert=2"]),
    (["--parallel.expert", "2", "--model.num_experts", "5"], ["parallel.expert=2 does not divide model.num_experts=5"]),
    (["--parallel.expert", "2", *DENSE], ["parallel.expert=2", "no experts", "parallel.expert=1"]),
    (["--parallel.expert_tile_tokens", "-1"], ["parallel.expert_tile_tokens=-1 must be at least 0"]),
    (["--parallel.expert_tile_tokens", "8", *DENSE], ["expert_tile_tokens=8 has no effect", "model.num_experts=0"]),
    (["--train.recompute_experts", "some"], ["some", "activation"]),
    (["--train.recompute_experts", "all", *DENSE], ["train.recompute_experts=all has no effect", "=activation"]),
    (["--train.record_routing", "x", *DENSE], ["train.record_routing=x has no effect", "record_routing=no"]),
    (["--model.capacity_factor", "2", *DENSE], ["model.capacity_factor=2.0 has no effect"]),
    (["--train.record_routing", "a/../b", "--train.replay_routing", "b"], ["the same folder"]),
    (["--train.replay_routing", ""], ["must name a folder", "replay_routing=no"]),
    (["--model.experts_per_token", "9"], ["model.experts_per_token=9", "model.num_experts=8"]),
    (["--model.expert_groups", "4", "--model.experts_per_token", "3"], ["model.experts_per_token=3"]),
    (["--model.balance_scope", "batch"], ["model.balance_scope='batch' is unknown", "global_batch"]),
    (["--model.selection_bias_rate", "1e-3"], ["model.selection_bias_rate=0.001", "model.selection_bias=true"]),
]
"""What may not be asked of experts on two ranks, and what the answer holds."""


def recipe(folder: Path, text: str | bytes) -> Path:
    path = folder / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# What wins.


def test_defaults_then_file_then_flags(tmp_path):
    path = recipe(tmp_path, '[train]\nlr = 1e-4\nsteps = 7\n[model]\npreset = "quickstart-dense"\nnum_layers = 3\n')
    config = load_run_config([f"--config={path}", "--train.steps", "9", "--local_rank=1"])
    assert (config.train.steps, config.train.lr, config.train.beta2) == (9, 1e-4, RunConfig().train.beta2)
    assert config.model.config() == dataclasses.replace(PRESETS["quickstart-dense"], num_layers=3)
    assert config.parallel.context == 1, "a file of one's own starts from the defaults, not from the quickstart"


def test_the_quickstart_is_the_file_when_none_is_named():
    assert load_run_config([]) == config_from_values(tomllib.loads(QUICKSTART.read_text()))


def test_a_preset_from_the_command_line_lies_under_the_fields(tmp_path):
    path = recipe(tmp_path, "[model]\nnum_layers = 3\n")
    argv = ["--config", str(path), "--model.preset", "quickstart-dense", "--model.head_dim", "16"]
    wanted = dataclasses.replace(PRESETS["quickstart-dense"], num_layers=3, head_dim=16)
    assert load_run_config(argv).model.config() == wanted


def test_booleans_are_written_as_in_toml_or_as_in_python():
    for word in ("true", "True"):
        assert load_run_config(["--parallel.deterministic", word]).parallel.deterministic is True


def test_the_resolved_config_reads_back_as_itself():
    config = load_run_config(["--train.lr", "3e-4", "--parallel.context", "4", "--data.validation", "a b"])
    assert config_from_values(tomllib.loads(config.to_toml())) == config


def test_a_whole_number_serves_where_a_fraction_is_meant(tmp_path):
    assert (
        load_run_config(["--config", str(recipe(tmp_path, "[train]\nlr = 1\n")), "--model.preset", "gpt-1"]).train.lr
        == 1.0
    )


# What is refused, from a file.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train]\nstep = 5\n", ["train.step is unknown", "train.steps"]),
        ("[trian]\nsteps = 5\n", ["[trian] is unknown", "train"]),
        ("steps = 5\n", ["'steps' is outside a section"]),
        ("[train]\nsteps = 1.5\n", ["train.steps=1.5", "integer"]),
        ('[train]\nsteps = "5"\n', ["train.steps='5'", "integer"]),
        ("[parallel]\ndeterministic = 1\n", ["parallel.deterministic=1", "boolean"]),
        ("[data]\nverify = 'always'\n", ["data.verify='always'", "'read', 'start' or 'off'"]),
        ("[train]\nlr = '1e-3'\n", ["train.lr='1e-3'", "number", "without quotes"]),
        ("learning_rate = 1e-3\n", ["there is no key learning_rate here", "train.lr"]),
        ("[train]\ngradient_accumulation_steps = 2\n", ["train.gradient_accumulation_steps", "train.tokens_per_step"]),
        ("[training]\nbf16 = true\n", ["training.bf16", 'train.dtype is "bfloat16"']),
        ("[train]\nlr = 1e-3\nlr = 2e-3\n", ["is not TOML: Cannot overwrite a value", "That line is 'lr = 2e-3'"]),
        ("[train]\ndtype = 'float16'\n", ["train.dtype='float16'", "bfloat16"]),
        ("[data]\ntrain = ['a', 'b']\n", ["data.train=['a', 'b']", "string"]),
        ("[data]\ntrain = 2026-01-01\n", ["2026-01-01 is a date", "quotes"]),
        ("[model]\npreset = 'huge'\n", ["model.preset='huge' is unknown", "quickstart-dense"]),
        ("[model]\nnum_heads = 3\nnum_kv_heads = 2\n", ["model.num_kv_heads=2", "[1, 3]"]),
        ("[train\nsteps = 5\n", ["is not TOML", "line 1"]),
        (b"\xff\xfe", ["is not UTF-8 text"]),
        (POINTER_LINE + b"\noid sha256:4d7a\nsize 9\n", ["is a Git LFS pointer", "git lfs pull"]),
    ],
)
def test_a_file_is_read_strictly(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        load_run_config(["--config", str(recipe(tmp_path, text))])
    for words in said:
        assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) < SCREEN


@pytest.mark.parametrize("word", _OTHER_TRAINER_KEYS)
def test_words_of_other_trainers_are_no_keys_of_ours_and_lead_to_one(word):
    """What stands behind a word names a key that there is, and the first one is the answer."""
    first = re.search(r"\b(?:train|data|run|zero|parallel|checkpoint|validation)\.[a-z_]+", _OTHER_TRAINER_KEYS[word])
    assert first
    assert first[0] in known_keys()
    with pytest.raises(ConfigError, match=f"there is no key {word} here"):
        load_run_config([f"--{word.replace('_', '-')}", "1"])


def test_yaml_and_json_are_told_what_a_config_is(tmp_path):
    for name in ("run.yaml", "ds_config.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ConfigError, match=rf"{name} is not TOML: write YAML's `lr: 1e-4`"):
            load_run_config(["--config", str(tmp_path / name)])


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run_config(["--config", str(tmp_path)])
    with pytest.raises(ConfigError, match="--config needs a value"):
        load_run_config(["--config"])


# What is refused, by the whole command: exit code 2, one screen, rank 0 alone.


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--train.nonsense", "1"], ["--train.nonsense"]),
        (["--train.steps", "many"], ["--train.steps", "many"]),
        (["--run.device", "tpu"], ["tpu", "'cpu'"]),
        (["stray"], ["stray"]),
        (["--parallel.context", "3"], ["parallel.context=3 does not divide the 2 ranks", "parallel.context=2"]),
        (["--parallel.context", "0"], ["parallel.context=0 must be at least 1"]),
        (["--model.position", "learned", "--model.max_positions", "1024"], ["data.seq_len=2048", "1024"]),
        (["--data.seq_len", "4098", "--train.tokens_per_step", "4098"], ["4098", "4 equal parts", "4096 or 4100"]),
        (["--data.seq_len", "4096", "--train.tokens_per_step", "5000"], ["train.tokens_per_step=5000"]),
        (["--parallel.layout", "zagzig"], ["parallel.layout='zagzig' is unknown", "zigzag"]),
        (["--zero.stage", "4"], ["zero.stage=4 must be 0, 1, 2 or 3"]),
        (["--zero.stage", "0", "--train.dtype", "bfloat16"], ["zero.stage=0", "Try zero.stage=1"]),
        (["--train.lr", "0"], ["train.lr=0.0"]),
        (["--train.eps", "-1"], ["train.eps=-1.0 must be at least 0"]),
        (["--train.steps", "0"], ["train.steps=0 must be at least 1"]),
        (["--train.beta2", "1"], ["train.beta2=1.0 must be between 0 and 1"]),
        (["--train.z_loss", "-1e-4"], ["train.z_loss=-0.0001 must be at least 0"]),
        (["--train.label_smoothing", "1"], ["train.label_smoothing=1.0 must be between 0 and 1"]),
        (["--run.seed", "-1"], ["run.seed=-1 must be at least 0"]),
        (["--run.timeout_seconds", "inf"], ["run.timeout_seconds=inf"]),
        (["--run.max_seconds", "-1"], ["run.max_seconds=-1.0 must be", "0 for no limit"]),
        (["--run.orphan_seconds", "0"], ["run.orphan_seconds=0.0 must be a positive number"]),
        *OF_EXPERTS,
        *OF_KEPT,
        *OF_ZERO,
        *OF_OBJECTIVES,
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) and x[0].startswith("-") else None,
)
def test_wrong_usage_is_one_screen_on_rank_0_alone(argv, said, capfd, monkeypatch):
    monkeypatch.setattr(exit_module, "HEAD_START_SECONDS", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert run_to_exit_code(lambda: main(argv)) == USAGE_ERROR
        out, err = capfd.readouterr()
        assert out == "", out
        if rank == "1":
            assert err == "", err
    assert "Traceback" not in err
    assert len(err.splitlines()) < SCREEN, err
    for words in said:
        assert words in err, err


# Recipes and keys.


@pytest.mark.parametrize("native", [True, False])
def test_nothing_is_left_to_the_machine(native):
    own = resolved(load_run_config([]), native_bfloat16=native).train
    assert (own.dtype, own.products) == (("bfloat16", "native") if native else ("float32", "float32"))
    for products in MATMUL_MODES:
        asked = ["--train.dtype", "bfloat16", "--train.products", products]
        given = resolved(load_run_config(asked), native_bfloat16=native).train
        assert (given.dtype, given.products) == ("bfloat16", products)


def test_a_gpu_gets_its_own_stage_and_never_float32_unasked():
    asked = {
        ("--zero.stage", "auto"): ("bfloat16", 2),
        ("--zero.stage", "1"): ("bfloat16", 1),
        ("--zero.stage", "0", "--train.dtype", "float32"): ("float32", 0),
    }
    for argv, wanted in asked.items():
        config = resolved(load_run_config(list(argv)), native_bfloat16=True, device_type="cuda")
        assert (config.train.dtype, config.zero.stage) == wanted
    stage_0 = load_run_config(["--zero.stage", "0"])
    with pytest.raises(
        ConfigError, match=r"(?s)would train in float32 on a GPU.*zero\.stage=2, or train\.dtype=float32"
    ):
        resolved(stage_0, native_bfloat16=True, device_type="cuda")
    assert resolved(stage_0, native_bfloat16=True).train.dtype == "float32"
    assert resolved(load_run_config(["--zero.stage", "auto"]), native_bfloat16=True).zero.stage == 1


@pytest.mark.parametrize(
    ("argv", "device_type", "wanted"),
    [
        (["--parallel.expert", "2"], "cuda", 4096),
        (["--parallel.expert", "2"], "cpu", 0),
        ([], "cuda", 0),
        (["--parallel.expert", "2", "--parallel.expert_tile_tokens", "0"], "cuda", 0),
        (["--parallel.expert", "2", "--parallel.expert_tile_tokens", "96"], "cuda", 96),
        (DENSE, "cuda", 0),
        ([*DENSE, "--parallel.expert_tile_tokens", "0"], "cuda", 0),
    ],
)
def test_experts_on_several_gpus_are_sent_in_tiles(argv, device_type, wanted):
    config = resolved(load_run_config(argv), native_bfloat16=True, device_type=device_type)
    assert config.parallel.expert_tile_tokens == wanted
    check_run(config, 2)


def test_every_key_of_a_run_is_read_somewhere():
    read = _reads("launcher") | _reads("parallel")
    assert "train.nonsense" not in read
    for section in dataclasses.fields(RunConfig):
        if section.name == "model":
            continue
        for key in dataclasses.fields(type(getattr(RunConfig(), section.name))):
            path = f"{section.name}.{key.name}"
            assert path in read, f"{path} is not read"


def test_every_key_of_a_model_is_read_somewhere():
    read = {path.split(".")[1] for path in _reads("longctx") | _reads("launcher")}
    assert not {f.name for kind in (ModelConfig, Rope) for f in dataclasses.fields(kind)} - read


@cache
def _reads(package: str) -> set[str]:
    """Every ``name.attribute`` that code reads, checks of a config's own ranges left out."""
    found: set[str] = set()
    for path in (REPOSITORY / package).rglob("*.py"):
        if path.name == "rules.py" and package == "longctx":
            continue
        tree = ast.parse(path.read_text())
        skipped: set[int] = set()
        if path.parent.name == "config":
            checks = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.lstrip("_")[:5] == "check"]
            skipped = {id(n) for check in checks for n in ast.walk(check)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in skipped:
                base = getattr(node.value, "attr", getattr(node.value, "id", ""))
                found.add(f"{base}.{node.attr}")
    return found


@pytest.mark.parametrize("key", ["train.clip_norm", "train.lr", "train.eps", "run.timeout_seconds", "run.max_seconds"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_numbers_are_finite(key, value):
    config = load_run_config(["--data.train", "x", f"--{key}", value])
    with pytest.raises(ConfigError, match=rf"{key}={value} must be a finite number"):
        check_run(config, 2)
