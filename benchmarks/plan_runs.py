"""Small training runs on a CPU for comparison with plans: their configs and their data."""

from __future__ import annotations

import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher.config.config_sections import RunConfig
from launcher.config.load_config import load_run_config
from launcher.plan.estimate import RunEstimate, estimate_run
from launcher.plan.hardware import Hardware
from launcher.plan.planned_world import World

_VOCABULARY = 512
_TOKENS_OF_DATA = 1 << 18
_COMMON = {
    "run.hostfile": "none",
    "run.device": "cpu",
    "model.preset": "none",
    "data.verify": "off",
    "train.steps": 100_000,
    "train.lr": 1e-4,
    "parallel.layout": "auto",
    "checkpoint.every_steps": 0,
    "validation.rows": 0,
}


@dataclass(frozen=True)
class Case:
    """A training run."""

    name: str
    ranks: int
    width: int
    row_tokens: int
    document_tokens: int
    settings: dict[str, Any]
    """Config keys in addition to those that follow from the fields above."""
    layers: int = 4
    vocabulary: int = 8192
    experts: bool = False
    rows: int = 1
    """Rows per step."""
    held_out: bool = False
    """True if it was first planned after the arithmetic was fixed."""

    @property
    def keys(self) -> dict[str, Any]:
        """All config keys except folders."""
        heads = self.width // 64
        model = {
            "hidden_size": self.width,
            "num_layers": self.layers,
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": 64,
            "ffn_size": self.width * 11 // 4,
            "vocab_size": self.vocabulary,
        }
        if self.experts:
            model |= {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": self.width, "shared_ffn_size": 0}
        keys = {f"model.{name}": value for name, value in model.items()}
        keys |= {"data.seq_len": self.row_tokens, "train.tokens_per_step": self.rows * self.row_tokens}
        return _COMMON | {"parallel.context": 1} | keys | self.settings


def settings_of(dtype: str, stage: int, keep: str = "all", **more: Any) -> dict[str, Any]:
    """Return config keys; ``extra_tables`` has two underscores for the dot in a name."""
    settings = {"train.dtype": dtype, "zero.stage": stage, "train.keep": keep}
    return settings | {name.replace("__", "."): value for name, value in more.items()}


def write_shards(folder: Path, length: int, tokens: int = _TOKENS_OF_DATA) -> Path:
    """Write a shard folder of documents with one length, with this many random tokens in total."""
    from data_pipeline.prepare.sources import open_source
    from data_pipeline.prepare.train_tokenizer import train_tokenizer
    from data_pipeline.shards.shard_writer import EncodedDocument, ShardWriter
    from longctx.tokenizer import load_tokenizer

    model = folder / "tokenizer.model"
    if not model.exists():
        corpus = folder / "corpus"
        corpus.mkdir()
        files = [p for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if 2000 < p.stat().st_size < 9000]
        for path in files[:30]:
            shutil.copyfile(path, corpus / path.name)
        train_tokenizer(open_source(corpus), model, vocab_size=_VOCABULARY)
    output, tokenizer = folder / f"documents_{length}", load_tokenizer(model)
    if output.exists():
        return output
    output.mkdir()
    writer, random = ShardWriter(output, vocab_size=tokenizer.vocab_size), np.random.default_rng(length)
    for number in range(tokens // length):
        of_document = random.integers(3, _VOCABULARY - 8, length).astype(np.uint16)
        writer.add(EncodedDocument(tokens=of_document, hash=number, name=f"{number}", text_bytes=length))
    tokenizer.save(output)
    writer.finish(split="training", tokenizer=tokenizer, sources=[], options={}, skipped={})
    return output


def config_of(case: Case, data: str = "", output: str = "") -> RunConfig:
    """Return its config."""
    keys = case.keys | {"data.train": data or "nothing", "run.output_dir": output or "nowhere"}
    return load_run_config([word for key, value in keys.items() for word in (f"--{key}", str(value))])


def planned(case: Case, hardware: Hardware) -> RunEstimate:
    """Return the plan's estimate."""
    world = World(ranks=case.ranks, ranks_per_node=case.ranks)
    return estimate_run(config_of(case), world, hardware, document_tokens=case.document_tokens)
