"""Activation bytes saved for backward, and transient peaks, by arithmetic; checked against ``plan --trace``.

Bytes count one micro-batch on one rank. Sizes: M model width, F inner FFN width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.config.resolved import ResolvedConfig
from launcher.plan.encoder import encoder_run, num_source_tokens
from launcher.plan.parameters import build_stored, num_ffn_gradients, num_layer_gradients
from launcher.plan.stages import stage_runs
from launcher.plan.token_bytes import FLOAT32, TokenBytes
from launcher.plan.workspace import BackwardCall, backward_workspace, expected_kernel
from longctx.architecture.layer_specs import groups_of, layer_specs
from longctx.architecture.mixers.gated_delta_mixer import GatedDeltaMixer
from longctx.architecture.mixers.softmax_mixer import SoftmaxMixer
from longctx.architecture.model_rules import GATED
from longctx.config import ModelConfig
from longctx.kernels.cross_entropy import TILE_ELEMENTS, tokens_of_chunk
from longctx.kernels.quantized_weights import DEVICE_TILE_VALUES, TILE_BYTES
from longctx.model.chunks.token_table import SUMMED_VALUES, is_summed_by_rows
from longctx.model.stack import enters_by_rows

_LOGITS_OF_GPU = 1 << 29
"""Logits per chunk, at most (longctx/kernels/cross_entropy.py)."""
_BLOCK_OF_GPU = 1 << 27
"""Logits processed at once, in float32."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Activation bytes, excluding weights, gradients and optimizer."""

    kept: int
    """On the device between forward and backward."""
    kept_on_host: int
    kept_on_disk: int
    passing: int
    """Extra device bytes at the peak, in backward or in the loss."""


def activations(
    config: ResolvedConfig, tokens: int, *, ring: int, device_type: str = "cuda", num_documents: int = 1
) -> Activations:
    """Compute activation bytes for a micro-batch with ``tokens`` on each rank, in a ring with ``ring`` ranks.

    ``num_documents`` counts the documents with tokens on this rank.
    """
    stages = stage_runs(config)
    if len(stages) > 1:
        layers = [
            _Layers(stage, tokens // 4**number, ring, device_type, num_documents) for number, stage in enumerate(stages)
        ]
        return _of_stages(layers)
    own = _Layers(config, tokens, ring, device_type, num_documents).activations()
    of_source = encoder_run(config)
    if of_source is None:
        return own
    return _with_encoder(own, _Layers(of_source, num_source_tokens(config), ring, device_type, num_documents), config)


def _of_stages(stages: list[_Layers]) -> Activations:
    """Sum the stages of a hierarchical image model: backward frees them one after the other, the last one first."""
    kept = on_host = on_disk = 0
    peaks = []
    for number, stage in enumerate(stages):
        on_device, of_host, of_disk, stream = stage.split_by_store()
        # Indices of rows that stay on the rank, on the way to shifted windows and back.
        kept += stage.tokens * (sum(on_device) + 32)
        on_host, on_disk = on_host + stage.tokens * of_host, on_disk + stage.tokens * of_disk
        if not number:
            # The first norm's input.
            kept += stage.shared_of_step() + stage.tokens * stage.x
        if number < len(stages) - 1:
            # Between two stages, a merging saves the moved patches and the normed ones.
            stream = 2 * stage.x
        kept += stage.tokens * stream
        peaks += [kept + point for layer in stage.per_kind() for point in stage.points(layer)]
    return Activations(kept=kept, kept_on_host=on_host, kept_on_disk=on_disk, passing=max(0, max(peaks) - kept))


def _with_encoder(decoder: Activations, encoder: _Layers, config: ResolvedConfig) -> Activations:
    """Combine both stacks: the encoder's activations stay saved while the decoder runs, and its backward comes last."""
    kept, on_host, on_disk = encoder.kept_of_layers()
    # The encoder's output, which the decoder's layers read, and its gradient.
    kept += 2 * encoder.tokens * encoder.x
    if config.train.keep == "all" and not encoder.chunked:
        # Cross-attention keys and values for each layer.
        kept += config.model.num_layers * encoder.tokens * encoder.kv
    last = max(kept + point for layer in {0, encoder.model.num_layers - 1} for point in encoder.points(layer))
    peak = max(decoder.kept + decoder.passing + kept, last)
    return Activations(
        kept=decoder.kept + kept,
        kept_on_host=decoder.kept_on_host + on_host,
        kept_on_disk=decoder.kept_on_disk + on_disk,
        passing=peak - decoder.kept - kept,
    )


class _Layers(TokenBytes):
    """A model's layers over a rank's tokens; sums are bytes per token unless stated otherwise."""

    def __init__(
        self, config: ResolvedConfig, tokens: int, ring: int, device_type: str, num_documents: int = 1
    ) -> None:
        super().__init__(config)
        self.tokens, self.ring, self.device_type = tokens, ring, device_type
        self.num_documents = num_documents

    def activations(self) -> Activations:
        """Return the bytes for all layers and the head."""
        model, train = self.model, self.config.train
        layers = [self.kept_of(layer) for layer in range(model.depth)]
        heads, weights = 1 + model.mtp_layers, model.head_rows * model.embedding_dim
        by_rows = sums_head_by_rows(self.config, model)
        head = 0 if by_rows or model.adapter.is_used else heads * weights * FLOAT32
        shared = self.shared_of_step()
        kept = shared + self._under_way()
        if model.num_experts:
            # The current layer's expert choices and gates, and their order.
            shared += self.tokens * 2 * self.routing()
            if not self.chunked or train.store == "device":
                kept = shared
        last = self.x
        if self.chunked:
            # The gradient overwrites the last layer's output.
            last = 0
        after_last = self._mtp_bytes() + self._forks() + by_rows * heads * self.x
        on_device, on_host, on_disk, stream = self._split_by_store(layers, after_last)
        kept += self.tokens * (sum(on_device) + last + stream) + head
        # In the last layer's backward, the head's gradient and the last norm's input are already freed.
        below = self.tokens * sum(on_device) + shared
        if not self.chunked:
            below += self.tokens * stream
        if train.store == "host" and not self.chunked and len(layers) > 1:
            below += self.tokens * layers[-2]
        peaks = [kept + loss_bytes(self.config, self.tokens, self.device_type)]
        if by_rows:
            # The gradient in the weight's dtype, another one that it is added to, and a range of summed rows with their
            # logits.
            rows = self.chunk() * SUMMED_VALUES // model.embedding_dim
            peaks.append(kept + min(2, heads) * weights * self.width + (SUMMED_VALUES + 2 * rows) * FLOAT32)
        values = self._dequantized()
        peaks += [below + values + point for layer in self.per_kind() for point in self.points(layer)]
        peaks.append(shared + self._embeddings())
        return Activations(
            kept=kept,
            kept_on_host=self.tokens * on_host,
            kept_on_disk=self.tokens * on_disk,
            passing=max(0, max(peaks) - kept),
        )

    def kept_of_layers(self) -> tuple[int, int, int]:
        """Return bytes for all layers without a head: on the device, on the host, and on disk."""
        on_device, on_host, on_disk, stream = self.split_by_store()
        on_device_now = self.tokens * (sum(on_device) + stream) + self.shared_of_step()
        return on_device_now, self.tokens * on_host, self.tokens * on_disk

    def split_by_store(self) -> tuple[list[int], int, int, int]:
        """Split all layers' bytes per token into device, host and disk; return also the residual stream's bytes."""
        return self._split_by_store([self.kept_of(layer) for layer in range(self.model.num_layers)])

    def points(self, layer: int) -> list[int]:
        """Return bytes at the points in a layer's backward that may be the peak."""
        model, core = self.model, self.core(layer)
        if self.chunked:
            return [self._ffn_of_chunk(layer), self._attention_by_groups(layer)]
        again = 0
        if self.config.train.keep != "all":
            # Recomputation saves the inputs to both norms, attention and FFN, and queries, keys and values.
            again = 3 * self.x + self.before_core(layer) + core.output_saved
        result = 0
        if self.config.train.keep == "inputs" or (self.config.train.keep == "attention" and self.is_window(layer)):
            result = core.out + core.lse
        again += result
        ffn = self.tokens * again + self._ffn(layer, self.tokens)
        if model.has_experts(layer):
            ffn += self.tokens * self.x
        # By then the FFN's inputs are freed, and so are plain copies of queries, keys and values.
        norms = self.before_core(layer) - core.q - core.kv
        attention = self.tokens * (self.x + norms + self._core_backward(layer))
        if not self.is_window(layer):
            attention += self.tokens * result
        if self.config.train.keep == "all":
            # Saved activations in ``below`` that are freed by then or counted again here.
            attention -= self.tokens * (
                2 * self.x + self.saved_of_ffn(layer) + self.before_core(layer) + core.output_saved
            )
            if self.is_window(layer):
                attention -= self.tokens * core.lse
        return [ffn, attention]

    def _core_backward(self, layer: int, groups: tuple[int, int] = (1, 1)) -> int:
        """Return bytes for a core's backward, including queries, keys and values, but not the saved output.

        ``groups`` counts groups of query heads and of key heads.
        """
        core = self.core(layer).of_group(*groups)
        if self.is_delta(layer):
            # Inputs, their gradients and the output's; values recomputed per chunk group do not grow with the tokens.
            return 2 * (core.q + core.kv + core.out)
        if self.is_window(layer):
            # The softmax with its gradients before and after it in float32, and one of them rounded.
            scores = core.lse // (FLOAT32 + self.width)
            return core.q + core.kv + 2 * core.out + scores * (3 * FLOAT32 + self.width)
        # The factors below match ring traces: a middle rank has more keys in flight, the last rank more queries at
        # once.
        heads, keys, model = core.q + core.out, core.kv, self.model
        padded = 0
        if model.value_dim != model.head_dim:
            # Values, their gradients, and attention's output with its gradient, padded to the query width.
            padded = 2 * model.num_kv_heads * model.head_dim * self.width // groups[1] + core.q
        if self.ring == 1 and self.device_type == "cpu":
            # One row range at a time; gradients in float32, then in the dtype passed on.
            grads = (core.q + keys) * FLOAT32 // self.width
            if self.width < FLOAT32:
                grads += core.q + keys
            return core.q + keys + core.out + grads + padded
        within = self._within_kernel(layer, groups) + padded
        if self.ring == 1:
            return max(5 * heads // 2 + 4 * keys + padded, within)
        if self.config.parallel.transport == "all_gather":
            # All keys and values at once, with their gradients in float32.
            keys += core.kv * (self.ring - 1) * (1 + 2 * FLOAT32 // self.width) // 8
        return max(max(11 * heads // 4 + 12 * keys, 7 * heads // 2 + 17 * keys // 2) + padded, within)

    def _ffn_of_chunk(self, layer: int) -> int:
        chunk = self.chunk()
        core = self.core(layer)
        saved = 6 * self.x + self.before_core(layer) + core.out + core.output_saved
        # The input's gradient replaces the output's, chunk by chunk.
        ffn = 2 * chunk * saved + self._ffn(layer, chunk) + self._stored(self.x + core.out)
        # Weights before the core get their gradients later.
        after_core = num_ffn_gradients(self.config, layer) + core.out // self.width * self.model.hidden_size
        return ffn + after_core * FLOAT32

    def chunk(self) -> int:
        """Return tokens per chunk."""
        return min(self.config.train.chunk_tokens, self.tokens)

    def _attention_by_groups(self, layer: int) -> int:
        # The next group's tensors are being fetched; with device storage this group's are counted in ``stored``
        # already.
        core = self.core(layer)
        passed = core.q + core.kv + core.out
        groups = self._groups(layer)
        one = core.of_group(*groups)
        prefetched = one.q + one.kv + 2 * one.out + one.lse
        if self.config.train.store == "device":
            prefetched = -(one.q + one.kv + one.out)
        if groups[0] > groups[1] and self.config.train.store == "device":
            # Float32 gradients for keys and values that several groups read.
            prefetched += one.kv * FLOAT32 // self.width
        of_group = self.tokens * (prefetched + self._core_backward(layer, groups))
        stored = self._stored(self.x + passed)
        if self.config.train.store == "host" and self.device_type == "cpu":
            # On a CPU the host store shares the device's memory.
            stored = self.tokens * passed
        # By then the FFN's gradients are complete, and rounded.
        finished = num_ffn_gradients(self.config, layer) * (FLOAT32 - self.width)
        return of_group + stored + self._weight_sums(layer) - finished

    def _groups(self, layer: int) -> tuple[int, int]:
        """Return how many groups a layer's query heads and key heads are split into."""
        mixer, wanted = layer_specs(self.model)[layer].mixer, self.config.train.head_groups
        if isinstance(mixer, GatedDeltaMixer):
            one = groups_of(self.model.delta_sizes.key_heads, wanted)
            return one, one
        key_heads = mixer.key_heads(self.model).num_heads
        if self.model.is_latent:
            key_heads = self.model.num_heads
        return groups_of(self.model.num_heads, wanted), groups_of(key_heads, wanted)

    def shared_of_step(self) -> int:
        """Return bytes for rotary tables, ids, positions and pixels, which stay for the full step."""
        of_image = self.model.image.pixel_bytes
        if self.model.classes:
            of_image += 8  # labels
        return self.tokens * (self.model.rotary_size * FLOAT32 + 32 + of_image)

    def _under_way(self) -> int:
        """Return bytes for the residual stream's last two chunks, still in transfer to the store after forward."""
        if not self.chunked or self.config.train.store == "device" or self.device_type == "cpu":
            return 0
        return 2 * self.chunk() * self.x

    def _stored(self, per_token: int) -> int:
        """Return bytes passed between projections, core and FFN, if the device stores them."""
        if self.config.train.store != "device":
            return 0
        return self.tokens * per_token

    def _ffn(self, layer: int, tokens: int) -> int:
        """Return the bytes that an FFN's backward adds to its normed input and its output's gradient."""
        model, width = self.model, self.width
        if not model.has_experts(layer):
            factors = 5
            if model.activation not in GATED:
                # Input, output, and one gradient: the output's is read when the input's is written.
                factors = 3
            if self.config.train.keep == "all" and not self.chunked:
                factors -= self.saved_of_activation()
            return factors * model.ffn_size * width * tokens + model.ffn_size * self.x
        return self._experts(tokens)

    def _experts(self, tokens: int) -> int:
        """Return the same for an expert layer, which gathers assignments and computes weight gradients."""
        model, width = self.model, self.width
        tile = min(self.config.parallel.expert_tile_tokens or tokens, tokens)
        assignments = tile * model.experts_per_token
        inner = model.expert_ffn_size * width
        # After the second matmul: gate, up, their gradients, and both concatenated; tokens, and output gradients.
        of_tile = assignments * (6 * inner + 2 * self.x)
        weights = 3 * model.num_experts // self.config.parallel.expert * model.expert_ffn_size * model.hidden_size
        sums, bytes_of_weights = 0, width
        if tile < tokens:
            sums, bytes_of_weights = tokens * 2 * model.hidden_size * FLOAT32, width + FLOAT32
        shared = 5 * model.shared_ffn_size * width * tokens
        if model.adapter.is_used:
            # Instead A and B of both matrices: a scaled copy of A, gradients, and products with A and with B.
            rank, widths = model.adapter.rank, 2 * model.hidden_size + 3 * model.expert_ffn_size
            weights = model.num_experts // self.config.parallel.expert * rank * widths
            of_tile += 4 * assignments * rank * width
        return max(of_tile, shared) + sums + weights * bytes_of_weights

    def _dequantized(self) -> int:
        """Return bytes for the values of one quantized weight, which exist while a matmul reads them."""
        layouts = build_stored(self.config).layouts.values()
        if self.device_type == "cpu":
            # There experts are dequantized one by one; a grouped matmul reads all of a layer.
            sizes = [layout.matrix_numel for layout in layouts]
        else:
            sizes = [layout.numel for layout in layouts]
        largest = max(sizes, default=0)
        return largest * self.width + min(largest, DEVICE_TILE_VALUES) * TILE_BYTES

    def _weight_sums(self, layer: int) -> int:
        return num_layer_gradients(self.config, layer) * FLOAT32

    def _embeddings(self) -> int:
        """Return bytes at the end of backward: gradients for the embeddings, and for their table."""
        model = self.model
        if model.adapter.is_used:
            # A frozen table has no gradient, and its rows need none.
            return 0
        table, of_head = model.vocab_size * model.embedding_dim * self.width, 0
        if model.tie_embeddings:
            of_head = table
        if self.chunked and not model.residual_dropout and enters_by_rows(model):
            # Sums for some rows, and the gradients that one chunk adds to them.
            return table + of_head + 2 * SUMMED_VALUES * FLOAT32 + self.chunk() * model.hidden_size * FLOAT32
        return table + of_head + self.tokens * self.x

    def per_kind(self) -> set[int]:
        """Return the first and the last layer, and one layer with each mixer."""
        specs = layer_specs(self.model)
        return {0, len(specs) - 1} | set({spec.mixer: n for n, spec in enumerate(specs)}.values())

    def _mtp_bytes(self) -> int:
        """Return bytes per token saved between the blocks for multi-token prediction."""
        # Inputs to three norms, and to the projection, which is twice as wide.
        kept = 5 * self.x
        if self.chunked:
            # The block's input, the tensor concatenated with it, and the branch.
            kept = 3 * self.x
        return self.model.mtp_layers * kept

    def _forks(self) -> int:
        """Return bytes per token of residual streams copied for heads beside the token head."""
        model = self.model
        if not self.chunked or not model.predicts_tokens:
            return 0
        return self.x * ((model.pair_head != "none") + (model.classes > 0))

    def _split_by_store(self, kept: list[int], extra_bytes: int = 0) -> tuple[list[int], int, int, int]:
        """Split the layers' bytes per token into device, host and disk; return also the rest that stays on the device.

        The rest is the residual stream and ``extra_bytes``, saved after the last layer; a disk, or a host with chunks,
        stores it too.
        """
        train = self.config.train
        if train.store == "disk":
            return [], 0, sum(kept) + self.x + extra_bytes, 0
        if train.store == "host" and self.chunked:
            return [], sum(kept) + self.x + extra_bytes, 0, 0
        if train.store == "host":
            return kept[-1:], sum(kept[:-1]), 0, self.x + extra_bytes
        return list(kept), 0, 0, self.x + extra_bytes

    def _within_kernel(self, layer: int, groups: tuple[int, int]) -> int:
        """Return bytes per token held while the kernel's backward runs in a layer.

        Includes queries, keys and values with their gradients, and the workspace, but not the saved output.
        """
        model, mixer = self.model, layer_specs(self.model)[layer].mixer
        core = self.core(layer).of_group(*groups)
        held = 2 * (core.q + core.kv) + core.out + core.lse // 2
        if self.ring > 1:
            # Float32 sums over hops, and the next hop's keys and values.
            held += (core.q + core.kv) * FLOAT32 // self.width + 2 * core.kv
        keys, value_dim = mixer.key_heads(model), model.value_dim
        if isinstance(mixer, SoftmaxMixer) and mixer.has_own_heads:
            value_dim = keys.head_dim
        call = BackwardCall(
            num_queries=self.tokens,
            num_keys=self.tokens,
            num_sequences=self.num_documents,
            num_heads=model.num_heads // groups[0],
            num_kv_heads=keys.num_heads // groups[1],
            head_dim=keys.head_dim,
            value_dim=value_dim,
            itemsize=self.width,
        )
        return held + backward_workspace(expected_kernel(self.config), call) // self.tokens


def sums_head_by_rows(config: ResolvedConfig, model: ModelConfig) -> bool:
    """Return True if the head's weight gradient is summed in ranges of rows, recomputing their logits."""
    is_large = is_summed_by_rows(model.head_rows * model.embedding_dim)
    return bool(config.train.chunk_tokens) and is_large and not model.head_bias and not model.adapter.is_used


def loss_bytes(config: ResolvedConfig, tokens: int, device_type: str) -> int:
    """Return loss bytes for a rank's ``tokens``, excluding gradients for hidden states and head."""
    if not config.model.predicts_tokens:
        return 0  # a class head has one logit per document and class
    tokens = math.ceil(tokens * config.head_share)
    if device_type == "cpu":
        return _on_cpu(config, tokens)
    logits = min(_LOGITS_OF_GPU, tokens * config.model.head_rows)
    chunk = logits * config.dtype.itemsize
    # Eager: a row range's float32 copies. Compiled: the full chunk's gradient.
    return chunk + max(3 * min(_BLOCK_OF_GPU, logits) * FLOAT32, chunk)


def _on_cpu(config: ResolvedConfig, tokens: int) -> int:
    """Return loss bytes on a CPU, with cache-sized row ranges: a chunk's logits and gradient, normed states, head."""
    model, width = config.model.config(), config.dtype.itemsize
    V, model_width = model.head_rows, model.embedding_dim
    normed, head = tokens * model.hidden_size * width, 0
    if model.head_transform:
        # The projection, its activation, and the norm's output.
        normed += 3 * tokens * model_width * width
    chunk = min(tokens_of_chunk(V, model_width, "cpu"), tokens)
    if width < FLOAT32 and config.train.products == "float32":
        # Tiles from the head's weight, and the chunk's hidden states, converted to float32.
        head = 2 * min(TILE_ELEMENTS, V * model_width) * FLOAT32 + chunk * model_width * FLOAT32
        width = FLOAT32
    elif width < FLOAT32:
        head = V * model_width * width
    return chunk * (V + model_width) * width + head + normed
