"""Kernels, products and batches on fake CUDA tensors; prints a line for each thing that was run."""

from __future__ import annotations

from collections import Counter
from itertools import product
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from longctx.batch import PackedDocuments
from longctx.compact_batch import CompactBatch
from longctx.kernels.attention.flash.adapter import FlashKernel
from longctx.kernels.attention.flash.calls import slices_to_calls
from longctx.kernels.attention.flash.cudnn import CudnnKernel, squares_and_rectangles
from longctx.kernels.attention.flash.libraries import CUDA_FLASH
from longctx.kernels.attention.kernel_interface import KernelRequest, ScoreRules
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from longctx.kernels.cross_entropy import loss_sums
from longctx.kernels.grouped import grouped_outer, grouped_rows
from longctx.kernels.matmul import add_upcast_matmul_on_cuda_
from tests.fake_cuda import say

ROWS = 40
# documents of 9, 0, 1 and 30 tokens, and a hop of a ring
TABLES = (
    slice_table([AttentionSlice(a, b, a, b, 0) for a, b in ((0, 9), (9, 9), (9, 10), (10, 40))]),
    slice_table([AttentionSlice(0, 40, 0, 13), AttentionSlice(20, 40, 13, 33, 7)]),
)
ONE_KEY = {"cuda_flash": (0, 0), "cudnn": (1, 0)}
"""Calls of a table that see one key: cuDNN takes none."""
HEADS = ((4, 4), (4, 2), (4, 1))
SIZES = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))


class Operators:
    """PyTorch's operators, and how often each was called."""

    def __init__(self) -> None:
        self.called: Counter[str] = Counter()

    def __getattr__(self, name: str):
        self.called[name] += 1
        return getattr(torch.ops.aten, name)


def attention() -> None:
    """Both passes of PyTorch's own CUDA kernels: their operators' checks, and what comes back."""
    operators = Operators()
    kernels = (
        FlashKernel(CUDA_FLASH, operators, capability=(9, 0)),
        CudnnKernel(operators, capability=(9, 0), version=92000),
    )
    for kernel, (H, K), (D, V), dtype in product(kernels, HEADS, SIZES, (torch.bfloat16, torch.float16)):
        if kernel.supports(KernelRequest("cuda", dtype, D, H, K, V)) is not None:
            say("refused", kernel.name, D, V)
            continue
        for number, table in enumerate(TABLES):
            # before any layer computes, as a plan does: fake tensors have no numbers to read
            calls = {
                "cuda_flash": slices_to_calls(table, relative_positions=False),
                "cudnn": squares_and_rectangles(table),
            }
            operators.called.clear()
            both_passes(kernel, table, H, K, D, V, dtype)
            forward, backward = operators.called.values()
            assert forward == backward == len(calls[kernel.name]) - ONE_KEY[kernel.name][number]
        say("ran", kernel.name, H, K, D, V, dtype)


def both_passes(kernel, table, H, K, D, V, dtype) -> None:
    scores = ScoreRules(scale=D**-0.5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        wide = torch.empty(2, ROWS + 2, H + 2 * K, D, dtype=dtype, device="cuda")
        q, k = wide[:, 1:-1, :H], wide[:, 1:-1, H : H + K]
        v = torch.empty(2, ROWS, K, V, dtype=dtype, device="cuda")
        out, lse = kernel.forward(q, k, v, table, scores=scores)
        dout = torch.empty(2, ROWS, H, V, dtype=dtype, device="cuda")
        grads = kernel.backward(dout, q, k, v, out, lse, table, scores=scores)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (dout.shape, torch.float32, q.shape[:3], torch.float64)
    for grad, x in zip(grads[:3], (q, k, v), strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (x.shape, torch.float32, x.device)


def grouped() -> None:
    """Experts' products from every place of a flat buffer; the real operator checks strides, this one places too."""
    real = functional.grouped_mm

    def checked(a, b, *, offs):
        for x in (a, b):
            assert x.storage_offset() * x.element_size() % 16 == 0, "CUDA refuses a matrix between two words"
        return real(a, b, offs=offs)

    with FakeTensorMode(), patch.object(functional, "grouped_mm", checked):
        ends = torch.empty(4, dtype=torch.int32, device="cuda")
        for before in (0, 1, 3, 8, 129):
            flat = torch.empty(before + 4 * 24 * 16, dtype=torch.bfloat16, device="cuda")
            weight = flat[before:].view(4, 24, 16)
            x, dy = (torch.empty(37, width, dtype=torch.bfloat16, device="cuda") for width in (16, 24))
            out = grouped_rows(x, weight.mT, ends, matmul_mode="native")
            dx = grouped_rows(dy, weight, ends, matmul_mode="native")
            dweight = grouped_outer(dy, x, ends, matmul_mode="native")
            assert (out.shape, dx.shape, dweight.shape) == (dy.shape, x.shape, weight.shape)
            assert {out.dtype, dx.dtype, dweight.dtype} == {torch.bfloat16}
            say("grouped", before)
        # what CUDA has no grouped product of that does not wait: asking for a size raises here
        for dtype, width in ((torch.float32, 16), (torch.bfloat16, 15), (torch.float64, 16)):
            x, dy = (torch.empty(37, size, dtype=dtype, device="cuda") for size in (width, 24))
            weight = torch.empty(4, 24, width, dtype=dtype, device="cuda")
            out = grouped_rows(x, weight.mT, ends, matmul_mode="native")
            dweight = grouped_outer(dy, x, ends, matmul_mode="native")
            assert (out.shape, dweight.shape, out.dtype, dweight.dtype) == (dy.shape, weight.shape, dtype, dtype)
            say("grouped", dtype)


class Results(TorchDispatchMode):
    """Operators that return or write to a tensor in the shape of a head's weight, and its dtype."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.seen = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        x = args[0] if out is None else out
        if isinstance(x, torch.Tensor) and tuple(x.shape) == self.shape:
            self.seen.append(f"{func} {x.dtype}")
        return out


def loss() -> None:
    """Three chunks: the gradient of the head's weight is summed in float32 from the first product on."""
    with FakeTensorMode(), Results((50, 16)) as results:
        hidden = torch.empty(30, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        weight = torch.empty(50, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        targets = torch.zeros(30, dtype=torch.int64, device="cuda")
        results.seen.clear()
        total, _ = loss_sums(hidden, weight, targets, chunk_tokens=12)
        for line in results.seen:
            say("loss", line.replace(" torch.", " "))
        total.backward()
    assert (weight.grad.dtype, weight.grad.shape) == (torch.bfloat16, weight.shape)
    if TorchVersion(torch.__version__) < (2, 12):
        return  # it traces no product with a total of another dtype than the factors
    with FakeTensorMode():
        total, a, b = (torch.empty(*shape, device="cuda") for shape in ((5, 3), (5, 7), (7, 3)))
        add_upcast_matmul_on_cuda_(total, a.bfloat16(), b.bfloat16())


def batch() -> None:
    """A micro-batch is unpacked on the device: documents, a cut one and padding, in runs with and without a step."""
    names = ("tokens", "targets", "positions", "document_ids")
    with FakeTensorMode():
        runs = ([[0, 30, 1, 0]], [[0, 7, 1, 0], [7, 3, 1, 8]], [[1, 10, 3, 0]])
        for spans, dtype in product(runs, (torch.uint16, torch.int32)):
            num_tokens = sum(count for _, count, _, _ in spans)
            compact = CompactBatch(
                ids=torch.empty(64, dtype=dtype),
                spans=torch.tensor(spans),
                ends=torch.empty(3, dtype=torch.uint8),
                bounds=torch.tensor([0, 9, 10, 40]),
                documents=PackedDocuments((0, 9, 10, 40)),
                shape=(1, num_tokens),
                num_targets=num_tokens,
                num_tokens=num_tokens,
            )
            # Whatever has a size or a value that the host would have to wait for raises here.
            found = compact.unpack("cuda")
            for x in (getattr(found, name) for name in names):
                assert (x.shape, x.dtype, x.device.type) == ((1, num_tokens), torch.int64, "cuda")
            say("unpacked", num_tokens)


if __name__ == "__main__":
    attention()
    batch()
    grouped()
    loss()
