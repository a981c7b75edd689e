"""Run as a program where Triton is installed: the merge kernel against its eager form, or compiled for a GPU.

python -m tests.longctx.kernels.merge_cases values      (with TRITON_INTERPRET=1)
python -m tests.longctx.kernels.merge_cases compile 90
"""

from __future__ import annotations

import sys

import torch

from longctx.kernels.merge import merge_eager_
from longctx.kernels.merge_triton import constants_for, launch_merge, merge_kernel
from tests.longctx.kernels.broken_rows import check_broken_rows

SHAPES = ((1, 7, 3, 64), (2, 5, 1, 80), (1, 33, 2, 128), (1, 1, 1, 1), (1, 0, 2, 16), (1, 70, 4, 256))
DTYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float64: "*fp64"}


def values() -> None:
    """Every shape and dtype of a block, rows without keys on either side and on both, and broken rows."""
    torch.cuda.device_of = lambda _: torch.no_grad()  # the interpreter's tensors are on the CPU
    for shape in SHAPES:
        for block_dtype in (torch.float32, torch.bfloat16):
            for lse_dtype in (torch.float32, torch.float64):
                check(shape, block_dtype, lse_dtype)
    check_broken_rows(launch_merge)


def check(shape: tuple[int, ...], block_dtype: torch.dtype, lse_dtype: torch.dtype) -> None:
    """One case: both ways, from the same tensors."""
    torch.manual_seed(len(shape))
    out, block_out = torch.randn(shape), torch.randn(shape).to(block_dtype)
    lse = torch.randn(shape[:-1], dtype=torch.float64) * 20
    block_lse = (torch.randn(shape[:-1]) * 20).to(lse_dtype)
    lse.view(-1)[::3] = -torch.inf
    block_lse.view(-1)[::2] = -torch.inf
    out[lse == -torch.inf] = 0
    block_out[block_lse == -torch.inf] = 0
    wanted = out.clone(), lse.clone()
    merge_eager_(*wanted, block_out, block_lse)
    launch_merge(out, lse, block_out, block_lse)
    # weights are float64 in both, and rounded to float32 before two products and a sum
    torch.testing.assert_close(out, wanted[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, wanted[1], rtol=1e-12, atol=1e-12)


def compile_for(capability: int) -> None:
    """PTX and machine code for head sizes and dtypes as they occur."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for value_dim in (64, 80, 128):
        for block_dtype in (torch.float32, torch.bfloat16):
            for lse_dtype in (torch.float32, torch.float64):
                pointers = {
                    "out": "*fp32",
                    "lse": "*fp64",
                    "block_out": DTYPES[block_dtype],
                    "block_lse": DTYPES[lse_dtype],
                }
                constants = constants_for(value_dim)
                signature = pointers | {"rows": "i32"} | dict.fromkeys(constants, "constexpr")
                source = ASTSource(merge_kernel, signature, {(5 + n,): v for n, v in enumerate(constants.values())})
                made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
                assert f"sm_{capability}" in made.asm["ptx"]
                assert made.asm["cubin"]


if __name__ == "__main__":
    if sys.argv[1] == "values":
        values()
    else:
        compile_for(int(sys.argv[2]))
    sys.stdout.write("as expected\n")
