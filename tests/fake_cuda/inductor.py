"""Run as a program: the kernels that inductor writes for a block's regions, compiled for a GPU that is not there.

    python -m tests.fake_cuda.inductor 90 FOLDER

The regions are traced and differentiated on fake CUDA tensors, lowered to Triton's source, and that is compiled to
machine code. A stand-in says what a driver would: the device's properties, and that there is one.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.scheduler
import torch._inductor.utils
import torch.utils._triton
import triton
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longctx.config import ModelConfig
from longctx.kernels.regions import Regions
from longctx.model.block import Block
from longctx.model.decoder import Decoder
from longctx.model.rotary import RotaryTable
from tests.fake_cuda import say

CONFIG = ModelConfig(
    vocab_size=128,
    hidden_size=512,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=1376,
    qk_norm="head",
    qkv_bias=False,
)
TOKENS = 2048


class Driver:
    """What Triton and inductor ask of a driver while they compile."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self.utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 232_448})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0


def stand_in(capability: int) -> None:
    """Let there be a GPU of this compute capability, for everything that only asks."""
    properties = SimpleNamespace(
        name="none",
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=132,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
    )
    torch.cuda._lazy_init = lambda: None
    torch.cuda._get_device_properties = lambda _=None: properties  # type: ignore[attr-defined]
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda _=None: (properties.major, properties.minor)
    for module in (torch._inductor.scheduler, torch._inductor.utils, torch.utils._triton):
        if hasattr(module, "has_triton"):
            module.has_triton = lambda: True  # type: ignore[attr-defined]
    triton.runtime.driver.set_active(Driver(capability))
    triton_helpers.set_driver_to_gpu = lambda: None


def sources() -> list[str]:
    """The code of both regions' forward and backward graphs."""
    found: list[str] = []

    def lower(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        fake = detect_fake_mode(inputs)
        assert fake is not None
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=fake.shape_env)
        with V.set_fake_mode(fake), V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            found.append(lowering.codegen()[0].value)
        return graph.forward

    backend = aot_autograd(
        fw_compiler=lower,
        bw_compiler=lower,
        decompositions=select_decomp_table,
        partition_fn=min_cut_rematerialization_partition,
    )
    run = Regions(backend)  # type: ignore[arg-type]
    with FakeTensorMode(shape_env=ShapeEnv()):
        block, x, heads, table = inputs_of_block()
        q, k, v = run(Block.before_core, block, x, table, False)
        (q.sum() + k.sum() + v.sum()).backward()
        run(Block.after_core, block, x, heads, (None, None), False).sum().backward()
    return found


def inputs_of_block() -> tuple[Block, torch.Tensor, torch.Tensor, RotaryTable]:
    """A bfloat16 block, its input, its core's result, and the angles of positions."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        block = Decoder(CONFIG, seed=None).model.layers[0]
        x = torch.empty(1, TOKENS, CONFIG.hidden_size, requires_grad=True)
        heads = torch.empty(1, TOKENS, CONFIG.num_heads, CONFIG.head_dim, requires_grad=True)
        angles = torch.empty(1, TOKENS, 1, CONFIG.head_dim // 2, dtype=torch.float32)
    torch.set_default_dtype(torch.float32)
    assert isinstance(block, Block)
    return block, x, heads, RotaryTable(angles, angles.clone())


def compile_kernel(name: str, source: str, file: Path, capability: int) -> None:
    """Compile one kernel in the first of its configurations."""
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tuner = getattr(module, name)
    config, meta, kernel = tuner.configs[0], tuner.triton_meta, tuner.fn
    constants = {}
    for argument, value in {**meta["constants"], **config.kwargs}.items():
        if argument in kernel.arg_names:
            constants[kernel.arg_names.index(argument),] = value
    made = triton.compile(
        ASTSource(kernel, dict(meta["signature"]), constants, meta["configs"][0]),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    assert f"sm_{capability}" in made.asm["ptx"]
    assert made.asm["cubin"]


def main(capability: int, folder: Path) -> None:
    """Say how many kernels each graph has, once all are compiled."""
    stand_in(capability)
    for number, text in enumerate(sources()):
        kernels = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", text, re.DOTALL)
        for index, (name, source) in enumerate(kernels):
            compile_kernel(name, source, folder / f"graph_{number}_{index}.py", capability)
        say(len(kernels))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
