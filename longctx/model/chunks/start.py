"""The residual stream of a forward pass, in the store that its ``Execution`` names."""

from __future__ import annotations

from torch import Tensor

from longctx.model.chunks.disk import DiskStore, disk_in
from longctx.model.chunks.store import ChunkStore, DeviceStore, HostMemory
from longctx.model.chunks.stream import ResidualStream, split_tokens
from longctx.model.copies import Copies
from longctx.model.training_pass import Execution


def new_stream(execution: Execution, tokens_Bt: Tensor) -> ResidualStream | None:
    """The residual stream of these tokens; None where layers take them whole (``Execution.chunk_tokens``)."""
    if not execution.chunk_tokens:
        return None
    num_tokens = tokens_Bt.shape[1]
    store: ChunkStore = DeviceStore()
    chunks = split_tokens(num_tokens, execution.chunk_tokens)
    if execution.store == "host":
        store = HostMemory(Copies(tokens_Bt.device))
    if execution.store == "disk":
        store = DiskStore(disk_in(execution.store_path), Copies(tokens_Bt.device), chunks)
    return ResidualStream(store, chunks, num_tokens, execution.head_groups)
