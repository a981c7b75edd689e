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
from longctx.kernels.attention.cpu_flash import CpuFlashKernel
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.attention.kernel_selection import KERNELS
from longctx.kernels.processor import MATMUL_MODES
from longctx.model.activation_offload import Keep
from longctx.model.attention.kv_cache import KVCache
from longctx.model.attention.local import LocalAttention
from longctx.model.attention.mask import AttentionMask
from longctx.model.decoder import Decoder
from longctx.model.experts.dispatch import TokenDispatcher
from longctx.model.experts.experts import Experts
from longctx.model.experts.moe_layer import MixtureOfExperts
from longctx.model.recompute import RecomputeCache, recomputed
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.samples import dense_config, gradients, one_document, packed_batch, randomize, step_loss, tiny_config
from tests.rounding import both_ways

RECOMPUTE = Execution("attention")


class CountingKernel(CpuFlashKernel):
    """The real kernel, with a count of its runs."""

    def __init__(self, compute: str, runs: dict[str, int]) -> None:
        super().__init__(compute)
        self.runs = runs

    def forward(self, *args, **kwargs):
        self.runs["forward"] += 1
        return super().forward(*args, **kwargs)

    def backward(self, *args, **kwargs):
        self.runs["backward"] += 1
        return super().backward(*args, **kwargs)


@pytest.fixture
def kernel(monkeypatch) -> CountingKernel:
    """Counts the runs of the CPU kernel, in whatever way it multiplies."""
    runs = {"forward": 0, "backward": 0}
    for products in MATMUL_MODES:
        monkeypatch.setitem(KERNELS, f"cpu_flash_{products}", CountingKernel(products, runs))
    counting = CountingKernel("auto", runs)
    monkeypatch.setitem(KERNELS, "cpu_flash", counting)
    return counting


class SinksEverywhere(LocalAttention):
    """A core with all that a model family may hand it: a window, sink tokens, learnable sinks."""

    sinks_H = torch.nn.Parameter(torch.tensor([0.3, -0.2, 1.0, 0.0]))

    def plan(self, mask, shapes, placement=None):
        return super().plan(AttentionMask(mask.documents, window=6, sink_tokens=2), shapes)

    def __call__(self, q_BtHD, k_BtKD, v_BtKV, *, plan, recompute_cache=None, **_):
        return super().__call__(
            q_BtHD,
            k_BtKD,
            v_BtKV,
            plan=plan,
            scores=ScoreRules(scale=0.3),
            weights=(self.sinks_H,),
            recompute_cache=recompute_cache,
        )


CORES = {"plain": (LocalAttention, "cpu_flash"), "sinks": (SinksEverywhere, "blockwise")}


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("config", [tiny_config(), dense_config()], ids=["moe", "dense"])
def test_recomputation_changes_no_bit_and_runs_the_kernel_once(config, core, dtype, products, kernel):
    """The second run forms the same products of the same tensors, so that it rounds them alike."""
    batch, results = packed_batch([[9, 14], [20, 3]], padding=1), {}
    kind, name = CORES[core]
    core = kind(name, matmul_mode=products)
    for keep in ("all", "attention"):
        model = CausalLM(
            Decoder(config, core and {"softmax": core}, execution=Execution(keep, matmul_mode=products))
        ).to(dtype)
        core_calls = kernel.runs["forward"]
        loss = model.loss_sum(model(batch))
        step_loss(loss, 0.1).backward()
        results[keep] = (*loss.tensors(), *gradients(model).values())
        if core.kernel == "cpu_flash":
            assert kernel.runs["forward"] - core_calls == config.num_layers
    torch.testing.assert_close(results["attention"], results["all"], rtol=0, atol=0)
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


def kept_bytes(num_layers: int, *, keep: Keep) -> tuple[int, int]:
    """Bytes alive after forward, and after backward while its graph is still held, gradients aside."""
    decoder = Decoder(dense_config(num_layers=num_layers), execution=Execution(keep))
    batch = one_document(1, 64)
    with LiveBytes() as live:
        loss = decoder(batch.tokens, batch.positions, batch.cu_seqlens).square().mean()
        after_forward = live.total()
        loss.backward()
        after = live.total() - sum(g.nbytes for g in gradients(decoder).values())
    return after_forward, after


@pytest.mark.slow
def test_a_recomputed_layer_keeps_its_input_and_attentions_result():
    T, M, H, D = 64, 32, 4, 8
    (one, _), (three, after) = (kept_bytes(n, keep="attention") for n in (1, 3))
    x, out, lse = 4 * T * M, 4 * T * H * D, 8 * T * H  # float32; log-sum-exps are float64
    assert three - one == 2 * (x + out + lse)
    assert after < x, "a graph that was differentiated holds nothing of its layers"
    assert kept_bytes(3, keep="all")[0] - kept_bytes(1, keep="all")[0] > 3 * (three - one)


def test_without_gradients_nothing_is_kept(kernel, monkeypatch):
    monkeypatch.setattr(RecomputeCache, "save", lambda *_: pytest.fail("kept for a backward that cannot come"))
    decoder, batch = Decoder(dense_config(), execution=RECOMPUTE), one_document(1, 16)
    with torch.no_grad():
        decoder(batch.tokens, batch.positions)
    cache = KVCache()  # a cache grows with every run: it cannot be part of a recomputed layer
    decoder(batch.tokens, batch.positions, cache=cache).sum().backward()
    assert cache.num_tokens == 16


@pytest.mark.parametrize("store", ["device", "host"])
def test_a_second_backward_is_refused(store):
    decoder, batch = Decoder(dense_config(), execution=Execution("attention", store)), one_document(1, 16)
    loss = decoder(batch.tokens, batch.positions).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="keep='all'"):
        loss.backward()


def test_an_abandoned_graph_frees_the_recompute_cache(monkeypatch):
    made = []
    save = RecomputeCache.save
    monkeypatch.setattr(RecomputeCache, "save", lambda self, *x: (made.append(weakref.ref(self)), save(self, *x)))
    decoder, batch = Decoder(dense_config(), execution=RECOMPUTE), one_document(1, 16)
    hidden = decoder(batch.tokens, batch.positions)
    assert [recompute_cache() is not None for recompute_cache in made] == [True, True]
    del hidden
    gc.collect()
    assert [recompute_cache() for recompute_cache in made] == [None, None]


def test_a_run_that_fails_leaves_no_cache_recomputing():
    caches, weight = [], torch.ones(3, requires_grad=True)

    def layer(x, recompute_cache):
        caches.append(recompute_cache)
        known = recompute_cache.load()
        if known is not None:
            raise RuntimeError("a device failed")
        recompute_cache.save(x.detach() * 2)
        return (x * weight).exp()

    out = recomputed(layer, torch.ones(3))
    with pytest.raises(RuntimeError, match="a device failed"):
        out.sum().backward()
    assert [recompute_cache.recomputing for recompute_cache in caches] == [False, False]


def test_recomputed_weights_get_the_same_gradient_from_a_part_of_the_graph():
    """A backward for some of the inputs alone still finds attention's result."""
    batch, grads = one_document(1, 16), []
    for keep in ("all", "attention"):
        decoder = Decoder(dense_config(), execution=Execution(keep))
        randomize(decoder)
        loss = decoder(batch.tokens, batch.positions).square().mean()
        grads.append(torch.autograd.grad(loss, decoder.model.layers[1].self_attn.k_proj.weight)[0])
    assert torch.equal(*grads)


# Experts


TRAINING = TrainingPass(seed=5)


def of_experts(*, keep: Keep, dispatcher=None, **changes) -> CausalLM:
    config = {"router_z_loss_weight": 0.1, "capacity_factor": 1.0, "router_jitter": 0.1, "selection_bias": True}
    execution = Execution(keep)
    lm = CausalLM(Decoder(tiny_config(**{**config, **changes}), dispatcher=dispatcher, execution=execution))
    randomize(lm, std=0.2)
    return lm


EXPERT_BATCH = packed_batch([[9, 14], [20, 3]], padding=1)


class Watched(TokenDispatcher):
    """Notes what it is asked for, and whether a layer was being recomputed."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.recomputing = False

    def plan(self, *args):
        self.asked.append(("plan", self.recomputing))
        return super().plan(*args)

    def gather(self, values_NX):
        self.asked.append(("gather", self.recomputing))
        return super().gather(values_NX)


def test_experts_are_chosen_planned_and_counted_once(monkeypatch, kernel):
    """With everything that a router may have; and the second run gives backward the same bits."""
    results = {}
    for keep in ("all", "attention"):
        dispatcher = Watched()
        lm = of_experts(keep=keep, dispatcher=dispatcher)
        forward = MixtureOfExperts.forward

        def watched(self, x, call, recompute_cache, *, forward=forward, dispatcher=dispatcher):
            dispatcher.recomputing = recompute_cache is not None and recompute_cache.recomputing
            out = forward(self, x, call, recompute_cache)
            dispatcher.recomputing = False
            return out

        monkeypatch.setattr(MixtureOfExperts, "forward", watched)
        kernel.runs["forward"] = 0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss = lm.loss_sum(lm(EXPERT_BATCH, TRAINING))
            step_loss(loss, 0.1, 0.1).backward()
        monkeypatch.setattr(MixtureOfExperts, "forward", forward)
        ran = {event.key: event.count for event in profile.key_averages()}
        assert ran["aten::topk"] == 2, "one a layer"
        assert kernel.runs["forward"] == 2
        assert dispatcher.asked.count(("gather", False)) == 2
        assert not [what for what, recomputing in dispatcher.asked if recomputing]
        results[keep] = (*loss.tensors(), *gradients(lm).values())
    torch.testing.assert_close(results["attention"], results["all"], rtol=0, atol=0)


def test_choices_stay_when_logits_would_now_choose_otherwise(monkeypatch):
    """As rounding may have it: the second run weighs the first run's choices, refused ones too, by its own logits."""
    lm, seen = of_experts(keep="attention"), []
    forward = Experts.forward

    def watched(self, x, gates, experts, *rest, **options):
        seen.append((gates.detach().clone(), experts.clone()))
        return forward(self, x, gates, experts, *rest, **options)

    monkeypatch.setattr(Experts, "forward", watched)
    loss = step_loss(lm.loss_sum(lm(EXPERT_BATCH, TRAINING)), 0.1, 0.1)
    for layer in lm.network.model.layers:
        layer.mlp.gate.weight.data.neg_()  # unnoticed by autograd, which would refuse
    loss.backward()
    assert len(seen) == 4, "two layers, twice"
    for (gates, ids), (other_gates, other_ids) in zip(seen[:2], seen[:1:-1], strict=True):
        assert torch.equal(ids, other_ids)
        assert (ids < 0).any()
        assert not torch.allclose(gates, other_gates)
        assert torch.equal(gates == 0, other_gates == 0)
    seen.clear()
    lm(EXPERT_BATCH, TRAINING)
    assert not torch.equal(seen[0][1], ids), "it would have"
