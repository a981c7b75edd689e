"""The results that ``fingerprint.py`` hashes. Each public function runs in forked processes and returns lines.

Nothing here knows where a module of the project lies, apart from the commands and the documented Python names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import os
import random
import runpy
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

NOT_RESULTS = frozenset(
    {"tokens_per_second", "step_seconds", "data_wait_seconds", "max_memory_bytes", "model_tflops", "mfu", "time"}
)
"""Metrics that two runs of the same numbers need not share."""


class Line(NamedTuple):
    """One result: its name, the hash of its exact bits, and what a reader can make sense of."""

    name: str
    digest: str
    value: str


# Hashes.


def digest(*parts: Any) -> str:
    """SHA-256 of tensors (dtype, shape and bits), bytes, and the ``repr`` of anything else."""
    import torch

    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            flat = part.detach().cpu().contiguous().reshape(-1)
            found.update(f"{part.dtype}{tuple(part.shape)}".encode())
            found.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            found.update(part if isinstance(part, bytes) else repr(part).encode())
        found.update(b"|")
    return found.hexdigest()


def tensors_line(name: str, tensors: Iterable[tuple[str, Any]]) -> Line:
    """One line of named tensors, whatever their order; the value is their number and the norm of them all."""
    items = sorted(tensors, key=lambda item: item[0])
    square = sum(float(tensor.detach().double().square().sum()) for _, tensor in items)
    parts = [part for item in items for part in item]
    return Line(name, digest(*parts), f"{len(items)} tensors, norm {square**0.5:.9g}")


def values_line(name: str, value: Any) -> Line:
    """One line of plain values, their floats exact."""
    text = json.dumps(value, sort_keys=True)
    return Line(name, digest(text), text if len(text) <= 80 else f"{text[:77]}...")


# Commands.


def run_script(path: str | None, *arguments: Any) -> str:
    """Run a script of the project, or ``python -m launcher`` where ``path`` is None; return what it printed."""
    sys.argv = [path or "launcher", *map(str, arguments)]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            if path is None:
                runpy.run_module("launcher", run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{' '.join(sys.argv)} ended with {end.code}: {said.getvalue()[-2000:]}") from end
    return said.getvalue()


# Data.


def write_corpus(folder: Path) -> list[str]:
    """Write a corpus of text files of very different lengths, 300 KB in all; return the texts."""
    chance = random.Random(20240229)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "en", "ar", "é", "ß")]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(1500)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    texts = []
    for number in range(160):
        num_words = int(chance.paretovariate(0.9) * 25) % 4000 + 1
        chosen = chance.choices(words, weights, k=num_words)
        lines = [" ".join(chosen[n : n + 9]) for n in range(0, num_words, 9)]
        texts.append(f"def f{number}(x):\n    return {number * 7919} * x\n" + ".\n".join(lines) + " 中文 🙂\n")
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / f"{number:04d}.txt").write_text(text, encoding="utf-8")
    return texts


def build_data(work: Path) -> list[Line]:
    """Train a tokenizer and build two shard folders by the commands."""
    texts = write_corpus(work / "corpus")
    listed = work / "corpus.jsonl"
    listed.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:40]))
    model, data = work / "tokenizer.model", work / "data"
    run_script(None, "tokenizer", "train", "--source", work / "corpus", "--vocab-size", 512, "--output", model)
    build = ("data", "build", "--tokenizer", model)
    fraction = ("--validation-fraction", 0.2)
    run_script(None, *build, "--source", work / "corpus", "--output", data, *fraction, "--shard-tokens", 40_000)
    run_script(None, *build, "--source", listed, "--output", work / "listed", "--validation-fraction", 0)
    inspected = run_script(None, "data", "inspect", data, "--seq-len", 256, "--json").replace(str(work), "")
    lines = [
        values_line("data/inspect", json.loads(inspected)),
        Line("data/tokenizer", digest(model.read_bytes()), f"{model.stat().st_size} bytes"),
    ]
    for name in ("data", "data/validation", "listed"):
        lines += _shard_lines(f"data/{name.replace('/', '-')}", work / name)
    return lines


def _shard_lines(name: str, folder: Path) -> Iterator[Line]:
    import pyarrow as pa

    manifest = json.loads((folder / "manifest.json").read_text())
    yield values_line(f"{name}/manifest", {key: manifest[key] for key in ("hash", "documents", "tokens")})
    yield values_line(f"{name}/checksums", [list(entry.values()) for entry in manifest["shards"]])
    for path in sorted(folder.glob("*.arrow")):
        table = pa.ipc.open_file(pa.OSFile(str(path))).read_all()
        for column in table.column_names:
            values = table[column].to_pylist()
            yield Line(f"{name}/{path.name}/{column}", digest(str(table[column].type), values), f"{len(values)} values")


def load_batches(work: Path) -> list[Line]:
    """The first batches of each data rank, and the loader's state after them."""
    from data_pipeline.loader import build_loader

    lines = []
    for rank in range(2):
        loader = build_loader(
            work / "data", seq_len=256, rows_per_step=4, micro_batch_rows=2, data_rank=rank, data_degree=2, seed=3
        )
        for number in range(5):
            batch = next(loader)
            ids = batch.document_ids if hasattr(batch, "document_ids") else batch.documents  # its older name
            parts = [batch.tokens, batch.targets, batch.positions, ids, batch.cu_seqlens]
            value = f"{len(batch.cu_seqlens) - 1} segments, tokens {batch.tokens.flatten()[:6].tolist()}..."
            lines.append(Line(f"loader/rank{rank}/batch{number}", digest(*parts), value))
        lines.append(values_line(f"loader/rank{rank}/state", loader.state_dict()))
    return lines


# Runs.


def train(work: Path, *, name: str, settings: Mapping[str, Any]) -> list[Line]:
    """A run by ``launcher/pretrain.py``, as the deepspeed launcher starts it; rank 0 returns its lines."""
    import tomli_w

    rank = int(os.environ.get("RANK", "0"))
    folder = work / "runs" / name
    config = work / f"{name}.rank{rank}.toml"
    config.write_text(tomli_w.dumps(_fill(settings, runs=str(work / "runs"), folder=str(folder))))
    run_script("launcher/pretrain.py", f"--local_rank={rank}", "--config", config)
    return [] if rank else [*_metric_lines(f"train/{name}", folder), *_checkpoint_lines(f"train/{name}", folder)]


def _fill(settings: Any, **places: str) -> Any:
    if isinstance(settings, Mapping):
        return {key: _fill(value, **places) for key, value in settings.items()}
    return settings.format(**places) if isinstance(settings, str) else settings


def _metric_lines(name: str, folder: Path) -> Iterator[Line]:
    """One line for each metric: its values at every step, exactly."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for kind in ("train", "validation"):
        rows = [record for record in records if record["kind"] == kind]
        keys = dict.fromkeys(key for row in rows for key in row)
        for key in sorted(set(keys) - NOT_RESULTS - {"kind"}):
            yield values_line(f"{name}/{kind}.{key}", [row.get(key) for row in rows])


def _checkpoint_lines(name: str, folder: Path) -> Iterator[Line]:
    """The newest checkpoint: every role's values by tensor, how they are cut into pieces, and the JSON state."""
    checkpoint = max(path.parent for path in folder.glob("checkpoints/step_*/manifest.json"))
    yield from checkpoint_tensor_lines(f"{name}/checkpoint", checkpoint)
    state = json.loads((checkpoint / "manifest.json").read_text())["training"]
    yield values_line(f"{name}/checkpoint.loader", state["loader"])
    yield values_line(f"{name}/checkpoint.expert_load", state.get("expert_load"))
    for path in sorted((folder / "routing").glob("**/*")):
        if path.is_file():
            yield Line(f"{name}/routing/{path.name}", digest(path.read_bytes()), f"{path.stat().st_size} bytes")


def checkpoint_tensor_lines(name: str, checkpoint: Path) -> Iterator[Line]:
    """One line a role over all tensors, and one for the pieces that hold them."""
    import numpy as np

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    files = {file: read_safetensors(checkpoint / file) for file in manifest["files"] if file.endswith(".safetensors")}
    pieces, roles = [], {}
    for tensor, entry in sorted(manifest["tensors"].items()):
        for role, parts in entry["roles"].items():
            parts = sorted(parts, key=lambda part: part["start"])
            pieces += [(tensor, role, part["file"], part["start"], part["numel"]) for part in parts]
            content = b"".join(files[part["file"]][part["key"]] for part in parts)
            roles.setdefault(role, []).append((tensor, tuple(entry["shape"]), content))
    for role, contents in sorted(roles.items()):
        norm = sum(float(np.square(np.frombuffer(x, "<f4"), dtype=np.float64).sum()) for _, _, x in contents) ** 0.5
        flat = [part for content in contents for part in content]
        yield Line(f"{name}.{role}", digest(*flat), f"{len(contents)} tensors, norm {norm:.9g}")
    yield Line(f"{name}.pieces", digest(pieces), f"{len(pieces)} pieces in {len(files)} files")


def read_safetensors(path: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a file, by name."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    return {
        name: data[entry["data_offsets"][0] : entry["data_offsets"][1]]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def export_run(work: Path, *, name: str, generates: bool) -> list[Line]:
    """``convert --to hf`` of a run and back; where asked, ``generate`` from it."""
    run, out, back = work / "runs" / name, work / "exported" / name, work / "imported" / name
    out.parent.mkdir(parents=True, exist_ok=True)
    back.parent.mkdir(parents=True, exist_ok=True)
    run_script(None, "convert", "--to", "hf", run, out, "--verify", "tensors")
    lines = [*folder_lines(f"export/{name}", out)]
    run_script(None, "convert", "--from", "hf", out, back, "--verify", "tensors")
    lines += checkpoint_tensor_lines(f"export/{name}/imported", back)
    if generates:
        narrow = out.with_name(f"{name}.bfloat16")
        run_script(None, "convert", "--to", "hf", run, narrow, "--dtype", "bfloat16", "--verify", "none")
        lines += folder_lines(f"export/{name}.bfloat16", narrow)
        said = run_script(None, "generate", "--checkpoint", run, "--prompt", "def f1", "--max-new-tokens", 24)
        lines.append(values_line(f"generate/{name}", said))
    return lines


def folder_lines(name: str, folder: Path) -> Iterator[Line]:
    """One line a file: safetensors by tensor, anything else by its bytes."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = sorted(read_safetensors(path).items()) if path.suffix == ".safetensors" else path.read_bytes()
        yield Line(f"{name}/{path.relative_to(folder)}", digest(content), f"{path.stat().st_size} bytes")


# Models.


def model_config(settings: Mapping[str, Any]) -> Any:
    """A ``ModelConfig`` of plain values."""
    from longctx.config import ModelConfig

    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    if "rope" in values:
        rope: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values["rope"].items()}
        values["rope"] = type(ModelConfig().rope)(**rope)
    return ModelConfig(**values)


def shrunk_presets() -> dict[str, Any]:
    """Every preset with all its choices and none of its size."""
    from longctx.config import PRESETS

    return {name: _shrink(config) for name, config in PRESETS.items()}


def _shrink(config: Any) -> Any:
    groups = min(config.expert_groups, 4)
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 4 if config.num_kv_heads == config.num_heads else 2,
        "head_dim": 12,
        "max_positions": 128,
        "ffn_size": 48,
        "init_std": 0.1,
    }
    if config.kv_lora_rank:
        sizes |= {"q_lora_rank": 10, "kv_lora_rank": 16, "rope_head_dim": 4, "value_head_dim": 8}
    if config.rope.original_max_positions:
        sizes["rope"] = dataclasses.replace(config.rope, original_max_positions=32)
    if config.num_experts:
        sizes |= {"num_experts": 8, "experts_per_token": min(config.experts_per_token, 3), "expert_ffn_size": 16}
        sizes |= {"expert_groups": groups, "groups_per_token": min(config.groups_per_token, max(1, groups // 2))}
        sizes |= {"shared_ffn_size": 24 * bool(config.shared_ffn_size), "dense_layers": config.dense_layers[:1]}
    return dataclasses.replace(config, **sizes)


def decode(work: Path, *, models: Mapping[str, Mapping[str, Any]], dtypes: Sequence[str], presets: bool) -> list[Line]:
    """Initial weights, logits, router statistics and all gradients of each model in one process."""
    configs = {name: model_config(settings) for name, settings in models.items()}
    if presets:
        configs |= {f"preset-{name}": config for name, config in shrunk_presets().items()}
    return [
        line
        for name, config in configs.items()
        for dtype in dtypes
        for line in guarded(f"decoder/{name}/{dtype}", functools.partial(_decoder_lines, config, dtype))
    ]


def guarded(name: str, compute: Callable[[str], Iterable[Line]]) -> list[Line]:
    """The lines, or one that says why there are none, so that one failure hides nothing else."""
    try:
        return list(compute(name))
    except Exception as error:
        return [Line(name, "FAILED", f"{type(error).__name__}: {error}".splitlines()[0])]


def _decoder_lines(config: Any, dtype: str, name: str) -> Iterator[Line]:
    import torch

    from longctx.model.decoder import Decoder

    model = Decoder(config).to(getattr(torch, dtype))
    if dtype == "float32":
        yield tensors_line(f"{name}/initial", model.state_dict().items())
    randomize(model)
    tokens, positions, bounds = packed_rows(config.vocab_size)
    hidden, stats = model(tokens, positions, bounds, return_stats=True)
    logits = model.logits(hidden)
    yield tensors_line(f"{name}/logits", [("logits", logits)])
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (logits * weights.to(logits.dtype)).sum().backward()
    gradients = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    yield tensors_line(f"{name}/gradients", gradients)
    if stats:
        yield tensors_line(f"{name}/stats", _named_stats(stats))


def _named_stats(stats: Iterable[Iterable[Any]]) -> Iterator[tuple[str, Any]]:
    """Each layer's, numbered. Diagnostics with named fields count as the one tensor that they were before."""
    import torch

    for n, layer in enumerate(stats):
        for m, part in enumerate(layer):
            yield f"{n}.{m}", torch.stack(list(part)) if isinstance(part, tuple) else part


def randomize(model: Any, std: float = 0.15) -> None:
    """Give every parameter and buffer values of its own, which depend on its name alone."""
    import torch

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + around)


def packed_rows(vocab_size: int) -> tuple[Any, Any, list[int]]:
    """Two rows of 40 tokens and five documents: tokens, positions, boundaries."""
    import torch

    bounds = [0, 13, 40, 41, 63, 80]
    tokens = torch.randint(vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    positions = torch.cat([torch.arange(n) for n in lengths]).view(2, 40)
    return tokens, positions, bounds


def generate_ids(work: Path, *, models: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Greedy continuations of small models."""
    from longctx.generation import generate
    from longctx.model.decoder import Decoder

    def lines(settings: Mapping[str, Any], name: str) -> Iterator[Line]:
        model = Decoder(model_config(settings))
        randomize(model, std=0.5)  # enough for the model to say something else now and then
        yield values_line(name, generate(model.eval(), [5, 17, 3, 88, 5, 41], 24))

    return [
        line
        for name, settings in models.items()
        for line in guarded(f"generate/{name}", functools.partial(lines, settings))
    ]


def convert_families(work: Path, *, families: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """A tiny transformers model of each family through ``load_hf``, the decoder, ``save_hf`` and ``to_hf``."""
    if importlib.util.find_spec("transformers") is None:
        return []
    return [
        line
        for name, settings in families.items()
        for line in guarded(f"family/{name}", functools.partial(_family_lines, work / "hf", settings))
    ]


def _family_lines(work: Path, settings: Mapping[str, Any], name: str) -> Iterator[Line]:
    import torch
    import transformers

    from longctx.conversion import load_hf, save_hf
    from longctx.model.decoder import Decoder

    family = name.rpartition("/")[2]
    theirs = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**settings)).eval()
    randomize(theirs)
    theirs.save_pretrained(work / family, max_shard_size="60KB")
    config, tensors = load_hf(work / family)
    yield tensors_line(f"{name}/load_hf", tensors.items())
    yield values_line(f"{name}/config", dataclasses.asdict(config))
    model = Decoder(config, seed=None)
    model.load_state_dict(tensors)
    tokens, positions, bounds = packed_rows(config.vocab_size)
    with torch.no_grad():
        yield tensors_line(f"{name}/logits", [("logits", model.eval().logits(model(tokens, positions, bounds)))])
    yield values_line(f"{name}/to_hf", config.to_hf())
    save_hf(config, tensors, work / f"{family}.saved")
    yield from folder_lines(f"{name}/save_hf", work / f"{family}.saved")
