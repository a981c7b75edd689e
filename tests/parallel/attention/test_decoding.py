"""Prompts read and continued by several ranks: likelihoods and tokens of one process, and what each rank stores."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longctx.errors import ClusterError, ConfigError
from longctx.generation.beams import Beams
from longctx.generation.continuous_batching import generate_batch
from longctx.generation.loop import generate
from longctx.generation.prefill import prefill, read_each, sequence_nll
from longctx.generation.sampling import Sampling
from longctx.generation.scoring import score_after_context
from longctx.model.attention.kv_cache import KVCache
from longctx.model.attention.local import LocalAttention
from longctx.model.decoder import Decoder
from parallel.attention.sharded_kv_cache import ShardedKVCache
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from tests.helpers import on_ranks, run_distributed
from tests.longctx.cached_models import MODELS, config_of, ids_of, whole_nll, without_cache

LENGTHS = (1, 2, 3, 5, 8, 13, 31)
"""One, primes, fewer than ranks, multiples of what layouts divide."""
NEW_TOKENS, CHUNK_TOKENS = 5, 12


def parallel_decoder(name: str, *, layout: str = "zigzag", ulysses: int = 1, kernel: str = "blockwise") -> Decoder:
    """The model over all ranks, its experts as well."""
    config, world = config_of(name), dist.get_world_size()
    expert = 1
    if config.num_experts:
        expert = world
    mesh = Mesh.build(context=world, ulysses=ulysses, expert=expert)
    return build_parallel_model(config, mesh, layout=layout, kernel=kernel).network


def is_served(name: str, layout: str, ulysses: int) -> bool:
    if layout == "striped" and {"linear", "gated_delta", "kda", "mamba2"} & set(config_of(name).layers):
        return False
    return dist.get_world_size() % ulysses == 0


# --- every kind of attention ----------------------------------------------------------------------------------------


def test_every_kind_equals_one_process():
    """One length for each kind, so that every length and every kind has its turn."""
    run_distributed(check_kinds, 2, [("zigzag", 1)], 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_kind_equals_one_process_in_every_layout(world_size):
    ways = list(itertools.product(("contiguous", "zigzag", "striped", "balanced"), (1, 2)))
    run_distributed(check_kinds, world_size, ways, 3, timeout=850.0)


def check_kinds(ways: list[tuple[str, int]], how_many: int):
    """So many lengths for each kind of attention, in each of these layouts and Ulysses degrees."""
    for number, name in enumerate(MODELS):
        local = Decoder(config_of(name), {"softmax": LocalAttention("blockwise")}).double()
        lengths = [LENGTHS[(number + 3 * n) % len(LENGTHS)] for n in range(how_many)]
        found = [one_process(local, ids_of(length), name) for length in lengths]
        for layout, ulysses in ways:
            if is_served(name, layout, ulysses):
                decoder = parallel_decoder(name, layout=layout, ulysses=ulysses).double()
                for length, wanted in zip(lengths, found, strict=True):
                    compare(decoder, ids_of(length), wanted, f"{name}, {layout}, ulysses {ulysses}, {length} tokens")


def one_process(decoder: Decoder, ids: list[int], name: str) -> tuple[list[int], Tensor]:
    """The tokens of one process, and the likelihoods of all by a single pass."""
    # Where keys depend on the length that is known when they are read, reading all again is another computation.
    continue_alone = without_cache if name == "dynamic" else generate
    tokens = continue_alone(decoder, ids, NEW_TOKENS)
    return tokens, whole_nll(decoder, ids + tokens)


def compare(
    decoder: Decoder, ids: list[int], wanted: tuple[list[int], Tensor], where: str, bound: float = 1e-5
) -> None:
    tokens, nll = wanted
    assert generate(decoder, ids, NEW_TOKENS, chunk_tokens=CHUNK_TOKENS) == tokens, where
    error = (sequence_nll(decoder, ids + tokens, chunk_tokens=CHUNK_TOKENS) - nll).abs().max().item()
    assert error <= bound, f"{where}: {error:.1e} > {bound:.1e}"


# --- several sequences, and beams -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2, 4])
def test_several_sequences_of_every_kind_equal_one_process(world_size):
    run_distributed(check_sequences, world_size, list(MODELS), timeout=250.0)


def check_sequences(names: list[str]):
    """Prompts of other lengths under way together, the beams of one, scores behind it: each rank has one process's.

    Sequences end at different times, so that one leaves and the next is read while another is under way.
    """
    prompts = [ids_of(length) for length in (13, 1, 6, 29, 2)]
    for name in names:
        local = Decoder(config_of(name), {"softmax": LocalAttention("blockwise")}).double()
        decoder = parallel_decoder(name).double()
        whole = [generate(local, prompt, NEW_TOKENS) for prompt in prompts]
        stops = {whole[0][1], whole[2][3]}
        wanted = {n: generate(local, prompt, NEW_TOKENS, stop_ids=stops) for n, prompt in enumerate(prompts)}
        assert len({len(ids) for ids in wanted.values()}) > 1, f"{name}: all end at once"
        options = {"stop_ids": stops, "max_sequences": 2}
        found = list(generate_batch(decoder, prompts, NEW_TOKENS, chunk_tokens=CHUNK_TOKENS, **options))
        assert found == list(generate_batch(local, prompts, NEW_TOKENS, **options)), f"{name}: another order"
        assert dict(found) == wanted, name
        ends = [ids_of(length) for length in (1, 2, 17)]
        scores = score_after_context(decoder, prompts[0], ends, chunk_tokens=CHUNK_TOKENS)
        for score, right in zip(scores, score_after_context(local, prompts[0], ends), strict=True):
            assert score.is_greedy == right.is_greedy, name
            assert abs(score.log_likelihood - right.log_likelihood) <= 1e-4, name
        wanted = generate(local, prompts[0], NEW_TOKENS, Beams(num_beams=2))
        assert generate(decoder, prompts[0], NEW_TOKENS, Beams(num_beams=2), chunk_tokens=CHUNK_TOKENS) == wanted, name


@on_ranks(2)
def test_one_gather_a_layer_for_all_sequences():
    """Messages of a step do not grow with the sequences; a step in which another prompt is read has its own."""
    decoder, counts = parallel_decoder("grouped"), []
    for count in (1, 2, 4):
        caches = [decoder.new_cache() for _ in range(count)]
        for number, cache in enumerate(caches):
            prefill(decoder, ids_of(5 + 3 * number), cache)
        with patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as gathered:
            read_each(decoder, [[7]] * count, caches)
        counts.append(gathered.call_count)
    assert counts == [2, 2, 2], "two layers"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks("world_size")
def test_text_that_comes_in_turns():
    """Chunks after generated tokens: a rank's keys are then runs of chunks and dealt tokens in turn."""
    for name, layout in (("all kinds", "zigzag"), ("sparse, prime stride", "striped"), ("t5", "contiguous")):
        ids = ids_of(121)
        local = Decoder(config_of(name), {"softmax": LocalAttention("blockwise")}).double()
        with torch.no_grad():
            wanted = local(torch.tensor([ids]), torch.arange(len(ids))[None])[:, -1]
        decoder = parallel_decoder(name, layout=layout).double()
        cache = decoder.new_cache()
        prefill(decoder, ids[:13], cache, 8)
        for id in ids[13:28]:
            prefill(decoder, [id], cache)
        found = prefill(decoder, ids[28:], cache, 64)[:, -1]
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks("world_size")
def test_float32_and_the_fast_kernel():
    for name in ("grouped", "window", "latent", "experts"):
        local, decoder = Decoder(config_of(name)), parallel_decoder(name, kernel="auto")
        tokens, nll = one_process(local, ids_of(61), name)
        exact = whole_nll(local.double(), ids_of(61) + tokens)
        # Sums in another order round as much as one process does, and the merges of blocks once more.
        rounding = (nll - exact).abs().max().item()
        compare(decoder, ids_of(61), (tokens, exact), name, bound=3 * rounding)


# --- what ranks store, send and choose ------------------------------------------------------------------------------


@on_ranks(3)
def test_ranks_store_equally_many_keys():
    decoder = parallel_decoder("window")
    cache = decoder.new_cache()
    assert isinstance(cache, ShardedKVCache)
    for ids in (ids_of(50), *([n] for n in range(12)), ids_of(23)):
        prefill(decoder, ids, cache, 18)
        rows = torch.tensor([cache.layer(number).num_rows for number in range(2)])
        every = [torch.empty_like(rows) for _ in range(3)]
        dist.all_gather(every, rows)
        window, full = torch.stack(every).T
        assert full.sum() == cache.num_tokens
        assert full.max() - full.min() <= 1
        assert window.sum() <= 4 + 18


@on_ranks(2)
def test_sampling_is_done_once():
    """Ranks with other seeds, and so other draws, follow the first one."""
    decoder, rank = parallel_decoder("grouped"), dist.get_rank()
    wanted = generate(Decoder(config_of("grouped")), ids_of(9), 12, Sampling(seed=0))
    assert generate(decoder, ids_of(9), 12, Sampling(seed=rank)) == wanted
    with patch.object(Sampling, "probabilities", side_effect=AssertionError("drawn twice")) as drawn:
        if rank == 0:
            drawn.side_effect = lambda logits_V: logits_V.softmax(0)
        generate(decoder, ids_of(9), 3, Sampling(seed=5))
    assert drawn.call_count == 3 * (rank == 0)


@on_ranks(2)
def test_a_generated_token_goes_to_its_experts_once():
    """No token is sent: each rank has it, and computes the part of its own experts."""
    decoder = parallel_decoder("experts")
    cache = decoder.new_cache()
    with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent:
        prefill(decoder, ids_of(13), cache)
        assert sent.called
        sent.reset_mock()
        prefill(decoder, [3], cache)
        assert not sent.called


@on_ranks(2)
def test_what_is_sent_does_not_grow_with_the_cache():
    decoder = parallel_decoder("grouped")
    cache = decoder.new_cache()
    prefill(decoder, ids_of(13), cache, 12)
    short = bytes_sent(lambda: prefill(decoder, ids_of(13), cache, 12))
    prefill(decoder, ids_of(600), cache, 100)
    assert bytes_sent(lambda: prefill(decoder, ids_of(13), cache, 12)) == short


def bytes_sent(action) -> int:
    """Bytes of all point-to-point messages that this rank sends."""
    found, send = [0], dist.P2POp

    def counted(op, tensor, *args, **kwargs):
        found[0] += tensor.nbytes * (op is dist.isend)
        return send(op, tensor, *args, **kwargs)

    with patch.object(dist, "P2POp", counted):
        action()
    assert found[0] > 0
    return found[0]


# --- refusals -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_refusals():
    decoder = parallel_decoder("all kinds")
    with pytest.raises(ConfigError, match=r"Use Decoder.new_cache\(\)"):
        prefill(decoder, ids_of(5), KVCache())
    with pytest.raises(ConfigError, match="no backward"):
        decoder(torch.tensor([[1, 2]]), torch.arange(2)[None], cache=decoder.new_cache())
    cache = decoder.new_cache()
    tokens = torch.tensor([[1] * (2 + dist.get_rank())])
    with pytest.raises(ClusterError, match="different attention calls"), torch.no_grad():
        decoder(tokens, torch.arange(tokens.shape[1])[None], cache=cache)
