"""Experts of one process beside their definition, token by token in float64; tiles, recomputation, memory.

Axes: N tokens, k choices a token, M model width, E experts.
"""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, silu

from longctx.model.experts import expert_blocks as expert_blocks
from longctx.model.experts import experts, tiled_experts
from longctx.model.experts.dispatch import (
    RECOMPUTE,
    DispatchHandle,
    DispatchSizes,
    ExpertRun,
    Ready,
    TokenDispatcher,
)
from longctx.model.experts.experts import Experts
from longctx.model.experts.gradient_sum import GradientSum
from longctx.model.recompute import RecomputeCache, recomputed
from tests.longctx.samples import gradients, randomize, tiny_config
from tests.rounding import both_ways, rounded

N, M, E, K = 29, 32, 4, 2
EXACT = 1e-12


def build(dtype=torch.float64, **changes) -> Experts:
    module = Experts(tiny_config(**changes))
    randomize(module)
    return module.to(dtype)


def routed(dtype=torch.float64, *, tokens=N, allowed=range(E), nowhere=0.0, k=K, width=M):
    """Tokens, gates and choices of the ``allowed`` experts, some of which lead nowhere."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, dtype=torch.float64, generator=g).to(dtype).requires_grad_()
    gates = torch.rand(tokens, k, dtype=torch.float64, generator=g)
    gates = gates.to(dtype if dtype == torch.float64 else torch.float32).requires_grad_()
    order = torch.rand(tokens, len(allowed), generator=g).argsort(dim=1)[:, :k]
    choices = torch.tensor(list(allowed))[order].view(tokens, k)
    return x, gates, choices.where(torch.rand(tokens, k, generator=g) >= nowhere, -1)


def activation(kind, gate, up):
    if kind == "swiglu_oai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return {"swiglu": silu, "geglu": gelu, "geglu_tanh": partial(gelu, approximate="tanh")}[kind](gate) * up


def by_definition(module, x, gates, choices):
    """Token by token, choice by choice."""
    rows = []
    for n in range(len(x)):
        row = torch.zeros_like(x[n])
        for gate, expert in zip(gates[n], choices[n], strict=True):
            if expert < 0:
                continue
            both = module.gate_up_proj[expert] @ x[n]
            if module.gate_up_proj_bias is not None:
                both = both + module.gate_up_proj_bias[expert]
            y = module.down_proj[expert] @ activation(module.activation, *both.chunk(2))
            row = row + gate * (y if module.down_proj_bias is None else y + module.down_proj_bias[expert])
        rows.append(row)
    return torch.stack(rows) + x * 0 if rows else x * 0


def outcome(forward, module, x, gates):
    """Output and gradients of everything, for an arbitrary gradient of the output."""
    out = forward(x, gates)
    dout = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [x, gates, *module.parameters()]
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype), allow_unused=True)
    return [out, *(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True))]


def compare(module, given, tolerance, **run):
    """The module's output and gradients are those of the definition, relative to each tensor's largest value."""
    x, gates, choices = given
    exact = build(
        **{"activation": module.activation, "expert_bias": module.down_proj_bias is not None}, **sizes_of(module)
    )
    exact.load_state_dict(module.state_dict())
    doubles = [of.detach().double().requires_grad_() for of in (x, gates)]
    want = outcome(lambda x, gates: by_definition(exact, x, gates, choices), exact, *doubles)
    how = ExpertRun(TokenDispatcher(), **run)
    got = outcome(lambda x, gates: module(x, gates, choices, how), module, x, gates)
    for number, (value, right) in enumerate(zip(got, want, strict=True)):
        assert value.shape == right.shape
        error, scale = ((value.double() - right).abs().sum(), right.abs().sum()) if value.numel() else (0.0, 1.0)
        assert error <= tolerance * scale, f"tensor {number} is {error / scale:.1e} off"
    return got


def sizes_of(module):
    e, _, width = module.gate_up_proj.shape
    return {"num_experts": e, "hidden_size": width, "expert_ffn_size": module.down_proj.shape[2]}


CASES = {
    "all experts": {},
    "two idle experts": {"allowed": (1, 3)},
    "one expert takes all": {"allowed": (2,), "k": 1},
    "some lead nowhere": {"nowhere": 0.4},
    "all lead nowhere": {"nowhere": 1.1},
    "one token": {"tokens": 1},
    "no token": {"tokens": 0},
}


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("tile_tokens", [0, 1, 12, 28])
@pytest.mark.parametrize("case", CASES)
def test_experts_equal_their_definition(case, tile_tokens, recompute):
    given = routed(**CASES[case])
    out, dx, dgates, *dweights = compare(build(), given, EXACT, tile_tokens=tile_tokens, recompute=recompute)
    assert out.dtype == torch.float64
    idle = [e for e in range(E) if e not in given[2]]
    assert all(grad[idle].count_nonzero() == 0 for grad in dweights)
    assert dgates[given[2] < 0].count_nonzero() == 0
    nowhere = (given[2] < 0).all(1)
    assert out[nowhere].count_nonzero() == 0
    assert dx[nowhere].count_nonzero() == 0


# In bfloat16 the definition is in float64 from the same rounded weights and tokens. What is rounded one after the other
# on the way to a gradient, an error of the gate counted 1.64 times (silu makes at most 1.28 times as much of it):
# * in float32: gate and up, as they are kept, and the result: 3.64;
# * natively: gate and up, twice each where they have a bias (5.28), the gradient that arrives, its product with the
#   down projection, the same times the gate of the choice, the activation's derivative in two steps, the last product,
#   the sum of blocks or experts: 12.28.
ROUNDINGS = {"float32": 4, "native": 13}


def tolerance(dtype, products):
    return rounded(ROUNDINGS[products]) if dtype == torch.bfloat16 else 1e-5


@both_ways
@pytest.mark.parametrize("tile_tokens", [0, 12])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision(dtype, recompute, tile_tokens, products):
    how = {"tile_tokens": tile_tokens, "recompute": recompute, "matmul_mode": products}
    for biased in (False, True):
        module = build(dtype, expert_bias=biased)
        out, dx, *_ = compare(module, routed(dtype, nowhere=0.1), tolerance(dtype, products), **how)
        assert out.dtype == torch.float32
        assert dx.dtype == dtype


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["swiglu", "swiglu_oai", "geglu", "geglu_tanh"])
def test_activations_and_biases(kind, biased):
    module = build(activation=kind, expert_bias=biased)
    compare(module, routed(nowhere=0.2), EXACT, tile_tokens=12)


@pytest.fixture
def all_rows_at_once(monkeypatch):
    """The way of other devices than a CPU."""
    monkeypatch.setattr(tiled_experts, "computes_in_blocks", lambda *_: False)


@pytest.mark.parametrize("known", [False, True], ids=["counts unknown", "counts known"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("case", CASES)
def test_all_rows_at_once(case, recompute, known, all_rows_at_once, monkeypatch):
    if known:
        monkeypatch.setattr(TokenDispatcher, "handle", _handle_that_counts)
    for tile_tokens in (0, 12):
        given = routed(**CASES[case])
        compare(build(expert_bias=known), given, EXACT, tile_tokens=tile_tokens, recompute=recompute)


def _handle_that_counts(_, experts_nk, sizes):
    return DispatchHandle(experts_nk, num_assignments=int((experts_nk >= 0).sum()))


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_rows_at_once_in_low_precision(dtype, products, all_rows_at_once):
    """Natively through PyTorch's grouped product. What lies between products is bfloat16 here in either way."""
    bound = tolerance(dtype, "native")
    compare(build(dtype, expert_bias=True), routed(dtype, nowhere=0.1), bound, matmul_mode=products)


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ways_to_recompute_and_repetition_give_equal_bits(dtype, products):
    """The code promises them: every way forms the same products of the same rows, and keeps what it rounds."""
    module, given = build(dtype), routed(dtype)
    ways = [("activation", False), ("activation", False), ("all", False), ("none", False), ("activation", True)]
    results = []
    for recompute, has_cache in ways:
        run = ExpertRun(TokenDispatcher(), 12, recompute, products)

        def forward(x, gates, run=run, has_cache=has_cache):
            if not has_cache:
                return module(x, gates, given[2], run)
            return recomputed(
                lambda x, gates, recompute_cache: (module(x, gates, given[2], run, recompute_cache),), x, gates
            )[0]

        results.append(outcome(forward, module, *given[:2]))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_second_run_computes_nothing_and_backward_once(monkeypatch):
    runs, passes = [], {name: getattr(experts, name) for name in ("forward_tiles", "backward_tiles")}
    for name in passes:
        monkeypatch.setattr(experts, name, lambda *given, name=name: runs.append(name) or passes[name](*given))
    module, (x, gates, choices) = build(), routed()
    kept = []

    def layer(x, gates, recompute_cache: RecomputeCache):
        kept.append(recompute_cache)
        return (module(x, gates, choices, recompute_cache=recompute_cache).square(),)

    out = recomputed(layer, x, gates)[0]
    assert runs == ["forward_tiles"]
    out.sum().backward()
    assert runs == ["forward_tiles", "backward_tiles"]
    assert kept[0] is kept[1]
    assert not kept[0]._saved  # handed over, not held
    gradients(module)


@both_ways
@pytest.mark.parametrize("rows", [2, 3, 7])
def test_experts_of_many_blocks(rows, products, monkeypatch):
    monkeypatch.setattr(expert_blocks, "BLOCK_TOKENS", rows)
    for dtype, bound in ((torch.float64, EXACT), (torch.bfloat16, tolerance(torch.bfloat16, products))):
        compare(build(dtype, expert_bias=True), routed(dtype), bound, matmul_mode=products)


def test_products_in_bfloat16_have_few_sizes():
    """oneDNN's cache has room for 1024 kernels, and each size takes one for every product and width."""
    sizes = range(1, expert_blocks.BLOCK_TOKENS + 1)
    padded = [expert_blocks.padded_size(size) for size in sizes]
    assert len(set(padded)) == 32
    assert padded == sorted(padded)
    assert all(0 <= more - size < max(16, size / 8) for size, more in zip(sizes, padded, strict=True))
    assert padded[-1] == expert_blocks.BLOCK_TOKENS


@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj", "x", "gates", "all weights"])
def test_what_is_frozen_gets_no_gradient(frozen):
    module, (x, gates, choices) = build(expert_bias=True), routed()
    wanted = outcome(lambda x, gates: module(x, gates, choices), module, x, gates)
    leaves = {"x": x, "gates": gates, **dict(module.named_parameters())}
    still = [n for n in leaves if n == frozen or (frozen == "all weights" and n not in ("x", "gates"))]
    for name in still:
        leaves[name].requires_grad_(False)
    out = module(x, gates, choices)
    dout = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out.backward(dout)
    for (name, leaf), want in zip(leaves.items(), wanted[1:], strict=True):
        assert leaf.grad is None if name in still else torch.equal(leaf.grad, want), name


def test_gradients_of_tiles_are_added_in_float32():
    """Steps of a thousandth of the sum would be lost in bfloat16."""
    weight = torch.zeros(2, 1, 1, dtype=torch.bfloat16)
    total = GradientSum(weight, tiles=1025)
    total.add_outer(0, torch.ones(1, 1), torch.full((1, 1), 512.0))
    for _ in range(1024):  # in every tile both experts
        total.add_outer(0, torch.ones(1, 1), torch.full((1, 1), 0.5))
        total.add_outer(1, torch.ones(1, 1), torch.full((1, 1), 0.25))
    assert total.result().flatten().tolist() == [1024, 256]


# --- memory -------------------------------------------------------------------------------------------------


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes that tensors made inside held at a time."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() and storage.data_ptr() not in self.seen:
                size, at = storage.nbytes(), storage.data_ptr()
                self.seen.add(at)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, at, size)
        return out

    def _freed(self, at, size):
        self.live -= size
        self.seen.discard(at)


def test_tiles_bound_memory_whatever_the_number_of_tokens():
    """With all recomputed, twice the tokens cost what x, gates, ids, results and gradients of twice the tokens cost."""
    tile, width = 64, 32
    peaks = {}
    for tokens in (4 * tile, 32 * tile):
        module, (x, gates, choices) = build(torch.float32), routed(torch.float32, tokens=tokens)
        choices = choices[:tile].repeat(tokens // tile, 1)  # no tile has a fuller expert than the others
        run = ExpertRun(TokenDispatcher(), tile, "all")
        saved = 0

        def count(tensor):
            nonlocal saved
            saved += tensor.nbytes
            return tensor

        with Peak() as memory:
            with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
                out = module(x, gates, choices, run)
            torch.autograd.grad(out, (x, gates, *module.parameters()), torch.ones_like(out))
        weights = sum(w.nbytes for w in module.parameters())
        assert saved == x.nbytes + gates.nbytes + choices.nbytes + weights
        of_all = 2 * (weights + gates.nbytes) + choices.nbytes + 4 * x.nbytes  # with gradients; out and its own too
        peaks[tokens] = memory.peak - of_all
    few, many = peaks.values()
    assert many <= few * 1.01, peaks
    assert few <= 16 * 4 * tile * K * width, peaks


@pytest.mark.parametrize("recompute", ["none", "activation"])
@pytest.mark.parametrize("keeps_graph", [False, True])
def test_backward_frees_what_was_saved_unless_the_graph_is_kept(recompute, keeps_graph, monkeypatch):
    """Chunk by chunk, the gradients of weights take the memory of what they are made of."""
    kept, alive = [], []
    monkeypatch.setattr(expert_blocks, "CHUNK_BYTES", 1)
    module, given = build(), routed()
    x, gates = (of.detach().requires_grad_() for of in given[:2])
    _record_chunks(monkeypatch, kept)
    out = module(x, gates, given[2], ExpertRun(TokenDispatcher(), 12, recompute))
    each = {"none": 2, "activation": 1}[recompute]  # gate and up, and x
    assert len(kept) == E * 3 * each  # every expert has rows in each of three tiles
    outer = GradientSum.add_outer

    def add_outer(*of):
        alive.append(sum(ref() is not None for ref in kept))
        outer(*of)

    monkeypatch.setattr(GradientSum, "add_outer", add_outer)
    leaves = (x, gates, *module.parameters())
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=keeps_graph)
    if keeps_graph:
        assert set(alive) == {len(kept)}
        again = torch.autograd.grad(out.sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    else:
        assert alive == [(3 * E - n // 2) * each for n in range(2 * 3 * E)]  # two products for each block
    assert not any(ref() is not None for ref in kept)


def _record_chunks(monkeypatch, made):
    """Have weak references to all chunks appended to a list."""
    allocate = expert_blocks.SavedChunks.allocate

    def recording(chunks):
        tensors = allocate(chunks)
        made.extend(map(weakref.ref, tensors))
        return tensors

    monkeypatch.setattr(expert_blocks.SavedChunks, "allocate", recording)


class LoggingDispatcher(TokenDispatcher):
    """Experts that are here, as if they were not: what is sent and what is waited for, in order."""

    is_distributed = True

    def __init__(self):
        self.log = []

    def plan(self, experts_Nk, tiles):
        self.log.append(f"plan {len(tiles)}")
        return [DispatchSizes(num_assignments=int((experts_Nk[tile] >= 0).sum())) for tile in tiles]

    def handle(self, experts_nk, sizes):
        return LoggingHandle(experts_nk, self.log, sizes.num_assignments)


class LoggingHandle(DispatchHandle):
    def __init__(self, experts_nk, log, num_assignments):
        super().__init__(experts_nk, num_assignments)
        self.log = log

    def _start(self, what, value):
        self.log.append(f"send {what}")
        return Later(value, lambda: self.log.append(f"wait {what}"))

    def dispatch(self, of_tokens_nX, communication_dtype):
        return self._start("tokens", of_tokens_nX.to(communication_dtype))

    def combine(self, of_tokens_SX, communication_dtype):
        return self._start("results", of_tokens_SX) if of_tokens_SX.shape[1] == M else Ready(of_tokens_SX)


class Later(Ready):
    def __init__(self, value, waited):
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "waited", waited)

    def wait(self):
        self.waited()
        return self.value


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_tokens_and_results_travel_while_experts_compute(recompute, monkeypatch):
    dispatcher, module, (x, gates, choices) = LoggingDispatcher(), build(), routed(nowhere=0.2)
    for name in ("forward_blocks", "backward_blocks"):
        whole = getattr(tiled_experts, name)
        monkeypatch.setattr(
            tiled_experts, name, lambda *a, whole=whole, **k: dispatcher.log.append("compute") or whole(*a, **k)
        )
    out = module(x, gates, choices, ExpertRun(dispatcher, 12, recompute))
    torch.testing.assert_close(out, by_definition(module, x, gates, choices))
    ahead = ["wait tokens", "send tokens", "compute"]
    first, rest = [*ahead, "send results"], [*ahead, "send results", "wait results"]
    last = ["wait tokens", "compute", "send results", "wait results", "wait results"]
    assert dispatcher.log == ["plan 3", "send tokens", *first, *rest, *last]
    dispatcher.log.clear()
    out.sum().backward()
    sent = [what for what in dispatcher.log if what != "plan 3"]
    assert sent == dispatcher.log  # planned once
    assert sent.count("send tokens") == (6 if recompute == "all" else 3)  # gradients, and tokens that were not kept
    third = [n for n, what in enumerate(sent) if what == "compute"][1]
    assert "send tokens" in sent[third - 2 : third]  # the last tile's are on their way
    assert "wait results" not in sent[: third + 1]
