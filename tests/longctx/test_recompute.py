"""Recomputed layers: the same bits, attention's work once, and what is kept until backward.

Axes: B rows, T tokens, M model width, H query heads, D head size.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longctx.errors import ConfigError
from longctx.kernels.contract import Scores
from longctx.kernels.cpu_flash import CpuFlashKernel
from longctx.kernels.select import KERNELS
from longctx.model.cores import AttentionMask, LocalAttention, LocalKVCache
from longctx.model.decoder import Decoder
from longctx.model.stash import Stash, recomputed
from longctx.objectives.causal_lm import CausalLM, LossSum

from .samples import dense_config, gradients, one_document, packed_batch, randomize, tiny_config


class CountingKernel(CpuFlashKernel):
    """The real kernel, with a count of its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = {"forward": 0, "backward": 0}

    def forward(self, *args, **kwargs):
        self.runs["forward"] += 1
        return super().forward(*args, **kwargs)

    def backward(self, *args, **kwargs):
        self.runs["backward"] += 1
        return super().backward(*args, **kwargs)


@pytest.fixture
def kernel(monkeypatch) -> CountingKernel:
    counting = CountingKernel()
    monkeypatch.setitem(KERNELS, "cpu_flash", counting)
    return counting


class SinksEverywhere(LocalAttention):
    """A core with all that a model family may hand it: a window, sink tokens, learnable sinks."""

    sinks_H = torch.nn.Parameter(torch.tensor([0.3, -0.2, 1.0, 0.0]))

    def __call__(self, q_BtHD, k_BtKD, v_BtKV, *, mask, layer, cache=None, scores=None, sinks_H=None, stash=None):
        mask = AttentionMask(mask.cu_seqlens, window=6, sink_tokens=2)
        scores = Scores(scale=0.3)
        return super().__call__(
            q_BtHD, k_BtKD, v_BtKV, mask=mask, layer=layer, scores=scores, sinks_H=self.sinks_H, stash=stash
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("core", [LocalAttention("cpu_flash"), SinksEverywhere("blockwise")], ids=["plain", "sinks"])
@pytest.mark.parametrize("config", [tiny_config(), dense_config()], ids=["moe", "dense"])
def test_recomputation_changes_no_bit_and_runs_the_kernel_once(config, core, dtype, kernel):
    batch, results = packed_batch([[9, 14], [20, 3]], padding=1), {}
    for recompute in (False, True):
        model = CausalLM(Decoder(config, core)).to(dtype)
        model.decoder.recompute = recompute
        core_calls = kernel.runs["forward"]
        loss = LossSum(*model(batch))
        loss.total(0.1).backward()
        results[recompute] = (*loss, *gradients(model).values())
        if core.kernel == "cpu_flash":
            assert kernel.runs["forward"] - core_calls == config.num_layers
    torch.testing.assert_close(results[True], results[False], rtol=0, atol=0)
    assert kernel.runs["backward"] == kernel.runs["forward"]


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made inside and are still held by someone."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}  # by address, which a weak reference keeps taken

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def total(self) -> int:
        gc.collect()
        return sum(size for storage, size in self._made.values() if not storage.expired())


def _storages(values) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def kept_bytes(num_layers: int, *, recompute: bool) -> tuple[int, int]:
    """Bytes alive after forward, and after backward while its graph is still held, gradients aside."""
    decoder, batch = Decoder(dense_config(num_layers=num_layers)), one_document(1, 64)
    decoder.recompute = recompute
    with LiveBytes() as live:
        loss = decoder(batch.tokens, batch.positions, batch.cu_seqlens).square().mean()
        after_forward = live.total()
        loss.backward()
        after = live.total() - sum(g.nbytes for g in gradients(decoder).values())
    return after_forward, after


def test_a_recomputed_layer_keeps_its_input_and_attentions_result():
    T, M, H, D = 64, 32, 4, 8
    (one, _), (three, after) = (kept_bytes(n, recompute=True) for n in (1, 3))
    x, out, lse = 4 * T * M, 4 * T * H * D, 8 * T * H  # float32; log-sum-exps are float64
    assert three - one == 2 * (x + out + lse)
    assert after < x, "a graph that was differentiated holds nothing of its layers"
    assert kept_bytes(3, recompute=False)[0] - kept_bytes(1, recompute=False)[0] > 3 * (three - one)


def test_without_gradients_nothing_is_kept(kernel, monkeypatch):
    monkeypatch.setattr(Stash, "keep", lambda *_: pytest.fail("kept for a backward that cannot come"))
    decoder, batch = Decoder(dense_config()), one_document(1, 16)
    decoder.recompute = True
    with torch.no_grad():
        decoder(batch.tokens, batch.positions)
    cache = LocalKVCache()  # a cache grows with every run: it cannot be part of a recomputed layer
    decoder(batch.tokens, batch.positions, cache=cache).sum().backward()
    assert cache.append(0, torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8))[0].shape[1] == 17


def test_a_second_backward_is_refused():
    decoder, batch = Decoder(dense_config()), one_document(1, 16)
    decoder.recompute = True
    loss = decoder(batch.tokens, batch.positions).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="recompute=False"):
        loss.backward()


def test_an_abandoned_graph_frees_the_stash(monkeypatch):
    made = []
    keep = Stash.keep
    monkeypatch.setattr(Stash, "keep", lambda self, *x: (made.append(weakref.ref(self)), keep(self, *x)))
    decoder, batch = Decoder(dense_config()), one_document(1, 16)
    decoder.recompute = True
    hidden = decoder(batch.tokens, batch.positions)
    assert [stash() is not None for stash in made] == [True, True]
    del hidden
    gc.collect()
    assert [stash() for stash in made] == [None, None]


def test_a_run_that_fails_leaves_no_stash_replaying():
    stashes, weight = [], torch.ones(3, requires_grad=True)

    def layer(x, stash):
        stashes.append(stash)
        known = stash.recall()
        if known is not None:
            raise RuntimeError("a device failed")
        stash.keep(x.detach() * 2)
        return (x * weight).exp()

    out = recomputed(layer, torch.ones(3))
    with pytest.raises(RuntimeError, match="a device failed"):
        out.sum().backward()
    assert [stash.replaying for stash in stashes] == [False, False]


def test_what_is_kept_has_no_history():
    stash, x = Stash(), torch.ones(2, requires_grad=True)
    assert stash.recall() is None
    stash.keep(x * 2)
    with stash.contexts()[1]:
        known = stash.recall()
    assert known is not None
    assert not known[0].requires_grad


def test_recomputed_weights_get_the_same_gradient_from_a_part_of_the_graph():
    """A backward for some of the inputs alone still finds attention's result."""
    decoder, batch = Decoder(dense_config()), one_document(1, 16)
    randomize(decoder)
    grads = []
    for recompute in (False, True):
        decoder.recompute = recompute
        loss = decoder(batch.tokens, batch.positions).square().mean()
        grads.append(torch.autograd.grad(loss, decoder.model.layers[1].self_attn.k_proj.weight)[0])
    assert torch.equal(*grads)
