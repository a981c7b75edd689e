"""Experts on several ranks beside one process that holds them all: values, every gradient, bytes, errors.

Axes: N tokens of a rank, k choices a token, E experts.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from longctx.kernels.processor import MatmulMode
from longctx.model.experts.dispatch import RECOMPUTE, ExpertRun, tiles_of
from longctx.model.experts.experts import Experts
from longctx.model.recompute import recomputed
from parallel.experts.dispatcher import AllToAllDispatcher, sum_by_rank, sum_by_turn, sum_expert_results
from parallel.experts.expert_tile_tokens import default_tile_tokens
from parallel.mesh import Mesh
from tests.as_on_a_gpu import computing_as_on_a_gpu
from tests.helpers import on_ranks, run_distributed
from tests.longctx.samples import randomize, tiny_config
from tests.rounding import both_ways, rounded

N, K, E = 25, 2, 12
EXACT = 1e-12
"""float64 throughout: nothing but the order of additions."""


def whole_experts(dtype=torch.float64, **changes) -> Experts:
    module = Experts(tiny_config(num_experts=E, expert_bias=True, **changes))
    randomize(module)
    return module.to(dtype)


def tokens_of(ranks: int, case: str, dtype=torch.float64, choices: int = K):
    """Tokens, gates, choices and the results' gradients of every rank, the same on all of them."""
    g = torch.Generator().manual_seed(ranks)
    x, dout = (torch.randn(ranks, N, 32, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    gates = torch.rand(ranks, N, choices, generator=g, dtype=torch.float64)
    ids = torch.rand(ranks, N, E, generator=g).topk(choices, dim=-1).indices
    if case == "a rank gets none":
        ids = ids % (E - E // ranks) if ranks > 1 else ids
    if case == "one expert gets all":
        ids[..., 0], ids[..., 1:] = 5, -1
    if case == "some lead nowhere":
        ids = ids.where(torch.rand(ids.shape, generator=g) < 0.6, -1)
    if case == "a rank sends none":
        ids[-1] = -1
    if case == "tiles send none":
        ids[0, 12:], ids[-1, :12] = -1, -1
    if case == "nobody sends":
        ids[:] = -1
    return x, gates.to(torch.float64 if dtype == torch.float64 else torch.float32), ids, dout


CASES = (
    *("plain", "a rank gets none", "one expert gets all", "some lead nowhere"),
    *("a rank sends none", "tiles send none", "nobody sends"),
)


def grads_of(module, x, gates, ids, dout, run=None, *, layer_again=False):
    """Output and gradients of x, gates and every weight."""
    x, gates = x.detach().clone().requires_grad_(), gates.detach().clone().requires_grad_()

    def layer(x, gates, recompute_cache=None):
        return (module(x, gates, ids, run, recompute_cache),)

    out = (recomputed(layer, x, gates) if layer_again else layer(x, gates))[0]
    return [out.detach(), *torch.autograd.grad(out, [x, gates, *module.parameters()], dout.to(out.dtype))]


def local_part(whole: Experts, dispatcher: AllToAllDispatcher, **changes) -> Experts:
    module = Experts(tiny_config(num_experts=E, expert_bias=True, **changes), dispatcher.local_experts)
    module.to(whole.down_proj.dtype)
    module.load_state_dict({name: w[dispatcher.local_experts] for name, w in whole.state_dict().items()})
    return module


def check(mesh: Mesh, case: str, tolerance=EXACT, dtype=torch.float64, *, choices=K, layer_again=False, **run):
    """This rank's results and gradients are those of one process that holds every expert and the group's tokens."""
    whole = whole_experts()
    x, gates, ids, dout = tokens_of(dist.get_world_size(), case, dtype, choices)
    first = mesh.rank - mesh.expert_rank
    group = slice(first, first + mesh.expert)
    wide = [of[group].flatten(0, 1).double() for of in (x, gates)]
    want = grads_of(whole, *wide, ids[group].flatten(0, 1), dout[group].flatten(0, 1))
    dispatcher = AllToAllDispatcher(mesh, E)
    module = local_part(whole.to(dtype), dispatcher)
    mine = (x[mesh.rank], gates[mesh.rank], ids[mesh.rank], dout[mesh.rank])
    got = grads_of(module, *mine, ExpertRun(dispatcher, **run), layer_again=layer_again)
    own = slice(mesh.expert_rank * N, (mesh.expert_rank + 1) * N)
    want = [*(of[own] for of in want[:3]), *(of[dispatcher.local_experts] for of in want[3:])]
    for number, (value, right) in enumerate(zip(got, want, strict=True)):
        error, scale = (value.double() - right).norm(), right.norm()
        assert error <= tolerance * scale, f"{case}, {run}: tensor {number} is {error / scale:.1e} off"
    return got


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_experts_across_ranks_equal_one_process(ranks):
    run_distributed(check_all, ranks)


def check_all():
    mesh = Mesh.build(expert=dist.get_world_size())
    for case in CASES:
        for recompute in RECOMPUTE:
            check(mesh, case, tile_tokens=12, recompute=recompute)  # of 25 tokens: two tiles, and one of a single token
        check(mesh, case)
        check(mesh, case, tile_tokens=7, recompute="all")
        for choices in (1, 3):
            check(mesh, case, tile_tokens=12, choices=choices)


@on_ranks(4)
def test_two_groups_of_two_ranks():
    mesh = Mesh.build(context=2, expert=2)
    for case in CASES:
        check(mesh, case, tile_tokens=12)
    mesh = Mesh.build(context=4, expert=2)
    check(mesh, "plain")


ROUNDINGS: dict[MatmulMode, int] = {"float32": 13, "native": 21}
"""In bfloat16, one after the other on the way to the gradient of a token, the longest: those of one process
(``tests.longctx.model.experts.test_experts``), 3.64 and 12.28; weights and biases, for the definition has those of
float64 (of the gate, whose errors count 1.64 times, 3.28; of up 2; both weights of backward 2); what a rank's experts
make of a token, as it travels; and in float32 the sum over ranks."""


@both_ways
def test_low_precision_and_recomputed_layers(products):
    run_distributed(check_options, 3, products)


def check_options(products):
    mesh = Mesh.build(expert=3)
    for tile_tokens in (0, 12):
        for case in ("plain", "some lead nowhere", "nobody sends"):
            check(mesh, case, tile_tokens=tile_tokens, layer_again=True)
            check(mesh, case, 1e-6, torch.float32, tile_tokens=tile_tokens)
            bound = rounded(ROUNDINGS[products])
            check(mesh, case, bound, torch.bfloat16, tile_tokens=tile_tokens, matmul_mode=products)


@pytest.mark.slow
@on_ranks(3)
def test_grouped_products_of_gpus_across_ranks_equal_one_process():
    with computing_as_on_a_gpu():
        check_all()
        check_options("native")


@on_ranks(2)
def test_ways_to_recompute_give_equal_bits():
    mesh = Mesh.build(expert=2)
    first = check(mesh, "plain", 1e-6, torch.float32, tile_tokens=12)
    for options in ({}, {"recompute": "all"}, {"recompute": "none"}, {"layer_again": True}):
        other = check(mesh, "plain", 1e-6, torch.float32, tile_tokens=12, **options)
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), options


@on_ranks(2)
def test_a_recomputed_layer_sends_in_backward_alone():
    mesh, sent = Mesh.build(expert=2), []
    plain = dist.all_to_all_single
    dist.all_to_all_single = lambda *a, **k: sent.append(a[0].dtype) or plain(*a, **k)
    whole, dispatcher = whole_experts(), AllToAllDispatcher(mesh, E)
    module = local_part(whole, dispatcher)
    x, gates, ids, _ = (of[mesh.rank] for of in tokens_of(2, "plain"))
    x.requires_grad_()
    out = recomputed(lambda x, recompute_cache: (module(x, gates, ids, ExpertRun(dispatcher), recompute_cache),), x)[0]
    assert sent == [torch.int64, torch.uint8, torch.uint8, torch.uint8]  # how much; tokens, choices; results
    out.sum().backward()
    assert sent[4:] == [torch.uint8] * 5  # tokens, choices and gradients; gradients of tokens and gates
    dist.all_to_all_single = plain


@on_ranks(3)
def test_no_more_is_sent_than_each_token_once_to_each_rank():
    mesh = Mesh.build(expert=3)
    dispatcher = AllToAllDispatcher(mesh, E)
    for case in CASES:
        ids = tokens_of(3, case)[2][mesh.rank]
        tiles = tiles_of(N, 12)
        sizes = dispatcher.plan(ids, tiles)
        pairs = {(n, expert // 4) for n, token in enumerate(ids.tolist()) for expert in token if expert >= 0}
        elsewhere = [rank for _, rank in pairs if rank != mesh.rank]
        assert sum(sum(of.send_counts) - of.send_counts[mesh.rank] for of in sizes) == len(elsewhere)


def test_tiles_hide_the_all_to_all_of_gpus():
    degrees = {("cuda", 8): 4096, ("cuda", 1): 0, ("cpu", 8): 0}
    assert {case: default_tile_tokens(*case) for case in degrees} == degrees


@on_ranks(2)
def test_sums_over_ranks_are_not_rounded():
    """256 from one rank and 1 from the other are 257, which bfloat16 has not."""
    mesh = Mesh.build(expert=2)
    dispatcher = AllToAllDispatcher(mesh, E)
    ids = torch.tensor([[0, 11], [11, 0], [0, 1], [-1, 7], [-1, -1]])
    [sizes] = dispatcher.plan(ids, [slice(0, 5)])
    handle = dispatcher.handle(ids, sizes)
    here = handle.dispatch(torch.ones(5, 1), torch.float32).wait() * (256, 1)[mesh.rank]
    sums = handle.combine(here, torch.bfloat16).wait()
    assert sums.dtype == torch.float32
    assert sums.flatten().tolist() == [257, 257, 256, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "tokens", "most"), [(9, 31, 3), (5, 1, 1), (128, 40, 8), (3, 7, 2), (4, 0, 2)])
def test_a_call_for_each_turn_sums_as_a_call_for_each_rank(ranks, tokens, most, dtype):
    """To the bit: every token's results in the order of the ranks."""
    g = torch.Generator().manual_seed(ranks)
    # Each token's results come from as many ranks as it likes, none included, up to most.
    wanted = torch.rand(ranks, tokens, generator=g).argsort(0) < torch.randint(0, most + 1, (tokens,), generator=g)
    send_counts = wanted.sum(1).tolist()
    token_U = torch.nonzero(wanted)[:, 1]
    results = torch.randn(len(token_U), 5, generator=g).to(dtype)
    by_rank = sum_by_rank(results, token_U, tokens, send_counts)
    by_turn = sum_by_turn(results, token_U, tokens, most)
    assert by_turn.dtype == torch.float32
    assert torch.equal(by_turn, by_rank)


class CountCalls(TorchDispatchMode):
    """How many operators run within."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_results_of_many_ranks_are_not_added_up_rank_by_rank():
    """The device is called as often for 128 ranks as for 16."""
    calls = []
    for ranks in (16, 128):
        # Eight ranks have a result of each of four tokens, the others of none.
        token_U = torch.arange(4).repeat(8)
        results = torch.ones(len(token_U), 5)
        send_counts = (4,) * 8 + (0,) * (ranks - 8)
        with CountCalls() as counted:
            assert (sum_expert_results(results, token_U, send_counts, torch.Size((4, 8))) == 8).all()
        calls.append(counted.calls)
    assert calls[0] == calls[1]


@on_ranks(4)
def test_gathering_over_a_sequence():
    mesh = Mesh.build(context=2, expert=4)
    dispatcher = AllToAllDispatcher(mesh, E)
    values = torch.arange(6).view(3, 2) + 10 * mesh.rank
    others = [torch.arange(6).view(3, 2) + 10 * rank for rank in (mesh.rank // 2 * 2, mesh.rank // 2 * 2 + 1)]
    assert torch.equal(dispatcher.gather(values), torch.cat(others))
