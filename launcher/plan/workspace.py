"""Memory that an attention kernel allocates inside one backward call, apart from its arguments and results.

PyTorch's allocator provides it, and an operator trace cannot see it. The tensors are those that the kernels' sources
allocate:

* ``flash2``, ``cuda_flash``: ``mha_varlen_bwd`` in flash-attention 2.8.3 (``csrc/flash_attn/flash_api.cpp``) and in
  PyTorch 2.11 to 2.13 (``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``). dq in float32 and a
  float32 number for each query and head, each with 128 more queries per sequence; if heads share keys, dk and dv for
  *every query head*, in the input dtype.
* ``flash3`` (``hopper/flash_api.cpp``), ``flash4`` (``flash_attn/cute/interface.py``): dq in float32 and two such
  numbers; if heads share keys, dk and dv for the key heads, in float32. Tiles have 128 rows at most.
* ``cudnn``: as cudnn-frontend (``scaled_dot_product_flash_attention.h``) reserves for a dense sequence: dq in float32
  and one such number. dk and dv for every query head are temporaries in the engine, and no source states the engine's
  own workspace: they are counted in full.
* ``flex``: a number for each query and head; the adapter's own forward pass and float32 temporaries
  (``kernels/attention/flash/flex.py``).

None of it has been measured on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.resolved import ResolvedConfig

_FLOAT32 = 4
_BLOCK = 128
"""Rows in a kernel's largest tile; each sequence is padded by as many."""
_MULTIPROCESSORS = 148
"""On a B200; an H100 has 132."""


@dataclass(frozen=True, kw_only=True)
class BackwardCall:
    """Shapes for one backward call, all sequences packed."""

    num_queries: int
    num_keys: int
    num_sequences: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    """Bytes per value in queries, keys and values."""


def expected_kernel(config: ResolvedConfig, device_type: str = "cuda") -> str:
    """Return the attention kernel that a run is expected to use if it leaves the choice to the machine.

    `make setup` does not install flash-attn, so ``auto`` is PyTorch's own kernel, or FlexAttention if that lacks the
    dtype or a score rule.
    """
    model, kernel = config.model, config.parallel.kernel
    if device_type == "cpu" or kernel != "auto":
        return kernel
    if config.train.dtype == "float32" or model.attention_softcap or model.position in ("alibi", "t5"):
        return "flex"
    if config.parallel.deterministic:
        return "flash2_deterministic"
    return "cuda_flash"


def backward_workspace(kernel: str, call: BackwardCall) -> int:
    """Return the bytes that this kernel allocates inside the call; 0 for a kernel made from plain operators."""
    if kernel not in _BY_KERNEL:
        return 0
    return _BY_KERNEL[kernel](call)


def _flash2(call: BackwardCall) -> int:
    return _flash2_sums(call, 1)


def _flash2_deterministic(call: BackwardCall) -> int:
    # One dq sum per group of multiprocessors, which would otherwise add to a single sum in any order.
    return _flash2_sums(call, -(-_MULTIPROCESSORS // (call.num_sequences * call.num_heads)))


def _flash2_sums(call: BackwardCall, sums: int) -> int:
    # The kernel takes one head size: values are padded to the query and key size.
    head = max(call.head_dim, call.value_dim)
    queries = (call.num_queries + _BLOCK * call.num_sequences) * call.num_heads
    return _FLOAT32 * queries * (sums * _rounded(head) + 1) + _of_query_heads(call, head, head)


def _flash3(call: BackwardCall) -> int:
    # flash-attn 4 pads by one tile more than there are sequences.
    added = _BLOCK * (call.num_sequences + 1)
    sizes = _FLOAT32 * (call.num_queries + added) * call.num_heads * (_rounded(call.head_dim) + 2)
    if call.num_heads != call.num_kv_heads:
        head = _rounded(call.head_dim) + _rounded(call.value_dim)
        sizes += _FLOAT32 * (call.num_keys + added) * call.num_kv_heads * head
    return sizes


def _cudnn(call: BackwardCall) -> int:
    dq = _FLOAT32 * call.num_queries * call.num_heads * (call.head_dim + 1)
    return dq + _of_query_heads(call, call.head_dim, call.value_dim)


def _flex(call: BackwardCall) -> int:
    values = call.num_queries * call.num_heads * call.value_dim
    # The adapter's output and its gradient; then two float32 copies and their product.
    return values * (2 * call.itemsize + 3 * _FLOAT32) + 2 * _FLOAT32 * call.num_queries * call.num_heads


def _of_query_heads(call: BackwardCall, head_dim: int, value_dim: int) -> int:
    """Return dk and dv bytes for every query head if heads share keys; they are then summed per key head."""
    if call.num_heads == call.num_kv_heads:
        return 0
    return call.itemsize * call.num_keys * call.num_heads * (head_dim + value_dim)


def _rounded(head_dim: int) -> int:
    step = 32
    if head_dim > 128:
        step = 64
    return -(-head_dim // step) * step


_BY_KERNEL = {
    "flash2": _flash2,
    "flash2_deterministic": _flash2_deterministic,
    "cuda_flash": _flash2,
    "flash3": _flash3,
    "flash4": _flash3,
    "flash4_deterministic": _flash3,
    "cudnn": _cudnn,
    "flex": _flex,
}
