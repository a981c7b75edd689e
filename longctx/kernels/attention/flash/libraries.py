"""Flash-attention libraries: one entry per library that lists all its differences. A new library is a new entry.

All compute attention over packed sequences under one window, counted from the bottom-right corner, and return
log-sum-exps [H, n] in natural units. All arguments are passed by name, so a later version may append arguments.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from longctx.kernels.attention.kernel_interface import KernelRequest


def _serves_all(request: KernelRequest, generation: int) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class FlashLibrary:
    """Calling convention and limits for one library."""

    name: str
    """Kernel name."""
    load: Callable[[], Any]
    """Return the object that holds the two functions, or a one-line reason why they are unavailable."""
    forward: str
    """Name of the forward function over packed sequences."""
    backward: str
    arg_names: Mapping[str, str]
    """The library's argument names that differ from ours."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are the same in every call."""
    forward_constants: Mapping[str, Any] = field(default_factory=dict)
    open_side: int | None = -1
    """Window argument for an unbounded side."""
    clamps_windows: bool = False
    """Whether the library treats a bound of ``max_seqlen_k`` or more as unbounded, and replaces an open side with
    ``max_seqlen_k`` if the other side is bounded. Both break sequences with more queries than keys, so the adapter
    passes the larger of both maxima."""
    writes_gradients: bool = False
    """Whether backward writes into tensors passed to it; otherwise it returns new ones."""
    needs_rng_state: bool = False
    """Whether backward requires the dropout random state."""
    has_deterministic: bool = True
    """Whether backward takes ``deterministic``."""
    never_repeats: str | None = None
    """Reason for rejecting every deterministic request, regardless of backward's arguments."""
    unsupported_rules: tuple[str, ...]
    """Unsupported score rules."""
    generations: tuple[int, int | None]
    """First and last supported major compute capability; None leaves the range open."""
    head_sizes: Callable[[int, int, int], tuple[int, int] | None]
    """(query head, value head, generation) → padded sizes; None if no size is large enough."""
    refuses: Callable[[KernelRequest, int], str | None] = _serves_all
    """Return why it cannot serve a request on a supported generation; None if it can."""
    install: str | None = None
    """Install command, if one is needed."""


@lru_cache(maxsize=16)
def import_library(name: str) -> ModuleType | str:
    """Import and return the module, or return a one-line reason why the import failed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # built for another PyTorch or driver
        # ``auto`` logs this reason on one line and tries the next kernel
        lines = str(error).splitlines() or [type(error).__name__]
        return f"{name} cannot be imported ({lines[0]})"


# --- head sizes: multiples of 8 ------------------------------------------------------------------------------------


def _multiple_of_8(size: int) -> int:
    return -(-size // 8) * 8


def _equal_sizes(head_dim: int, value_dim: int, generation: int) -> tuple[int, int] | None:
    size = _multiple_of_8(max(head_dim, value_dim))
    return size, size


def _flash4_sizes(head_dim: int, value_dim: int, generation: int) -> tuple[int, int] | None:
    D, V = _multiple_of_8(head_dim), _multiple_of_8(value_dim)
    largest = max(D, V)
    if largest > 256 or (generation == 12 and largest > 128):
        return None
    if generation == 12:  # consumer Blackwell
        return largest, largest
    # Hopper takes any two sizes, Blackwell any two up to 128 and two larger pairs
    if generation == 9 or largest <= 128:
        return D, V
    if D <= 192 and V <= 128:
        return 192, 128
    return 256, 256


# --- the entries -----------------------------------------------------------------------------------------------------


def _load_flash2() -> Any:
    package = import_library("flash_attn")  # flash-attn 4 alone is a package of this name without a version
    if isinstance(package, str):
        return package
    version = getattr(package, "__version__", None)
    if version is None:
        return "flash_attn (2) is not installed"
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 7):
        return f"flash_attn {version} is too old; 2.7 or newer is needed"
    return import_library("flash_attn.flash_attn_interface")


FLASH2 = FlashLibrary(  # flash_attn 2.7 to 2.8; older versions differ in windows and log-sum-exps
    name="flash2",
    load=_load_flash2,
    forward="_flash_attn_varlen_forward",
    backward="_flash_attn_varlen_backward",
    arg_names={"scale": "softmax_scale", "lse": "softmax_lse"},
    constants={"dropout_p": 0.0, "causal": False, "alibi_slopes": None},  # the window makes it causal
    forward_constants={"return_softmax": False},
    clamps_windows=True,
    writes_gradients=True,
    unsupported_rules=("alibi", "relative_bias"),  # its ALiBi counts distances from the corner, not between tokens
    generations=(8, None),
    head_sizes=_equal_sizes,
    install="pip install flash-attn==2.8.3 --no-build-isolation",
)


def _load_flash3() -> Any:
    # Call the registered operators directly: the Python layer exists in two spellings, the operators in one.
    module = import_library("flash_attn_interface")
    if isinstance(module, str):
        return module
    operators = torch.ops.flash_attn_3
    if not hasattr(operators, "fwd") or not hasattr(operators, "bwd"):
        return "flash_attn_interface is not flash-attn 3: it registers no flash_attn_3 operators"
    return operators


def _flash3_sizes(head_dim: int, value_dim: int, generation: int) -> tuple[int, int] | None:
    D, V = _multiple_of_8(head_dim), _multiple_of_8(value_dim)
    if 128 < D <= 192 and 96 < V <= 128:
        return D, V
    return max(D, V), max(D, V)


FLASH3 = FlashLibrary(  # the hopper folder in flash-attn 2.8.3, and later flash_attn_3 packages
    name="flash3",
    load=_load_flash3,
    forward="fwd",
    backward="bwd",
    arg_names={"scale": "softmax_scale", "lse": "softmax_lse"},
    constants={"is_causal": False},  # the window makes it causal
    forward_constants={"num_splits": 1},  # by default it chooses how to split keys, and merges in another order
    writes_gradients=True,
    has_deterministic=False,
    never_repeats="flash-attn 3 up to 2.8.3 has a deterministic backward that reads uninitialized semaphores",
    unsupported_rules=("alibi", "relative_bias"),
    generations=(9, 9),
    head_sizes=_flash3_sizes,
    install="python setup.py install, in flash-attention's hopper folder",
)


def _load_flash4() -> Any:
    module = import_library("flash_attn.cute.interface")
    if isinstance(module, str):
        return module
    if not _supports_packed_sequences(module):
        return "flash_attn.cute is flash-attn 2's early version; flash-attn-4 is not installed, or was overwritten"
    return module


@lru_cache(maxsize=4)
def _supports_packed_sequences(module: ModuleType) -> bool:
    """Return whether this is flash-attn 4.

    flash-attn 2.8 ships a folder with the same name, but its backward does not take packed sequences.
    """
    return "cu_seqlens_q" in inspect.signature(module._flash_attn_bwd).parameters


def _flash4_refuses(request: KernelRequest, generation: int) -> str | None:
    if generation == 12 and "softcap" in request.rules:
        return "no soft cap on compute capability 12.x"
    if generation == 12 and request.deterministic:
        return "no deterministic backward on compute capability 12.x"
    return None


FLASH4 = FlashLibrary(  # flash-attn-4 4.0.0b36; compiles for seconds on each new head size, mask or dtype
    name="flash4",
    load=_load_flash4,
    forward="_flash_attn_fwd",
    backward="_flash_attn_bwd",
    arg_names={"scale": "softmax_scale"},
    forward_constants={"return_lse": True},
    open_side=None,
    unsupported_rules=("alibi", "relative_bias"),
    generations=(9, 12),
    head_sizes=_flash4_sizes,
    refuses=_flash4_refuses,
    install="pip install flash-attn-4==4.0.0b36",
)


def _load_aten() -> Any:
    if not torch.backends.cuda.is_flash_attention_available():
        return "this PyTorch was built without flash attention"
    return torch.ops.aten


CUDA_FLASH = FlashLibrary(  # PyTorch 2.11 to 2.13: contains flash-attn 2, with its quirks
    name="cuda_flash",
    load=_load_aten,
    forward="_flash_attention_forward",
    backward="_flash_attention_backward",
    arg_names={
        "q": "query",
        "k": "key",
        "v": "value",
        "dout": "grad_out",
        "lse": "logsumexp",
        "cu_seqlens_q": "cum_seq_q",
        "cu_seqlens_k": "cum_seq_k",
        "max_seqlen_q": "max_q",
        "max_seqlen_k": "max_k",
    },
    constants={"dropout_p": 0.0, "is_causal": False},
    forward_constants={"return_debug_mask": False},
    clamps_windows=True,
    needs_rng_state=True,
    has_deterministic=False,
    unsupported_rules=("softcap", "alibi", "relative_bias"),
    generations=(8, None),
    head_sizes=_equal_sizes,
)
