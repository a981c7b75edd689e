"""ShardedKVCache: keys and values for a sequence that several ranks extend together; each token is on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from longctx.batch import Stream
from longctx.model.attention.kv_cache import KVCache, TokenChunk
from longctx.model.source import EncodedSource
from parallel.comm.messages.kinds import Kind
from parallel.layout.cached_layout import CachedLayout, ChunkPlacement, chunk_sizes
from parallel.layout.sequence import SequenceLayout, num_parts
from parallel.mesh import Mesh


class ShardedKVCache(KVCache):
    """This rank's keys and values per layer, and the tokens they belong to.

    A layout splits a prompt's chunks over the ranks; tokens that every rank processes are stored round-robin. So all
    ranks store equally many. Linear layers' states are small, and every rank holds all of them.
    """

    def __init__(self, mesh: Mesh, layout: str) -> None:
        """Create an empty cache; ``layout`` is the layout kind that splits chunks."""
        super().__init__()
        self.mesh, self.layout = mesh, layout
        self._tokens = CachedLayout()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that every layer has seen, on all ranks."""
        return self._tokens.num_tokens

    def new(self) -> ShardedKVCache:
        """Return an empty cache for the same ranks."""
        return ShardedKVCache(self.mesh, self.layout)

    def copy(self) -> ShardedKVCache:
        """Return a copy of this rank's tokens, in separate buffers."""
        other = super().copy()
        # CachedLayout is immutable, so sharing it is safe.
        other._tokens = self._tokens
        return other

    def encoded(self, source: Stream, encode: Callable[[Stream], EncodedSource]) -> EncodedSource:
        """Encode the source: each rank encodes its shard and gathers the others'. Collective."""
        mesh, group = self.mesh, self.mesh.context_group
        if group is None:
            return encode(source)
        # Pad so that the layout cuts the source into equal shards; the padding is dropped after the gather.
        parts = num_parts(self.layout, mesh.context, mesh.ulysses)
        padded = source.padded(-(-source.documents.num_tokens // parts) * parts)
        documents = padded.documents
        layout = SequenceLayout.build(
            self.layout, documents.num_tokens, mesh.context, documents, mesh.ulysses, causal=False
        )
        shard = padded.map_tokens(lambda x: layout.split(x, mesh.context_rank, 1))
        found = encode(replace(shard, placement=layout))
        gathered = mesh.comm.all_gather(
            found.hidden_BsM, group, operation="gathering encoded source shards", kind=Kind.CHUNK_VALUES
        )
        whole_BsM = layout.join(list(gathered), 1)[:, : source.documents.num_tokens]
        return replace(found, hidden_BsM=whole_BsM, documents=source.documents, placement=None)

    def free(self) -> None:
        """Drop all tokens."""
        super().free()
        self._tokens = CachedLayout()

    def chunks(self, num_tokens: int, chunk_tokens: int) -> Iterator[TokenChunk]:
        """Yield the next tokens as chunks with about ``chunk_tokens`` each; the last few go to every rank."""
        mesh, left = self.mesh, num_tokens
        for tokens, is_split in chunk_sizes(num_tokens, chunk_tokens, self.layout, mesh.context, mesh.ulysses):
            yield self._chunk(tokens, left, is_split=is_split)
            left -= tokens

    def extend(self, chunk: TokenChunk) -> None:
        """Record the chunk tokens that this rank has stored."""
        self._tokens = chunk.placement.after(self.mesh.context_rank)

    def collect(self, values_Bt: Tensor, chunk: TokenChunk) -> Tensor:
        """Gather the values for all chunk tokens, [B, T], from each rank's [B, t]. Collective."""
        layout, group = chunk.placement.layout, self.mesh.context_group
        if layout is None or group is None:
            return values_Bt
        gathered = self.mesh.comm.all_gather(
            values_Bt, group, operation="gathering a chunk's token values", kind=Kind.CHUNK_VALUES
        )
        return layout.join(list(gathered), 1)

    def once(self, choose: Callable[[], list[int]], count: int) -> list[int]:
        """Return the ``count`` integers that the sequence's first rank chooses, on all ranks. Collective."""
        group = self.mesh.control_group
        if group is None:
            return choose()
        # One rank chooses, so that all ranks continue with the same tokens.
        chosen = torch.zeros(count, dtype=torch.int64)
        if self.mesh.context_rank == 0:
            chosen[:] = torch.tensor(choose())
        self.mesh.comm.broadcast(chosen, self.mesh.context_peer(0), group, operation="waiting for the chosen token")
        return chosen.tolist()

    def _chunk(self, num_tokens: int, left: int, *, is_split: bool = False) -> TokenChunk:
        mesh, start, layout = self.mesh, self.num_tokens, None
        if is_split:
            layout = SequenceLayout.build(self.layout, num_tokens, mesh.context, None, mesh.ulysses)
        placement = ChunkPlacement(self._tokens, num_tokens, mesh.context, layout)
        given = placement.given(mesh.context_rank)
        return TokenChunk(
            start=start,
            num_tokens=num_tokens,
            sequence_tokens=start + left,
            given=tuple(range(run.start, run.stop, run.step) for run in given),
            is_replicated=not is_split,
            expected_tokens=self._expected,
            placement=placement,
        )
