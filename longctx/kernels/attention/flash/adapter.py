"""flash-attn 2, 3 and 4 and PyTorch's CUDA flash operator behind our kernel interface: one adapter for a library table.

Axes: n query and m key rows packed for one call, H query heads, K key heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.flash.calls import UNBOUNDED, VarlenCall
from longctx.kernels.attention.flash.libraries import FlashLibrary
from longctx.kernels.attention.flash.varlen import HALF, ThreeTensors, VarlenKernel
from longctx.kernels.attention.kernel_interface import KernelRequest, ScoreRules


class FlashKernel(VarlenKernel):
    """Kernel for one library from the table: any mask; bfloat16 and float16 heads up to 256."""

    def __init__(
        self,
        library: FlashLibrary,
        ops: Any = None,
        *,
        capability: tuple[int, int] | None = None,
        deterministic: bool = False,
    ) -> None:
        """Create the kernel for ``library``.

        ``ops`` holds the library's functions (None: import them on first use), ``capability`` is the compute capability
        to assume (None: the current CUDA device's). A deterministic kernel has its own name, since it is slower:
        ``auto`` takes it only on request.
        """
        name = library.name
        if deterministic:
            name = f"{library.name}_deterministic"
        super().__init__(name, capability=capability)
        self.library, self.ops, self.deterministic, self.unsupported_rules = (
            library,
            ops,
            deterministic,
            library.unsupported_rules,
        )

    def supports(self, request: KernelRequest) -> str | None:
        return self.unsuited(request) or self.missing()

    def missing(self) -> str | None:
        """Return why the library is unavailable on this machine; None if it is available."""
        functions = self._functions()
        if isinstance(functions, str):
            return functions
        return None

    def unsuited(self, request: KernelRequest) -> str | None:
        """Return why this device could not serve the request even with the library installed; None if it could."""
        library = self.library
        if why := self.request_unsupported_reason(request, dtypes=HALF, largest_head=256):
            return why
        if request.deterministic and library.never_repeats is not None:
            return library.never_repeats
        if request.deterministic and not self.deterministic:
            if library.has_deterministic:
                return f"the backward is not bitwise reproducible; with {self.name}_deterministic it is"
            if not _is_process_deterministic():
                return "the backward is bitwise reproducible only after torch.use_deterministic_algorithms(True)"
        if why := self.device_unsupported_reason(request, library.generations):
            return why
        capability = self.device_capability()
        assert capability is not None
        return library.refuses(request, capability[0])

    def head_sizes(self, head_dim: int, value_dim: int) -> tuple[int, int] | None:
        capability = self.device_capability()
        if capability is None:
            return None
        return self.library.head_sizes(head_dim, value_dim, capability[0])

    def call_forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKV: Tensor, call: VarlenCall, scores: ScoreRules
    ) -> tuple[Tensor, Tensor]:
        arguments = {
            "q": q_nHD,
            "k": k_mKD,
            "v": v_mKV,
            **self._arguments(call, scores),
            **self.library.forward_constants,
        }
        results = self._call(self.library.forward, arguments)
        return results[0], results[1].transpose(0, 1)

    def call_backward(
        self, dout_nHV: Tensor, qkv: ThreeTensors, result: tuple[Tensor, Tensor], call: VarlenCall, scores: ScoreRules
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        library, (q_nHD, k_mKD, v_mKV), (out_nHV, lse_nH) = self.library, qkv, result
        arguments = {
            "dout": dout_nHV.to(q_nHD.dtype).contiguous(),
            "q": q_nHD,
            "k": k_mKD,
            "v": v_mKV,
            "out": out_nHV.to(q_nHD.dtype).contiguous(),
            "lse": lse_nH.transpose(0, 1).float().contiguous(),
            **self._arguments(call, scores),
        }
        if library.has_deterministic:
            arguments["deterministic"] = self.deterministic
        if library.needs_rng_state:
            # dropout state, never read
            state = torch.empty(2, dtype=torch.uint64, device=dout_nHV.device)
            arguments |= {"rng_state": state, "unused": state.new_empty(())}
        if library.writes_gradients:
            grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in qkv]
            arguments |= zip(("dq", "dk", "dv"), grads, strict=True)
            self._call(library.backward, arguments)
        else:
            grads = self._call(library.backward, arguments)
        return grads[0], grads[1], grads[2], None

    def _arguments(self, call: VarlenCall, scores: ScoreRules) -> dict[str, Any]:
        """Build the arguments that both passes share, under our names."""
        library = self.library
        longest = call.max_seqlen_k
        if library.clamps_windows and (call.left, call.right) != (UNBOUNDED, UNBOUNDED):
            longest = max(call.max_seqlen_q, call.max_seqlen_k)
        arguments = {
            "cu_seqlens_q": call.cu_seqlens_q,
            "cu_seqlens_k": call.cu_seqlens_k,
            "max_seqlen_q": call.max_seqlen_q,
            "max_seqlen_k": longest,
            "scale": scores.scale,
            "window_size_left": call.left,
            "window_size_right": call.right,
            **library.constants,
        }
        for side in ("window_size_left", "window_size_right"):
            if arguments[side] == UNBOUNDED:
                arguments[side] = library.open_side
        if "softcap" not in library.unsupported_rules:
            arguments["softcap"] = scores.softcap or 0.0
        return arguments

    def _call(self, function: str, arguments: dict[str, Any]) -> Any:
        functions, arg_names = self._functions(), self.library.arg_names
        if isinstance(functions, str):
            raise ConfigError(f"parallel.kernel={self.name}: {functions}. Try parallel.kernel=auto.")
        return getattr(functions, function)(**{arg_names.get(name, name): value for name, value in arguments.items()})

    def _functions(self) -> Any:
        """Return the object that holds the library's functions, or a string with the reason why it is unavailable."""
        return self.library.load() if self.ops is None else self.ops


def _is_process_deterministic() -> bool:
    """Return whether PyTorch requires deterministic operators: a process-wide switch that we never set."""
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled and not torch.is_deterministic_algorithms_warn_only_enabled()
