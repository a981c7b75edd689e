"""Every family over ranks against transformers in one process: the loss, and every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from longctx.batch import IGNORED_TARGET, Batch, PackedDocuments
from longctx.conversion import load_hf
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from tests.helpers import on_ranks
from tests.longctx.families import hf_models

FAMILIES = (
    *("llama yarn", "llama dynamic", "llama longrope", "mistral", "qwen2", "seed_oss", "qwen2_moe", "qwen3 window"),
    *("qwen3_moe", "mixtral window", "olmoe", "gemma2", "gemma3_text", "gpt2", "deepseek_v2", "deepseek_v3", "gpt_oss"),
    *("openai-gpt", "imagegpt"),
)
WAYS = (("zigzag", 1), ("balanced", 1), ("zigzag", 2), ("contiguous", 1), ("striped", 1), ("contiguous", 2))
"""Layout, and ranks that split heads; one for each family in turn, another for each number of ranks."""
ROWS, LENGTH = 2, 40
MAX_ERROR = 1e-5
"""As in one process (tests/longctx/families/test_transformers.py); of gradients beside their tensor's largest."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """Folders of models, each with what transformers finds: ``loss`` and ``gradients``, by the decoder's names."""
    import transformers

    transformers.logging.set_verbosity_error()
    made = []
    for name in FAMILIES:
        model, folder = hf_models.build(hf_models.CASES[name]), tmp_path_factory.mktemp("family") / "hf"
        hf_models.save(model, folder)
        tokens_BT = hf_models.tokens_of(load_hf(folder)[0], rows=ROWS, length=LENGTH)
        loss = model(tokens_BT, labels=tokens_BT).loss
        loss.backward()
        gradients = hf_models.gradients_by_our_names(model, folder.parent / "gradients")
        save_file(gradients | {"loss": loss.detach()}, folder.parent / "found.safetensors")
        made.append(str(folder))
    return made


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks("world_size")
def test_every_family_equals_transformers(folders: list[str]) -> None:
    world = dist.get_world_size()
    for number, folder in enumerate(folders):
        layout, ulysses = WAYS[(number + world // 2) % len(WAYS)]
        check_family(Path(folder), layout, ulysses, where=f"{FAMILIES[number]}, {layout}, ulysses {ulysses}")


def check_family(folder: Path, layout: str, ulysses: int, *, where: str) -> None:
    mesh = Mesh.build(context=dist.get_world_size(), ulysses=ulysses)
    config, tensors = load_hf(folder)
    model = build_parallel_model(config, mesh, layout=layout)
    model.network.load_state_dict(tensors)
    batch = whole_batch(hf_models.tokens_of(config, rows=ROWS, length=LENGTH))
    whole = SequenceLayout.build(layout, ROWS * LENGTH, mesh.context, batch.cu_seqlens.tolist(), ulysses)
    nll_sum = model(batch.map_tokens(lambda x: whole.split(x, mesh.context_rank, 1)))[0]
    loss = nll_sum / (batch.targets != IGNORED_TARGET).sum()
    loss.backward()
    found = {"loss": loss.detach()} | {n: p.grad for n, p in model.network.named_parameters() if p.grad is not None}
    expected = load_file(folder.parent / "found.safetensors")
    assert {n for n in expected if not n.endswith("correction_bias")} == found.keys(), where
    for name, value in found.items():
        dist.all_reduce(value)
        error = (value - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1)
        assert error <= MAX_ERROR, f"{where}: {name} is {error:.1e} off"


def whole_batch(tokens_BT: torch.Tensor) -> Batch:
    """Rows of one document each, one after the other in a single row."""
    rows, length = tokens_BT.shape
    targets = torch.cat((tokens_BT[:, 1:], torch.full_like(tokens_BT[:, :1], IGNORED_TARGET)), dim=1)
    return Batch(
        tokens=tokens_BT.reshape(1, -1),
        targets=targets.reshape(1, -1),
        positions=torch.arange(length).repeat(rows)[None],
        document_ids=torch.arange(rows).repeat_interleave(length)[None],
        documents=PackedDocuments.of_rows(rows, length),
    )
