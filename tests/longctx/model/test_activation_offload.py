"""What layers keep for backward, and in which memory: equal bits, bytes, and when they are moved.

Axes: B rows, T tokens, M model width, H query heads, D head size, k experts a token.
"""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from longctx.model import decoder as decoder_module
from longctx.model.activation_offload import HostStore, Keep, Store, on_device
from longctx.model.async_copies import AsyncCopies
from longctx.model.block import Block
from longctx.model.decoder import Decoder
from longctx.model.experts.experts import Experts
from longctx.model.training_pass import Execution
from tests.longctx.model.test_chunks import CONFIGS, train
from tests.longctx.model.test_recompute import LiveBytes
from tests.longctx.samples import dense_config, gradients, one_document, tiny_config

KEEPS: tuple[Keep, ...] = ("all", "attention", "inputs")
STORES: tuple[Store, ...] = ("device", "host")


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["dense", "experts, capacity", "experts, sandwich", "experts, post", "linear", "gated delta"]
)
def test_no_way_to_keep_changes_a_bit(name, dtype):
    wanted = train(CONFIGS[name], Execution(), dtype)
    for keep, store in itertools.product(KEEPS, STORES):
        got = train(CONFIGS[name], Execution(keep, store), dtype)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, msg=lambda text, way=(keep, store): f"{way}: {text}")


# What a layer keeps.


def kept_by_a_layer(keep: Keep, **changes) -> int:
    """Bytes that a layer of experts keeps of 64 tokens, in bfloat16."""
    found, batch = [], one_document(1, 64)
    for num_layers in (1, 3):
        decoder = Decoder(tiny_config(num_layers=num_layers, **changes), execution=Execution(keep)).bfloat16()
        with LiveBytes() as live:
            hidden = decoder(batch.tokens, batch.positions, batch.cu_seqlens)
            found.append(live.total())
        del hidden
    one, three = found
    return (three - one) // 2


T, M, H, D, K = 64, 32, 4, 8, 2
INPUT, ATTENTION, IDS = 2 * T * M, 2 * T * H * D + 8 * T * H, 8 * T * K
"""bfloat16, but for log-sum-exps in float64 and ids in int64."""


@pytest.mark.slow
def test_nothing_is_kept_of_experts_whose_output_no_backward_reads():
    """The residual sum does not read what is added to it; their float32 sums would be twice the layer's input."""
    assert kept_by_a_layer("attention") == INPUT + ATTENTION + IDS
    assert kept_by_a_layer("inputs") == INPUT + IDS


@pytest.mark.slow
def test_where_a_norm_reads_the_output_it_is_kept_in_the_dtype_that_the_norm_reads():
    # The second norm of a sandwich reads the sum with the shared expert, rounded.
    assert kept_by_a_layer("attention", norm_order="sandwich") == INPUT + ATTENTION + IDS + 2 * T * M
    assert kept_by_a_layer("inputs", norm_order="sandwich") == INPUT + IDS


def test_a_result_that_nobody_should_read_is_not_a_number(monkeypatch):
    """Zeros in its place would make wrong gradients in silence."""
    seen = []
    forward = Experts.forward

    def watched(self, *args, **options):
        out = forward(self, *args, **options)
        seen.append(out.detach().clone())
        return out

    monkeypatch.setattr(Experts, "forward", watched)
    train(tiny_config(num_layers=1), Execution("attention"), torch.float32)
    first, second = seen
    assert first.isfinite().all()
    assert second.isnan().all()


@pytest.mark.slow
def test_inputs_alone_compute_attention_twice():
    ran = []
    for keep in KEEPS:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(CONFIGS["dense"], Execution(keep), torch.float32)
        ran.append({event.key: event.count for event in profile.key_averages()}["longctx::attention_forward"])
    assert ran == [3, 3, 6]


# Where it is.


def test_what_comes_back_is_what_was_put_with_its_strides():
    whole = torch.arange(24.0).view(4, 6)
    store = HostStore(AsyncCopies(whole.device), 2, least_bytes=4)
    views = [whole, whole[1:3].T, whole[0].expand(3, 6), whole.view(torch.int32)]
    with store.layer(0):
        put = [store.put(x) for x in views]
        wanted = [x.clone() for x in views]
        whole.add_(1)  # written to between two saves: what was put before has not changed
        later = store.put(whole)
    with store.layer(1):
        last = store.put(whole)
    for x, want, view in zip(put, wanted, views, strict=True):
        got = on_device(x)
        assert torch.equal(got, want)
        assert (got.stride(), got.dtype) == (view.stride(), view.dtype)
        assert got.data_ptr() != view.data_ptr()
    assert torch.equal(on_device(later), wanted[0] + 1)
    assert on_device(last) is whole, "backward wants the last layer's at once"
    assert store.put(whole) is whole, "between layers"


LINES: list[str] = []
LEFT: list[StorageWeakRef] = []


class Journal(AsyncCopies):
    """The real copies, with a line for each."""

    def to_host(self, pairs, *after):
        LINES.append(f"to host {sum(source.nbytes for _, source in pairs)}")
        LEFT.extend(StorageWeakRef(source.untyped_storage()) for _, source in pairs)
        return super().to_host(pairs, *after)

    def to_device(self, pairs, *after):
        LINES.append(f"to device {sum(source.nbytes for _, source in pairs)}")
        return super().to_device(pairs, *after)


@pytest.fixture
def journal(monkeypatch) -> list[str]:
    """Copies, and layers as forward and backward come to them."""
    LINES.clear()
    LEFT.clear()
    run = Block._run

    def watched(self, x, table, call, recompute_cache):
        again = recompute_cache is not None and recompute_cache.recomputing
        LINES.append(f"layer {call.layer}{' again' if again else ''}")
        return run(self, x, table, call, recompute_cache)

    monkeypatch.setattr(decoder_module, "AsyncCopies", Journal)
    monkeypatch.setattr(Block, "_run", watched)
    return LINES


def test_copies_come_back_one_layer_before_their_need(journal):
    decoder, batch = Decoder(dense_config(num_layers=4), execution=Execution("inputs", "host")), one_document(1, 64)
    hidden = decoder(batch.tokens, batch.positions)
    size = 4 * T * M
    out, back = f"to host {size}", f"to device {size}"
    # An input is saved before its layer runs; the last layer's stays.
    assert journal == [out, "layer 0", out, "layer 1", out, "layer 2", "layer 3"]
    assert all(reference.expired() for reference in LEFT), "copied, and still on the device"
    journal.clear()
    hidden.sum().backward()
    again = [f"layer {n} again" for n in (3, 2, 1, 0)]
    assert journal == [back, again[0], back, again[1], back, again[2], again[3]]


def test_every_storage_that_a_layer_keeps_is_moved_once_and_shared_ones_are_not(journal):
    """By the bytes that are alive without a store: what two layers more keep, but for the angles of all."""
    batch, alive = one_document(1, 64), []
    for num_layers in (1, 3):
        decoder = Decoder(dense_config(num_layers=num_layers))
        with LiveBytes() as live:
            hidden = decoder(batch.tokens, batch.positions)
            alive.append(live.total())
        del hidden
    decoder = Decoder(dense_config(num_layers=2), execution=Execution("all", "host"))
    loss = decoder(batch.tokens, batch.positions).square().mean()
    moved = [int(line.split()[-1]) for line in journal if line.startswith("to host")]
    assert sum(moved) == (alive[1] - alive[0]) // 2
    loss.backward()
    assert sorted(int(line.split()[-1]) for line in journal if line.startswith("to device")) == sorted(moved)


@pytest.mark.parametrize("keep", ["all", "inputs"])
def test_a_graph_that_is_kept_can_be_differentiated_twice(keep):
    grads = []
    decoder, batch = Decoder(dense_config(num_layers=3), execution=Execution(keep, "host")), one_document(1, 16)
    loss = decoder(batch.tokens, batch.positions).square().mean()
    for retain in (True, False):
        decoder.zero_grad()
        loss.backward(retain_graph=retain)
        grads.append(gradients(decoder))
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("keep", KEEPS)
def test_neither_a_finished_nor_an_abandoned_graph_holds_memory(keep):
    decoder, batch = Decoder(tiny_config(num_layers=3), execution=Execution(keep, "host")), one_document(1, 64)
    for finish in (True, False):
        with LiveBytes() as live:
            loss = decoder(batch.tokens, batch.positions).square().mean()
            if finish:
                loss.backward()
                decoder.zero_grad()
            else:
                del loss
            assert live.total() < 4 * T * M


def test_evaluation_keeps_and_moves_nothing(journal):
    decoder, batch = Decoder(dense_config(), execution=Execution("all", "host")), one_document(1, 16)
    with torch.no_grad():
        decoder(batch.tokens, batch.positions)
    assert not [line for line in journal if line.startswith("to")]


@pytest.mark.gpu
@pytest.mark.parametrize(("store", "chunk_tokens"), [("host", 0), ("host", 1000), ("disk", 1000)])
@pytest.mark.parametrize("keep", KEEPS)
def test_a_gpu_keeps_in_pinned_memory_what_it_gives_back(keep, store, chunk_tokens, tmp_path):
    """Equal bits on streams of their own, and less on the device between forward and backward."""
    batch, results, held = one_document(2, 4096).to("cuda"), [], []
    for place in ("device", store):
        execution = Execution(keep, place, chunk_tokens=chunk_tokens, head_groups=2, store_path=str(tmp_path))
        if not chunk_tokens:
            execution = Execution(keep, place)
        decoder = Decoder(dense_config(num_layers=6, hidden_size=256), execution=execution).to("cuda")
        decoder.bfloat16()
        for _ in range(2):  # the second time memory comes from caches
            decoder.zero_grad()
            loss = decoder(batch.tokens, batch.positions, batch.cu_seqlens).square().mean()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss.backward()
        torch.cuda.synchronize()
        held.append(before)
        results.append((loss, *gradients(decoder).values()))
        del decoder
        gc.collect()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert held[1] < held[0]
