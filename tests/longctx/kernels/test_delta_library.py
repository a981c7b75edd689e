"""The gated delta rule by a library's function: what is ours around it, beside our own passes."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
from torch._subclasses import FakeTensorMode

from longctx.kernels.gated_delta import library
from longctx.kernels.gated_delta.front import ProjectedTokens
from longctx.kernels.gated_delta.gated_delta_call import GatedDeltaOptions, InitialStates
from longctx.kernels.gated_delta.gated_delta_rule import gated_delta
from longctx.kernels.gated_delta.library import gated_delta_by, library_for
from longctx.kernels.linear_attention import StateSegments
from tests.as_on_a_gpu import computing_as_on_a_gpu
from tests.longctx.kernels.attention.library_source import Source, unpacked
from tests.longctx.kernels.delta_library import plain_rule
from tests.longctx.kernels.delta_oracle import make

FLA = Source("fla-core", "0.6.0", "b0708b70e0b119cd58a0a5146ea56cb175cef6ed969d8ac60267e3e077ce3ebd", is_wheel=True)
PACKED = (0, 0, 1, 3, 3, 6, 29, 40)


def close(got, want, bound=1e-10):
    errors = [((a - b).norm() / b.norm().clamp(min=1e-6)).item() for a, b in zip(got, want, strict=True)]
    assert max(errors) <= bound, errors


@pytest.mark.parametrize("X", [1, 6], ids=["by-head", "by-channel"])
@pytest.mark.parametrize(("takes", "gives"), [((), ()), ((1,), (6,)), ((1, 6), (2, 6))])
def test_states_in_and_out_are_those_of_our_own_passes(monkeypatch, X, takes, gives):
    tokens, weights = make(PACKED[-1], X=X)
    # Some blocks of convolution and gates, of which the last is short.
    monkeypatch.setattr(library, "FRONT_CHUNKS", 2)
    options = GatedDeltaOptions(segments=StateSegments(PACKED, received=takes, sent=gives), beta_scale=2.0, chunk=8)
    inputs = [*tokens, *weights]
    carried = None
    if takes:
        generator = torch.Generator().manual_seed(3)
        shapes = (len(takes), 2, 4, 6, 5), (len(takes), 2, 3, 2, 22)
        carried = InitialStates(
            *(torch.randn(x, generator=generator, dtype=torch.float64).requires_grad_() for x in shapes)
        )
        inputs += carried
    results = []
    for run in (gated_delta, lambda *arguments: gated_delta_by(plain_rule, *arguments)):
        out, given = run(tokens, weights, options, carried)
        doutputs = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double() for x in (out, given)]
        total = sum((x * d).sum() for x, d in zip((out, given), doutputs, strict=True))
        results.append([out, given, *torch.autograd.grad(total, inputs)])
    close(results[1], results[0])


def test_half_precision_keeps_gates_and_states_in_float32():
    tokens, weights = make(40, dtype=torch.bfloat16)
    seen = []

    def rule(*tensors, **options):
        seen.append([x.dtype for x in tensors])
        return plain_rule(*tensors, **options)

    options = GatedDeltaOptions(segments=StateSegments((0, 40), sent=(0,)))
    out, given = gated_delta_by(rule, tokens, weights, options)
    want, states = gated_delta(tokens, weights, options)
    half, full = torch.bfloat16, torch.float32
    assert seen == [[half, half, half, full, full]]
    assert (out.dtype, given.dtype) == (half, full)
    close([out.double(), given.double()], [want.double(), states.double()], 2e-2)


def test_whom_it_serves(monkeypatch):
    options = GatedDeltaOptions(segments=StateSegments((0, 8)))

    def served(dtype, options=options, **sizes):
        return library_for(make(8, dtype=dtype, **sizes)[0], options) is not None

    monkeypatch.setattr(library, "installed", lambda *, by_channel: plain_rule)
    assert not served(torch.bfloat16)
    with computing_as_on_a_gpu():
        assert served(torch.bfloat16)
        assert served(torch.float16, X=6)
        assert not served(torch.float32)
        assert not served(torch.bfloat16, D=257)
        assert not served(torch.bfloat16, options=GatedDeltaOptions(segments=StateSegments((0, 8)), chunk=1))
        mode = FakeTensorMode()
        fake = ProjectedTokens._make(mode.from_tensor(x.detach()) for x in make(8, dtype=torch.bfloat16)[0])
        assert library_for(fake, options) is None


def test_the_rule_takes_it(monkeypatch):
    tokens, weights = make(8, dtype=torch.bfloat16)
    calls = []

    def rule(*tensors, **options):
        calls.append(options)
        return plain_rule(*tensors, **options)

    monkeypatch.setattr(library, "installed", lambda *, by_channel: rule)
    with computing_as_on_a_gpu():
        gated_delta(tokens, weights, GatedDeltaOptions(segments=StateSegments((0, 8))))
    assert calls


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_published_library_has_these_arguments(request, by_channel):
    module, name = library._FUNCTIONS[by_channel]
    path, door = (f"{module.replace('.', '/')}/{file}.py" for file in ("chunk", "__init__"))
    folder = unpacked(FLA, request.config.cache.mkdir("kernel-libraries"), (path, door))
    [function] = [
        node
        for node in ast.walk(ast.parse((folder / path).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    ours = inspect.signature(library.GatedDeltaKernel.__call__).parameters
    theirs = [x.arg for x in function.args.args]
    assert theirs[:5] == list(ours)[1:6]
    assert set(list(ours)[6:]) <= set(theirs)
    assert f"import {name}" in (folder / door).read_text()
