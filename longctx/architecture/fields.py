"""``ModelFields``: a decoder's defining fields, their roles, and derived values. Imports no tensor library.

Rules, sizes and Hugging Face families use ``ModelFields``; ``longctx.config.ModelConfig`` adds validation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

from longctx.architecture.adapter import AdapterShape
from longctx.architecture.image import ImageShape
from longctx.architecture.rope import Rope

Role = Literal["function", "experts", "training", "length"]
"""How a field affects the model.

``function``: it changes the function that the weights compute. ``experts``: the same, but only models with experts read
it. ``training``: it sets initialization or training; the trained model computes the same function without it.
``length``: it bounds document length.
"""


# Fields without one of these helpers have the role ``function``.
def _training(default: Any) -> Any:
    return field(default=default, metadata={"role": "training"})


def _experts(default: Any) -> Any:
    return field(default=default, metadata={"role": "experts"})


def _length(default: Any) -> Any:
    return field(default=default, metadata={"role": "length"})


@dataclass(frozen=True, kw_only=True)
class SizeFields:
    """Width, depth and vocabulary."""

    vocab_size: int = 4096
    """Embedding table entries; at least the tokenizer's size. 0 for a model of patches."""
    hidden_size: int = 128
    """Model width M."""
    embedding_size: int = 0
    """Embedding table width, projected to hidden_size afterwards (ALBERT); 0 uses hidden_size."""
    num_layers: int = 4
    """Decoder blocks."""
    encoder_layers: int = 0
    """Encoder blocks that the decoder reads by cross attention (Transformer, BART, T5); 0 for no encoder."""
    mtp_layers: int = 0
    """Multi-token prediction blocks after the last layer, each for one token further ahead (DeepSeek-V3: 1). They have
    full attention, and experts if the model has any; train.mtp_weight trains them, and generation skips them."""
    shared_layers: bool = False
    """Share one block's weights between all layers (ALBERT)."""
    num_heads: int = 2
    """Query heads H."""
    num_kv_heads: int = 1
    """Key/value heads K; divides num_heads (K = H is multi-head, K = 1 multi-query attention)."""
    head_dim: int = 64
    """Size D for each query and key head; includes rotated channels in latent attention."""
    max_positions: int = _length(4096)
    """Longest intended document piece in tokens; also the size for a learned position table."""


@dataclass(frozen=True, kw_only=True)
class ImageFields:
    """Images instead of texts."""

    image: ImageShape = field(default_factory=ImageShape)
    """Images that the model reads, and how they become tokens."""


@dataclass(frozen=True, kw_only=True)
class AdapterFields:
    """Adapters that are trained instead of the model's own weights."""

    adapter: AdapterShape = field(default_factory=AdapterShape)
    """Low-rank adapters (LoRA) in the model's blocks."""


@dataclass(frozen=True, kw_only=True)
class AttentionFields:
    """Attention in every layer: projections, scores, visible keys, latents."""

    qkv_bias: bool = True
    """Add biases to the query, key and value projections (with latent attention: to the projections into latents)."""
    o_bias: bool = False
    """Add a bias to attention's output projection."""
    qk_norm: str = "none"
    """RMSNorm on queries and keys before positions are applied: none, head (per head, Qwen3) or full (over all heads
    together, OLMoE)."""
    v_norm: bool = False
    """Normalize values per head, without weights (Gemma 4)."""
    attention_scale: float = 0.0
    """Factor on query-key dot products; 0 uses head_dim^-½."""
    attention_softcap: float = 0.0
    """Soft cap on attention scores, cap · tanh(score / cap) (Gemma 2); 0 disables it."""
    attention_gate: bool = False
    """Scale attention's output per channel by a sigmoid gate computed from the token, in softmax and linear layers
    (Qwen3-Next)."""
    sinks: bool = False
    """Give each query head a learned logit that takes a share in the softmax and adds no value (GPT-OSS)."""
    causal: bool = True
    """Let a token see only itself and earlier tokens; false shows it both sides in its document (encoders such as
    BERT)."""
    layers: tuple[str, ...] = ("full",)
    """Attention layer kinds, repeated over the depth: full, window, sparse (a window and every sparse_stride-th token
    before it), global (full, with its own heads), linear (elu + 1 features, no softmax), gated_delta (Gated DeltaNet),
    kda (Kimi Delta Attention), mamba2 (Mamba-2: groups are key heads, the state size is the key size), image_window
    and shifted_window (square windows of patches, Swin)."""
    window: int = 0
    """Tokens that a query sees in window and sparse layers, including itself."""
    sparse_stride: int = 0
    """Distance between tokens that a query sees beyond the window in sparse layers."""
    q_lora_rank: int = 0
    """Query latent width; 0 projects queries directly (latent attention only)."""
    kv_lora_rank: int = 0
    """Key/value latent width for multi-head latent attention (DeepSeek-V2); 0 selects grouped-query attention."""
    rope_head_dim: int = 0
    """Rotary channels within head_dim for latent attention; all heads share the keys in these channels."""
    value_head_dim: int = 0
    """Value head size in latent attention; 0 uses head_dim."""


@dataclass(frozen=True, kw_only=True)
class DeltaFields:
    """Layers with a gated delta rule (kinds gated_delta, kda and mamba2): a state instead of keys and values."""

    delta_key_heads: int = 0
    """Query and key heads in these layers; 0 uses num_heads."""
    delta_value_heads: int = 0
    """Value heads, a multiple of the key heads; 0 uses the key head count."""
    delta_key_dim: int = 0
    """Query and key head size; 0 uses head_dim."""
    delta_value_dim: int = 0
    """Value head size; 0 uses the key head size."""
    delta_conv: int = 4
    """Convolution width before the rule in tokens, including the newest; 1 weighs each token alone."""
    delta_norm_eps: float = 0.0
    """Norm epsilon inside these layers; 0 uses norm_eps."""
    delta_negative: bool = False
    """Let a step write up to twice the difference, so that a state can change its sign (Olmo-Hybrid)."""


@dataclass(frozen=True, kw_only=True)
class GlobalFields:
    """Layers with kind global: full attention with its own head count and size (Gemma 4)."""

    global_head_dim: int = 0
    """Head size in these layers; 0 uses head_dim."""
    global_kv_heads: int = 0
    """Key/value heads in these layers; 0 uses num_kv_heads."""
    global_shared_values: bool = False
    """Use keys as values, before norm and positions, without a value projection."""


@dataclass(frozen=True, kw_only=True)
class PositionFields:
    """Positions: how attention learns token order."""

    position: str = "rope"
    """Position kind: rope, learned, sinusoidal, sinusoidal_halves (sines before cosines, Marian), alibi, t5 (bias per
    distance bucket), relative (Transformer-XL), none."""
    rope: Rope = field(default_factory=Rope)
    """Rotary positions and their context extension."""
    rope_layers: tuple[bool, ...] = (True,)
    """Layers with rotary positions, repeated over the depth; false layers have no positions (NoPE)."""
    local_rope_theta: float = 0.0
    """Rotary base for window layers, which then skip context extension (Gemma 3); 0 treats them like all others."""
    position_offset: int = 0
    """learned: table row for position 0 (RoBERTa, BART: 2); earlier rows stay unused."""
    relative_buckets: int = 32
    """t5: distance buckets, each with its own bias."""
    relative_max_distance: int = 128
    """t5: distance from which on all share the last bucket."""


@dataclass(frozen=True, kw_only=True)
class BlockFields:
    """Norms and the dense FFN."""

    norm: str = "rmsnorm"
    """Norm type: rmsnorm or layernorm."""
    norm_order: str = "pre"
    """Norm placement: before each sublayer (pre), after each residual sum (post), before and after each sublayer
    (sandwich, Gemma 2), only after each sublayer (output, OLMo 2), or pre in layers with a gated delta rule and output
    in others (hybrid, OLMo Hybrid)."""
    norm_offset: bool = False
    """Multiply by 1 + weight in norms (Gemma)."""
    norm_eps: float = 1e-6
    """Epsilon inside every norm."""
    activation: str = "swiglu"
    """FFN activation: swiglu, geglu, geglu_tanh and swiglu_oai (GPT-OSS) are gated; gelu, gelu_tanh, quick_gelu (Image
    GPT), relu, relu2 and silu are not."""
    layer_scalars: bool = False
    """Multiply each layer's output by a factor that is not trained (Gemma 4)."""
    ffn_size: int = 384
    """Dense FFN width F."""
    ffn_bias: bool = False
    """Add biases to the dense FFN's projections."""


@dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """Mixture-of-experts layers: router and expert computation."""

    num_experts: int = 0
    """Routed experts E per layer; 0 makes every FFN dense."""
    experts_per_token: int = _experts(2)
    """Routed experts per token (top-k)."""
    expert_ffn_size: int = _experts(128)
    """Routed expert width F."""
    expert_bias: bool = _experts(False)
    """Add biases to the experts' projections (GPT-OSS)."""
    shared_ffn_size: int = _experts(0)
    """Width for the shared expert, which every token uses; 0 disables it."""
    shared_gate: bool = _experts(True)
    """Scale the shared expert by a sigmoid gate computed from the token (Qwen2-MoE)."""
    dense_layers: tuple[int, ...] = _experts(())
    """Layer indices that keep the dense FFN in a model with experts."""
    score_function: str = _experts("softmax")
    """From router logits to scores: softmax over all experts, or a sigmoid per expert (DeepSeek-V3)."""
    router_bias: bool = _experts(False)
    """Add a learned bias to router logits (GPT-OSS)."""
    selection_bias: bool = _experts(False)
    """Add a bias without gradient to scores for expert selection, but not for gate values (DeepSeek-V3)."""
    expert_groups: int = _experts(1)
    """Expert groups; a token selects experts within groups_per_token groups (DeepSeek). A group's score is its best
    expert's, or with a selection bias the sum over its best two."""
    groups_per_token: int = _experts(1)
    """Expert groups that a token selects from."""
    normalize_gates: bool = _experts(True)
    """Rescale the selected experts' gates to sum to one."""
    routed_scale: float = _experts(1.0)
    """Factor on gates, after rescaling."""


@dataclass(frozen=True, kw_only=True)
class RouterTrainingFields:
    """Router training; evaluation reads none of these fields."""

    balance_loss_weight: float = _training(0.001)
    """Load-balancing loss weight."""
    balance_scope: str = _training("sequence")
    """Scope within which expert load is balanced: sequence (each packed document by itself), micro_batch (per data
    rank) or global_batch (the step, using the previous step's load)."""
    router_z_loss_weight: float = _training(0.0)
    """Router z-loss weight; the loss is the squared log-sum-exp over router logits, averaged over tokens and summed
    over layers (ST-MoE: 1e-3)."""
    selection_bias_rate: float = _training(0.0)
    """Selection bias change per step and expert: up if it received fewer tokens than the mean, down if more
    (DeepSeek-V3: 1e-3); 0 leaves the bias constant."""
    router_jitter: float = _training(0.0)
    """Multiply router inputs in training by random factors in 1 ± this (Switch: 1e-2)."""
    capacity_factor: float = _training(0.0)
    """Expert capacity in training: token limit per expert in a packed sequence, relative to the mean load of its
    experts; later tokens above the limit skip the expert. 0 is dropless."""


@dataclass(frozen=True, kw_only=True)
class StreamFields:
    """Residual stream, embeddings, output head and weight initialization."""

    tie_embeddings: bool = True
    """Tie the output head to the embedding table."""
    output_vocab_size: int = 0
    """Output head rows, for the first token ids; later ids are only read, such as the begin token that Image GPT never
    predicts. 0 uses vocab_size."""
    segments: int = 0
    """Segment types, each with its own embedding (BERT: 2); 0 disables them. Plain text uses the first."""
    embedding_norm: bool = False
    """Apply a norm after summing the embeddings (BERT)."""
    head_transform: bool = False
    """Apply a projection, the FFN's activation and a norm before the output head (BERT)."""
    head_bias: bool = False
    """Add a bias to the output head (BERT)."""
    pair_head: str = "none"
    """Two-segment classifier on the first token: whether the second segment follows the first (nsp, BERT) or both are
    in order (sop, ALBERT); none omits it."""
    token_head: bool = True
    """Predict tokens; false leaves the class head as the only one."""
    classes: int = 0
    """Classes of the class head; 0 omits it."""
    class_pool: str = "first"
    """Hidden state that the class head reads: the document's first token's (first), or the mean over the document's
    tokens (mean)."""
    class_bias: bool = True
    """Add a bias to the class head."""
    embedding_scale: float = 1.0
    """Factor on embeddings (Gemma: the square root of hidden_size)."""
    residual_scale: float = 1.0
    """Factor on each sublayer's contribution to the residual stream (muP in depth)."""
    logit_scale: float = 1.0
    """Factor on logits (muP: base width over width)."""
    logit_softcap: float = 0.0
    """Soft cap on logits, cap · tanh(logit / cap) (Gemma 2); 0 disables it."""
    residual_dropout: float = _training(0.0)
    """Dropout probability for embeddings and sublayer outputs in training."""
    init_std: float = _training(0.02)
    """Standard deviation for initial weights."""
    embedding_std: float = _training(0.0)
    """Standard deviation for initial token embeddings; 0 uses init_std. With an untied head, 1 keeps tokens apart in
    the router inputs early in training."""


class DeltaSizes(NamedTuple):
    """Sizes for a layer with a gated delta rule."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def channels(self) -> int:
        """Query, key and value channels, all of which pass through the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


# A dataclass collects fields from its last base to its first, so listing bases in reverse gives the order above.
@dataclass(frozen=True, kw_only=True)
class ModelFields(
    StreamFields,
    RouterTrainingFields,
    ExpertFields,
    BlockFields,
    PositionFields,
    GlobalFields,
    DeltaFields,
    AttentionFields,
    ImageFields,
    AdapterFields,
    SizeFields,
):
    """All decoder fields, and values derived from several of them. No validation happens here.

    For an optional number, 0 disables the feature or selects its usual value. The defaults describe a small Qwen2:
    pre-norm RMSNorm, rotary positions, grouped-query attention, SwiGLU.
    """

    @property
    def embedding_dim(self) -> int:
        """Embedding table width."""
        return self.embedding_size or self.hidden_size

    @property
    def predicts_tokens(self) -> bool:
        """True if the model has a token head."""
        return self.head_rows > 0

    @property
    def output_width(self) -> int:
        """Width of the last hidden states: each stage after the first doubles it."""
        return self.hidden_size * 2 ** max(0, len(self.image.depths) - 1)

    @property
    def head_rows(self) -> int:
        """Output head rows: one logit for each id below this number; 0 without a token head."""
        if not self.token_head:
            return 0
        return self.output_vocab_size or self.vocab_size

    @property
    def value_dim(self) -> int:
        """Value head size."""
        return self.value_head_dim or self.head_dim

    @property
    def is_latent(self) -> bool:
        """True if keys and values come from a latent (multi-head latent attention)."""
        return self.kv_lora_rank > 0

    @property
    def delta_sizes(self) -> DeltaSizes:
        """Sizes for gated delta layers, with defaults resolved."""
        key_heads, key_dim = self.delta_key_heads or self.num_heads, self.delta_key_dim or self.head_dim
        return DeltaSizes(
            key_heads, self.delta_value_heads or key_heads, key_dim, self.delta_value_dim or key_dim, self.delta_conv
        )

    @property
    def has_constant_gates(self) -> bool:
        """True if each token has one expert and a normalized gate, which is then 1 for any router output.

        The router then receives gradients only from its auxiliary losses, not from the model's loss.
        """
        return self.num_experts > 1 and self.experts_per_token == 1 and self.normalize_gates

    @property
    def rotary_size(self) -> int:
        """Rotary channels per head."""
        if self.is_latent:
            return self.rope_head_dim
        if self.position != "rope":
            return 0
        return self.rope.rotary_size(self.head_dim)

    @property
    def scale(self) -> float:
        """Factor on query-key dot products."""
        # DeepSeek's YaRN scales full scores as well, not only rotated channels.
        rope_scale = 1.0
        if self.position == "rope":
            rope_scale = self.rope.score_scale()
        return (self.attention_scale or self.head_dim**-0.5) * rope_scale

    @property
    def depth(self) -> int:
        """Blocks with their own weights: the layers, then the multi-token prediction blocks."""
        return self.num_layers + self.mtp_layers

    def layer_kind(self, layer: int) -> str:
        """Return this layer's attention kind."""
        # Multi-token prediction blocks follow the layers; the layer pattern does not cover them.
        if layer >= self.num_layers:
            return "full"
        return self.layers[layer % len(self.layers)]

    def has_rope(self, layer: int) -> bool:
        """Return True if this layer has rotary positions."""
        if self.position != "rope":
            return False
        return layer >= self.num_layers or self.rope_layers[layer % len(self.rope_layers)]

    def rope_of(self, layer: int) -> Rope:
        """Return this layer's rotary positions."""
        # A window is never longer than the training documents, so its rotation needs no scaling (Gemma 3).
        if self.local_rope_theta and self.layer_kind(layer) == "window":
            partial = 1.0 if self.rope.kind == "proportional" else self.rope.partial
            return Rope(theta=self.local_rope_theta, partial=partial, interleaved=self.rope.interleaved)
        return self.rope

    def has_experts(self, layer: int) -> bool:
        """Return True if this layer's FFN has routed experts."""
        return self.num_experts > 0 and layer not in self.dense_layers


F = TypeVar("F", bound=ModelFields)


def encoder_of(config: F) -> F:
    """Return the encoder as its own model: the decoder's config, bidirectional and with the encoder's depth."""
    # Only direction and depth differ: both stacks share widths, heads and vocabulary.
    return replace(config, causal=False, num_layers=config.encoder_layers, encoder_layers=0)


def decoder_of(config: F) -> F:
    """Return the decoder without its encoder and without cross attention."""
    return replace(config, encoder_layers=0)


def names_of_role(role: Role) -> frozenset[str]:
    """Return the field names with this role."""
    return frozenset(f.name for f in fields(ModelFields) if f.metadata.get("role", "function") == role)
