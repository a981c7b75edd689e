"""Every adapter's calls through the library's own Python layer, and what each takes: strides, documents, heads, dtypes.

flash-attn 2 and 3 are their own Python code from their source package, with a stand-in for the compiled module alone.
flash-attn 4 is the signatures of its own wheel. PyTorch's operators are called with their own schemas. Values are by
definition, so what is compared is everything between our kernel contract and the compiled code.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from dataclasses import replace
from itertools import product
from types import ModuleType

import pytest
import torch

from longctx.kernels.attention.flash import libraries
from longctx.kernels.attention.flash.adapter import FlashKernel
from longctx.kernels.attention.flash.cudnn import CudnnKernel
from longctx.kernels.attention.flash.libraries import FLASH2, FLASH3, FLASH4
from longctx.kernels.attention.kernel_interface import KernelRequest, ScoreRules
from longctx.kernels.attention.reference import ReferenceKernel
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from tests.longctx.kernels.attention import flash_stand_in
from tests.longctx.kernels.attention.compiled_stand_in import CompiledFlash2, register_flash3
from tests.longctx.kernels.attention.kernel_cases import relative_error
from tests.longctx.kernels.attention.library_source import FLASH2_SOURCE, FLASH4_WHEEL, unpacked
from tests.longctx.kernels.attention.test_flash_adapters import KERNELS, packed

HOPPER = (9, 0)
FLASH2_FILES = (
    "flash_attn/__init__.py",
    "flash_attn/flash_attn_interface.py",
    "flash_attn/cute/interface.py",
    "hopper/flash_attn_interface.py",
)


@pytest.fixture(scope="module")
def source(request):
    """The folder of flash-attn 2.8.3's source package."""
    return unpacked(FLASH2_SOURCE, request.config.cache.mkdir("kernel-libraries"), FLASH2_FILES)


def forget_imports():
    for name in [name for name in sys.modules if name.split(".")[0].startswith("flash_attn")]:
        del sys.modules[name]
    libraries.import_library.cache_clear()


def skip_where_installed(name):
    """On a machine with the compiled library its own code would be called; ``pytest -m gpu`` tests it there."""
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed: a stand-in for its compiled module would come beside the real one")


@pytest.fixture(scope="module")
def flash2(source):
    """flash-attn 2's own Python module over a stand-in for its compiled one; imported as if it were installed."""
    skip_where_installed("flash_attn")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(source)
        patch.setitem(sys.modules, "flash_attn_2_cuda", CompiledFlash2())
        libraries.import_library.cache_clear()
        module = importlib.import_module("flash_attn.flash_attn_interface")
        for name in ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"):
            # operators for CUDA devices: the same Python code serves CPU tensors too
            operator = getattr(module, name)
            operator.register_kernel("cpu")(operator._init_fn)
        yield module
        forget_imports()


@pytest.fixture(scope="module")
def flash3(source):
    """flash-attn 3's own Python module, over operators with its schema."""
    skip_where_installed("flash_attn_interface")
    library = register_flash3()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(source / "hopper")
        patch.setitem(sys.modules, "flash_attn_3", ModuleType("flash_attn_3"))
        patch.setitem(sys.modules, "flash_attn_3._C", ModuleType("flash_attn_3._C"))
        libraries.import_library.cache_clear()
        yield importlib.import_module("flash_attn_interface")
        forget_imports()
    library._destroy()


class Flash4:
    """Functions with exactly the parameters of flash-attn 4's own; what they are given is computed by definition."""

    def __init__(self, interface: str) -> None:
        self.signatures = {
            node.name: signature_of(node) for node in ast.parse(interface).body if isinstance(node, ast.FunctionDef)
        }

    def __getattr__(self, name: str):
        compute = getattr(flash_stand_in.Flash4(), name)

        def call(*args, **kwargs):
            bound = self.signatures[name].bind(*args, **kwargs).arguments
            assert all(x.dtype in (torch.float16, torch.bfloat16) for x in (bound["q"], bound["k"], bound["v"]))
            return compute(**bound)

        return call


def signature_of(function: ast.FunctionDef) -> inspect.Signature:
    """Names, kinds and whether there is a default."""
    kinds, given = inspect.Parameter, function.args
    without = len(given.args) - len(given.defaults)
    parameters = [
        kinds(x.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if n < without else None)
        for n, x in enumerate(given.args)
    ]
    parameters += [
        kinds(x.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for x, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return inspect.Signature(parameters)


@pytest.fixture(scope="module")
def flash4(request):
    """flash-attn 4's functions by the signatures of its wheel."""
    name = "flash_attn/cute/interface.py"
    folder = unpacked(FLASH4_WHEEL, request.config.cache.mkdir("kernel-libraries"), (name,))
    return Flash4((folder / name).read_text())


DOORS = ("flash2", "flash3", "flash4", "cuda_flash", "cudnn", "flex")


@pytest.fixture
def kernel(request):
    """The adapter of this name, over its library's own layer."""
    name = request.param
    if name == "flash2":
        request.getfixturevalue("flash2")
        return FlashKernel(FLASH2, capability=HOPPER)
    if name == "flash3":
        request.getfixturevalue("flash3")
        return FlashKernel(FLASH3, capability=HOPPER)
    if name == "cudnn":
        return CudnnKernel(flash_stand_in.Cudnn(), capability=HOPPER, version=91100)
    if name == "flash4":
        return FlashKernel(FLASH4, request.getfixturevalue("flash4"), capability=HOPPER)
    return KERNELS[name]()


# Documents of 5, 0, 1, 11, 0 and 7 tokens; a hop whose queries meet a rectangle and a triangle of keys; a window.
DOCUMENTS = packed(5, 0, 1, 11, 0, 7)
TABLES = (
    slice_table(DOCUMENTS),
    slice_table([AttentionSlice(0, 20, 0, 6), AttentionSlice(4, 20, 6, 20, 0), AttentionSlice(21, 22, 3, 4)]),
    slice_table(packed(5, 0, 1, 11, 0, 7, hi=3)),
)
ROWS = 24


def dense(shape, generator):
    return torch.randn(shape, generator=generator)


def of_a_projection(shape, generator):
    """A part of the rows, heads and channels of a wider tensor."""
    B, t, H, D = shape
    return torch.randn((B, t + 3, H + 2, D + 8), generator=generator)[:, 2:-1, 1:-1, :D]


def heads_first(shape, generator):
    B, t, H, D = shape
    return torch.randn((B, H, t, D), generator=generator).transpose(1, 2)


def channels_apart(shape, generator):
    B, t, H, D = shape
    return torch.randn((B, t, D, H), generator=generator).mT


LAYOUTS = (dense, of_a_projection, heads_first, channels_apart)


@pytest.mark.few(3)
@pytest.mark.parametrize("sizes", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("kernel", DOORS, indirect=True)
def test_values_and_gradients(kernel, sizes):
    """All of heads × dtypes × layouts × documents that the kernel says it takes; at most one rounding from float64."""
    D, V = sizes
    has_window, largest = kernel.name != "cudnn", 192 if kernel.name == "cudnn" else 256
    if max(sizes) > largest:
        refused = kernel.supports(KernelRequest("cuda", torch.bfloat16, D, 4, 4, V))
        assert refused == f"head size {D} is too large; the limit is {largest} for bfloat16"
        return
    for (H, K), dtype, layout in product(((4, 4), (4, 2), (4, 1)), (torch.bfloat16, torch.float16), LAYOUTS):
        request = KernelRequest("cuda", dtype, D, H, K, V, window=has_window)
        assert kernel.supports(request) is None
        g = torch.Generator().manual_seed(D + H + K)
        shapes = ((2, ROWS, H, D), (2, ROWS, K, D), (2, ROWS, K, V), (2, ROWS, H, V))
        q, k, v, dout = (layout(shape, g).to(dtype) for shape in shapes)
        tables = TABLES if has_window else TABLES[:2]
        table, scores = tables[(H + K + LAYOUTS.index(layout)) % len(tables)], ScoreRules(scale=D**-0.5)
        got = both_passes(kernel, q, k, v, dout, table, scores)
        want = both_passes(ReferenceKernel(), *(x.double() for x in (q, k, v, dout)), table, scores)
        # an output is rounded once to 8 or 11 bits; a gradient once and through the rounded output
        bound = 8e-3 if dtype == torch.bfloat16 else 1e-3
        for name, x, exact in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            finite = exact.isfinite()
            assert torch.equal(x.isfinite(), finite), name
            limit = 1e-6 if name == "lse" else bound
            assert relative_error(x[finite], exact[finite]) < limit, (name, H, K, dtype, layout)


def both_passes(kernel, q, k, v, dout, table, scores):
    out, lse = kernel.forward(q, k, v, table, scores=scores)
    return out, lse, *kernel.backward(dout, q, k, v, out, lse, table, scores=scores)[:3]


@pytest.mark.parametrize("kernel", ["flash2", "flash3"], indirect=True)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("left", [-1, 3])
def test_the_librarys_own_autograd_asks_for_the_same(kernel, left, softcap, request):
    """The library's public function over the same documents: the same bits, so the stand-in reads what it means."""
    module = request.getfixturevalue(kernel.name)
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, ROWS, h, 64, generator=g).bfloat16() for h in (4, 2, 2, 4))
    scores = ScoreRules(scale=0.2, softcap=softcap or None)
    table = slice_table(packed(5, 1, 11, 7, hi=None if left < 0 else left))
    ours = both_passes(kernel, q, k, v, dout, table, scores)
    leaves = [x[0].clone().requires_grad_() for x in (q, k, v)]
    cu = torch.tensor([0, 5, 6, 17, 24], dtype=torch.int32)
    options = {"softmax_scale": 0.2, "causal": True, "window_size": (left, 0 if left >= 0 else -1), "softcap": softcap}
    out = module.flash_attn_varlen_func(*leaves, cu, cu, 11, 11, **options)
    out.backward(dout[0])
    for x, theirs in zip((ours[0], *ours[2:]), (out, *(leaf.grad for leaf in leaves)), strict=True):
        assert torch.equal(x[0].to(torch.bfloat16), theirs)


def test_fake_tensors_of_the_librarys_own_rules(flash2):
    """flash-attn 2's operators say what they return without computing; our adapter's sizes follow from it."""
    from torch._subclasses import FakeTensorMode

    from longctx.kernels.attention.flash.calls import slices_to_calls

    table = TABLES[0]
    slices_to_calls(table)  # reads the table's numbers, as a plan does before any layer computes
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = (torch.empty(2, ROWS, h, 80, dtype=torch.bfloat16) for h in (4, 2))
        kernel = FlashKernel(FLASH2, capability=HOPPER)
        out, lse, *grads = both_passes(kernel, q, k, k, q, table, ScoreRules(scale=1.0))
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, torch.float32, q.shape[:3], torch.float64)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


def test_the_early_flash4_of_flash2_is_told_apart(source, flash4, monkeypatch):
    """flash-attn 2.8.3 installs ``flash_attn.cute`` too, whose backward takes no packed sequences."""
    early = Flash4((source / "flash_attn/cute/interface.py").read_text())
    for interface, said in ((early, "early version"), (flash4, None)):
        module = ModuleType("flash_attn.cute.interface")
        for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
            function = lambda: None  # noqa: E731
            function.__signature__ = interface.signatures[name]  # type: ignore[attr-defined]
            setattr(module, name, function)
        monkeypatch.setattr(libraries, "import_library", lambda _, module=module: module)
        found = FLASH4.load()
        assert (found is module) == (said is None)
        assert said is None or said in found


def test_flash3_says_what_it_is_not(monkeypatch, flash3):
    monkeypatch.setattr(libraries, "import_library", lambda _: ModuleType("flash_attn_interface"))
    assert FlashKernel(FLASH3, capability=HOPPER).missing() is None
    monkeypatch.setattr(torch.ops, "flash_attn_3", ModuleType("flash_attn_3"))
    assert "is not flash-attn 3" in (FlashKernel(FLASH3, capability=HOPPER).missing() or "")
    wish = KernelRequest("cuda", torch.bfloat16, 128, 4, 4, deterministic=True)
    assert "semaphores" in (FlashKernel(FLASH3, object(), capability=HOPPER).supports(wish) or "")
    newer = FlashKernel(FLASH3, object(), capability=(10, 0)).supports(replace(wish, deterministic=False))
    assert newer == "needs compute capability 9; the device has 10.0"
