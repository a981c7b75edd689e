"""A prompt of a million tokens: the right answer read at once says what greedy decoding writes, on one process and two.

Windows and linear layers, whose work grows as the prompt: a full layer at this length takes a cluster.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from launcher.evaluation.answer import forced
from longctx.config import ModelConfig
from longctx.generation.loop import generate
from longctx.model.decoder import Decoder
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from tests.helpers import run_distributed

TOKENS = 1 << 20
CHUNK_TOKENS = 8192
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_layers=2,
    num_heads=2,
    head_dim=8,
    ffn_size=24,
    layers=("window", "linear"),
    window=32,
    init_std=0.4,
    max_positions=2 * TOKENS,
)


def prompt() -> list[int]:
    return torch.randint(61, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_reading_the_answer_is_the_same_event_as_writing_it():
    # Threads would wait for one another at each of thousands of small products.
    torch.set_num_threads(1)
    decoder, ids = Decoder(CONFIG), prompt()
    greedy = generate(decoder, ids, 5, chunk_tokens=CHUNK_TOKENS)
    assert forced(decoder, ids, greedy[:4], CHUNK_TOKENS) == greedy
    run_distributed(check_two_ranks, 2, greedy, timeout=300.0)


def check_two_ranks(greedy: list[int]) -> None:
    mesh = Mesh.build(context=dist.get_world_size())
    decoder = build_parallel_model(CONFIG, mesh, layout="zigzag").network
    assert forced(decoder, prompt(), greedy[:4], CHUNK_TOKENS) == greedy
