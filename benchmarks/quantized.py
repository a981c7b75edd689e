"""Import of quantized folders with one GB: seconds, peak memory, and bits compared with each scheme's formula.

    python -m benchmarks.quantized [--quick]

* fp8: a Qwen3 whose projections are E4M3 with a float32 scale per 128 × 128 values, as in DeepSeek-V3's and Qwen's
  releases; ``channel`` the same with a bfloat16 scale per row (compressed-tensors).
* mxfp4: a gpt-oss whose experts are E2M1 with a scale per 32 values.

Each folder is imported in its own process, which has imported a small one before; memory is the increase, at most one
tensor in float32 and 200 MB. Then every quantized tensor in the checkpoint is compared with the formula. Exit code 1 if
a row is outside its bounds; ``benchmarks/results/KIND/quantized.json`` keeps the results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bounds import Bound, conclude, parse
from longctx.checkpoint_format import CheckpointReader
from longctx.conversion.weights.json_files import write_json
from longctx.conversion.weights.weights_folder import INDEX
from longctx.storage.safetensors import SafetensorsFile, SafetensorsShardWriter

BLOCK = 128
SPARE_BYTES = 200 * 10**6
_TABLE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_IMPORT = """
import sys, time
from pathlib import Path
from longctx.conversion import import_hf

def kib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])

small, source, output = sys.argv[1:]
import_hf(small, output + "-small")  # imports all that a conversion imports
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before, start = kib("VmRSS"), time.perf_counter()
import_hf(source, output, shard_bytes=500_000_000)
print(time.perf_counter() - start, (kib("VmHWM") - before) * 1024)
"""


def qwen3(layers: int, width: int) -> dict[str, Any]:
    """Return a Qwen3 config."""
    return {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 1000, "hidden_size": width,
        "intermediate_size": 4 * width, "num_hidden_layers": layers, "num_attention_heads": width // 128,
        "num_key_value_heads": width // 256, "head_dim": 128, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }  # fmt: skip


def gpt_oss(layers: int, width: int) -> dict[str, Any]:
    """Return a gpt-oss config."""
    return {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 1000, "hidden_size": width,
        "intermediate_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64,
        "num_key_value_heads": width // 128, "head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip


def of_qwen3(config: dict[str, Any], scheme: str, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors on disk, projections with their scales."""
    M, F, D = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    yield "model.embed_tokens.weight", torch.randn(config["vocab_size"], M, generator=generator).bfloat16()
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    shapes = {f"self_attn.{name}_proj": (count * D, M) for name, count in heads.items()}
    shapes |= {"self_attn.o_proj": (M, heads["q"] * D), "mlp.gate_proj": (F, M)}
    shapes |= {"mlp.up_proj": (F, M), "mlp.down_proj": (M, F)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, (rows, columns) in shapes.items():
            yield f"{at}{name}.weight", torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
            if scheme == "fp8":
                scale = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK), generator=generator) + 0.01
                yield f"{at}{name}.weight_scale_inv", scale
            else:
                yield f"{at}{name}.weight_scale", (torch.rand(rows, 1, generator=generator) + 0.01).bfloat16()
        for norm, size in (("input_layernorm", M), ("post_attention_layernorm", M)):
            yield f"{at}{norm}.weight", torch.ones(size, dtype=torch.bfloat16)
        for norm in ("self_attn.q_norm", "self_attn.k_norm"):
            yield f"{at}{norm}.weight", torch.ones(D, dtype=torch.bfloat16)
    yield "model.norm.weight", torch.ones(M, dtype=torch.bfloat16)
    yield "lm_head.weight", torch.randn(config["vocab_size"], M, generator=generator).bfloat16()


def of_gpt_oss(config: dict[str, Any], generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors on disk, experts packed."""
    M, F, D, E = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim", "num_local_experts"))

    def plain(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    yield "model.embed_tokens.weight", plain(config["vocab_size"], M)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, count in heads.items():
            yield f"{at}self_attn.{name}_proj.weight", plain(count * D, M)
            yield f"{at}self_attn.{name}_proj.bias", plain(count * D)
        yield f"{at}self_attn.o_proj.weight", plain(M, heads["q"] * D)
        yield f"{at}self_attn.o_proj.bias", plain(M)
        yield f"{at}self_attn.sinks", plain(heads["q"])
        yield f"{at}mlp.router.weight", plain(E, M)
        yield f"{at}mlp.router.bias", plain(E)
        for name, rows, columns in (("gate_up_proj", 2 * F, M), ("down_proj", M, F)):
            size = (E, rows, columns // 32)
            blocks = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
            yield f"{at}mlp.experts.{name}_blocks", blocks
            scales = torch.randint(118, 128, size, generator=generator, dtype=torch.uint8)
            yield f"{at}mlp.experts.{name}_scales", scales
            yield f"{at}mlp.experts.{name}_bias", plain(E, rows)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", torch.ones(M, dtype=torch.bfloat16)
    yield "model.norm.weight", torch.ones(M, dtype=torch.bfloat16)
    yield "lm_head.weight", plain(config["vocab_size"], M)


def write(folder: Path, scheme: str, layers: int, width: int) -> int:
    """Write a folder of random quantized weights; return its tensors' bytes."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    if scheme == "mxfp4":
        config = gpt_oss(layers, width) | {"quantization_config": {"quant_method": "mxfp4"}}
        tensors = of_gpt_oss(config, generator)
    else:
        config = qwen3(layers, width)
        tensors = of_qwen3(config, scheme, generator)
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        config["quantization_config"] = {
            "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
            "channel": {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": groups,
            },
        }[scheme]
    writer = SafetensorsShardWriter(folder, "model", 300_000_000)
    for name, tensor in tensors:
        writer.add(name, tensor)
    file_of = writer.finish()
    if len(set(file_of.values())) > 1:
        write_json(folder / INDEX, {"metadata": {}, "weight_map": file_of})
    write_json(folder / "config.json", config)
    return writer.total_bytes


def wanted(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield each quantized tensor from the formula, by its name in a checkpoint or in files."""
    files = [SafetensorsFile(path) for path in sorted(folder.glob("*.safetensors"))]
    found = {name: file for file in files for name in file.names()}

    def read(name: str) -> Tensor:
        return found[name].read_stored(name)

    for name in sorted(found):
        if name.endswith(".weight_scale_inv"):
            scale = read(name).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            stored = read(name.removesuffix("_scale_inv"))
            part = scale[: stored.shape[0], : stored.shape[1]]
            yield name.removesuffix("_scale_inv"), (stored.float() * part).bfloat16()
        elif name.endswith(".weight_scale"):
            stored = read(name.removesuffix("_scale"))
            yield name.removesuffix("_scale"), stored.bfloat16() * read(name)
        elif name.endswith("_blocks"):
            packed = read(name)
            halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
            numbers = _TABLE[(halves & 7).long()] * (1 - 2 * (halves >> 3).float())
            exponents = read(name.replace("_blocks", "_scales")).float() - 127
            values = (numbers * exponents.exp2().unsqueeze(-1)).bfloat16().flatten(-2)
            yield name.removesuffix("_blocks"), values.mT.contiguous()


def compare(folder: Path, checkpoint: Path) -> tuple[int, int]:
    """Return the number of quantized tensors, and how many of them are bitwise equal in the checkpoint."""
    reader, count, equal = CheckpointReader(checkpoint), 0, 0
    for name, tensor in wanted(folder):
        count += 1
        values = tensor.float()
        if "experts.gate_up_proj" in name:
            # In files gate and up alternate; a checkpoint has all gates first, and rows of outputs.
            values = values.mT.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        elif "experts.down_proj" in name:
            values = values.mT
        equal += torch.equal(reader.read(name), values)
    return count, equal


def measure(scheme: str, layers: int, width: int) -> dict[str, Any]:
    """Write a folder, import it, and compare it."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        write(place / "small", scheme, 1, 256)
        num_bytes = write(place / "hf", scheme, layers, width)
        command = [sys.executable, "-c", _IMPORT, place / "small", place / "hf", place / "ours"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=1800)
        assert done.returncode == 0, done.stderr
        seconds, risen = map(float, done.stdout.split())
        count, equal = compare(place / "hf", place / "ours")
        reader = CheckpointReader(place / "ours")
        largest = 4 * max(torch.Size(reader.shape(name)).numel() for name in reader.names())
    row = {"scheme": scheme, "bytes": num_bytes, "seconds": seconds, "risen": int(risen), "largest": largest}
    row |= {"quantized": count, "equal": equal}
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    """Print and save the rows; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse(parser, quick="folders of some MB")
    sizes = {"fp8": (15, 2048), "channel": (15, 2048), "mxfp4": (10, 2048)}
    rows, bounds = [], []
    for scheme, (layers, width) in sizes.items():
        if options.quick:
            layers, width = 1, 256
        row = measure(scheme, layers, width)
        rows.append(row)
        bounds.append(
            Bound("tensors equal to the formula", row["equal"] / row["quantized"], 1.0, scheme, at_least=True)
        )
        risen = row["risen"] / (row["largest"] + SPARE_BYTES)
        bounds.append(Bound("memory over a tensor and 200 MB", risen, 1.0, scheme))
    return conclude("quantized", {"rows": rows}, bounds, options)


if __name__ == "__main__":
    sys.exit(main())
