"""Compiled regions: eager's losses and gradients, for batch after batch of other documents, compiled once.

Quick tests trace and differentiate the graphs as ``torch.compile`` does and run them with PyTorch's own operators
(``aot_eager``): what they find is the tracing's. Slow ones run the kernels that inductor writes.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longctx.batch import Batch
from longctx.kernels.cross_entropy import losses_, whole_losses
from longctx.kernels.loss_options import PLAIN, LossOptions
from longctx.kernels.processor import MatmulMode
from longctx.kernels.regions import Regions, compile_count, missing_for_compiling
from longctx.model import decoder as decoder_module
from longctx.model.activation_offload import Keep, Store
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution, TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.as_on_a_gpu import computing_as_on_a_gpu
from tests.longctx.samples import dense_config, gradients, packed_batch, step_loss, tiny_config
from tests.rounding import both_ways

DOCUMENTS = ([40, 1, 23], [61], [5, 6, 7, 8, 9, 2], [64, 33], [1, 30])
"""Of the batches of a test: other numbers of documents and of tokens in each, primes among them."""

MODELS = {
    "dense": dense_config(qk_norm="head"),
    "dropout, sandwich": dense_config(residual_dropout=0.2, norm_order="sandwich", norm_offset=True),
    "experts": tiny_config(residual_dropout=0.1),
    "layernorm, post, plain activation": dense_config(
        norm="layernorm", norm_order="post", activation="gelu_tanh", position="learned", ffn_bias=True, o_bias=True
    ),
    "bounded activation": dense_config(activation="swiglu_oai", residual_scale=0.3),
    "latent": tiny_config(
        num_kv_heads=4, q_lora_rank=16, kv_lora_rank=12, rope_head_dim=4, value_head_dim=8, dense_layers=(0,)
    ),
    "relative": dense_config(position="relative"),
    "gated delta": dense_config(layers=("gated_delta", "kda", "full"), num_layers=3, attention_gate=True),
    "linear and windows": dense_config(layers=("linear", "window", "full"), window=7, num_layers=3),
}


@pytest.fixture(autouse=True)
def no_graphs_of_others():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def batches() -> list[Batch]:
    return [packed_batch([lengths], seed=n) for n, lengths in enumerate(DOCUMENTS)]


def train(config, execution: Execution, dtype: torch.dtype) -> tuple[list[float], list[dict], list[int]]:
    """Losses, gradients and the number of compiled graphs of a few steps."""
    lm = CausalLM(Decoder(config, execution=execution)).to(dtype)
    optimizer = torch.optim.SGD(lm.parameters(), lr=1e-3)
    losses, found, graphs = [], [], []
    before = compile_count().graphs
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        sums = lm.loss_sum(lm(batch, TrainingPass(seed=step)))
        step_loss(sums, 0.1).backward()
        found.append({name: x.clone() for name, x in gradients(lm).items()})
        optimizer.step()
        losses.append(float(sums["nll"]))
        graphs.append(compile_count().graphs - before)
    return losses, found, graphs


def test_a_decoder_that_somebody_compiles_is_left_as_it_is():
    """It compiles its own parts, and plans by numbers of documents that no graph may hold."""
    decoder, batch = Decoder(MODELS["experts"]), batches()[0]
    compiled = torch.compile(decoder, backend="eager")
    inputs = batch.tokens, batch.positions, batch.cu_seqlens
    assert torch.equal(compiled(*inputs), decoder(*inputs))
    assert compile_count().graphs == 0


def check(name: str, backend: str, *, keep: Keep = "all", store: Store = "device", chunk_tokens: int = 0) -> None:
    """Compiled float32 against eager float32, whose sums are only added in other orders."""
    losses, grads, nothing = train(MODELS[name], Execution(keep), torch.float32)
    found, found_grads, graphs = train(
        MODELS[name], Execution(keep, store, chunk_tokens=chunk_tokens, compiler=backend), torch.float32
    )
    assert nothing[-1] == 0
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * len(graphs), "other documents compiled again"
    for a, b in zip(found, losses, strict=True):
        assert abs(a - b) <= 1e-6 * abs(b)
    exact = None
    for n, (got, wanted) in enumerate(zip(found_grads, grads, strict=True)):
        for key, want in wanted.items():
            error = (got[key] - want).norm()
            if error <= 1e-5 * want.norm() + 1e-6:
                continue
            # Where float32 itself is further from float64, its rounding is the floor.
            exact = exact or train(MODELS[name], Execution(keep), torch.float64)[1]
            assert error <= 2 * (want - exact[n][key]).norm(), key


def check_bfloat16(name: str, backend: str, products: MatmulMode, *, keep: Keep) -> None:
    """Compiled and eager bfloat16 against float32: a kernel that is fused rounds no more often than operators do."""
    exact = train(MODELS[name], Execution(keep), torch.float32)[1]
    errors = []
    for compiler in (None, backend):
        execution = Execution(keep, matmul_mode=products, compiler=compiler)
        _, grads, graphs = train(MODELS[name], execution, torch.bfloat16)
        assert graphs == [graphs[0]] * len(graphs), "other documents compiled again"
        errors.append(sum(distance(got, wanted) for got, wanted in zip(grads, exact, strict=True)))
    eager, compiled = errors
    # the two errors differ by chance: a third either way over all weights and steps
    assert 0 < compiled <= 1.34 * eager


def distance(got: dict, wanted: dict) -> float:
    """Of all gradients of a step, in the Frobenius norm."""
    return float(torch.stack([(got[name].float() - want).square().sum() for name, want in wanted.items()]).sum().sqrt())


@pytest.mark.parametrize(
    ("name", "keep", "store"),
    [
        pytest.param("dropout, sandwich", "all", "device", marks=pytest.mark.slow),
        # Quickly by chunks, below.
        pytest.param("experts", "attention", "host", marks=pytest.mark.slow),
        pytest.param("dropout, sandwich", "all", "host", marks=pytest.mark.slow),
    ],
)
def test_other_documents_compile_nothing_and_losses_are_eagers(name, keep, store):
    check(name, "aot_eager", keep=keep, store=store)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("experts", *MODELS)])
def test_chunks_of_other_lengths_compile_nothing(name):
    check(name, "aot_eager", keep="attention", store="host", chunk_tokens=24)


@pytest.mark.slow
def test_products_in_float32_are_operators_of_the_graph():
    check_bfloat16("dense", "aot_eager", "float32", keep="attention")


@pytest.mark.slow
@pytest.mark.skipif(missing_for_compiling("cpu") is not None, reason=f"cannot compile: {missing_for_compiling('cpu')}")
@pytest.mark.parametrize("keep", ["all", "attention"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.timeout(600)
def test_kernels_of_inductor_give_eagers_losses(name, keep):
    check(name, "inductor", keep=keep)


@pytest.mark.slow
@pytest.mark.skipif(missing_for_compiling("cpu") is not None, reason=f"cannot compile: {missing_for_compiling('cpu')}")
@both_ways
@pytest.mark.timeout(600)
def test_kernels_of_inductor_in_bfloat16(products):
    check_bfloat16("dropout, sandwich", "inductor", products, keep="all")
    check_bfloat16("dense", "inductor", products, keep="attention")


def test_evaluation_and_generation_stay_eager():
    decoder = Decoder(MODELS["dense"], execution=Execution(compiler="aot_eager"))
    lm, batch, before = CausalLM(decoder), batches()[0], compile_count().graphs
    lm.token_nll(batch)
    with torch.no_grad():
        lm(batch)
    decoder(batch.tokens, batch.positions, cache=decoder.new_cache())
    assert compile_count().graphs == before


def test_a_region_that_no_graph_can_hold_is_an_error():
    def breaks(x):
        return x + x.tolist()[0]

    with pytest.raises(Exception, match=r"[Uu]nsupported|[Gg]raph break"):
        Regions("eager")(breaks, torch.ones(3), tokens_dim=0)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [PLAIN, LossOptions(logit_scale=0.7, softcap=5.0, z_loss=1e-2, label_smoothing=0.1)]
)
def test_losses_of_whole_rows_are_those_of_blocks(options, dtype):
    # what a GPU runs compiled; here it is traced with another number of tokens each time
    run, before = Regions("aot_eager"), compile_count().graphs
    for tokens in (7, 32, 13):
        logits = (torch.randn(tokens, 97, generator=torch.Generator().manual_seed(tokens)) * 3).to(dtype)
        targets = torch.arange(tokens)
        targets[2] = -100
        found = run(whole_losses, logits, targets, options, True, tokens_dim=0)
        wanted = losses_(logits, targets, options, with_gradient=True)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert compile_count().graphs == before + 1


def doubles_in_place(x):
    return x.mul_(2).sum(1)


def sum_of_rows(x):
    return x.sum(1)


@pytest.mark.parametrize("tokens", [slice(None), slice(3)], ids=["whole", "a part of a larger tensor"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_function_that_writes_to_an_argument_is_refused(backend, tokens):
    """The argument may be a copy, whose values nobody would see."""
    with pytest.raises(AssertionError, match="doubles_in_place writes to an argument"):
        Regions(backend)(doubles_in_place, torch.ones(5, 4)[tokens], tokens_dim=0)


def test_parts_of_larger_tensors_share_a_graph():
    run, before = Regions("aot_eager"), compile_count().graphs
    for size, part in ((9, slice(0, 9)), (9, slice(0, 4)), (7, slice(2, 7)), (12, slice(5, 7))):
        whole = torch.randn(size, 6)
        assert torch.equal(run(sum_of_rows, whole[part], tokens_dim=0), whole[part].sum(1))
        assert torch.equal(run(sum_of_rows, whole[part, :4].mT.contiguous().mT, tokens_dim=0), whole[part, :4].sum(1))
    assert compile_count().graphs == before + 2  # rows of 6 and of 4


class Writes(TorchDispatchMode):
    """Refuses operators that write to the memory of some tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.storages = {x.untyped_storage()._cdata for x in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            x = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(x, torch.Tensor):
                assert x.untyped_storage()._cdata not in self.storages, f"{func} writes to an argument"
        return func(*args, **kwargs)


def watched(function, *args, tokens_dim=1):
    """A region's function, as it is, under a mode that sees what it writes to."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    for module in args:
        if isinstance(module, torch.nn.Module):
            tensors += [*module.parameters(), *module.buffers()]
    watched.functions.add(function.__name__)
    with Writes(tensors):
        return function(*args)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_tokens", [0, 24])
def test_no_region_writes_to_its_arguments(chunk_tokens, dtype, monkeypatch):
    watched.functions = set()
    monkeypatch.setattr(decoder_module, "run_with", lambda compiler: watched)
    for config in MODELS.values():
        lm = CausalLM(Decoder(config, execution=Execution("attention", chunk_tokens=chunk_tokens, compiler="watched")))
        with computing_as_on_a_gpu():
            lm.to(dtype)(batches()[2], TrainingPass(seed=1))[0].backward()
    assert watched.functions == {"before_core", "after_core", "join_attention", "whole_losses"}


def test_what_is_missing_is_said(monkeypatch):
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if "g++" in name else found(name))
    monkeypatch.delenv("CXX", raising=False)
    said = missing_for_compiling("cpu")
    assert said is not None
    assert "g++" in said or "header" in said
