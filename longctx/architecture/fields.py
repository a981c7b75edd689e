"""``ModelFields``: the fields that define a decoder, their roles, and values derived from them. Pure, no torch.

Rules, sizes and Hugging Face families use ``ModelFields``; ``longctx.config.ModelConfig`` is the same with its rules
checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

from longctx.architecture.rope import Rope

Role = Literal["function", "experts", "training", "length"]
"""What a field decides.

``function``: which function the weights are. ``experts``: the same, read only by models that have experts.
``training``: how weights start and how they are trained; the trained model is the same function without it.
``length``: how long the model's documents may be.
"""


def _training(default: Any) -> Any:
    """Return a field with the role ``training``."""
    return field(default=default, metadata={"role": "training"})


def _experts(default: Any) -> Any:
    """Return a field with the role ``experts``."""
    return field(default=default, metadata={"role": "experts"})


def _length(default: Any) -> Any:
    """Return a field with the role ``length``."""
    return field(default=default, metadata={"role": "length"})


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Width, depth and vocabulary."""

    vocab_size: int = 4096
    """Entries of the embedding table; at least the tokenizer's size."""
    hidden_size: int = 128
    """Model width M."""
    embedding_size: int = 0
    """Width of the embedding tables, which are projected to hidden_size behind them (ALBERT); 0 is hidden_size."""
    num_layers: int = 4
    """Decoder blocks."""
    encoder_layers: int = 0
    """Blocks of an encoder beside the decoder, whose layers read it by cross attention (Transformer, BART, T5); 0 for
    none."""
    mtp_layers: int = 0
    """Blocks behind the last layer for multi-token prediction, each of one token further ahead (DeepSeek-V3: 1). They
    have full attention, and experts if the model has any; they are trained by train.mtp_weight and do not generate."""
    shared_layers: bool = False
    """Whether all layers are one block with one set of weights (ALBERT)."""
    num_heads: int = 2
    """Query heads H."""
    num_kv_heads: int = 1
    """Key/value heads K; divides num_heads (K = H is multi-head, K = 1 multi-query attention)."""
    head_dim: int = 64
    """Width D of one query and key head; with latent attention its rotated channels included."""
    max_positions: int = _length(4096)
    """Longest document piece the model is meant for, in tokens; the size of a learned position table."""


@dataclass(frozen=True, kw_only=True)
class AttentionFields:
    """Attention of every layer: projections, scores, visible keys, latents."""

    qkv_bias: bool = True
    """Whether the query, key and value projections have a bias (with latent attention: those into latents)."""
    o_bias: bool = False
    """Whether attention's output projection has one."""
    qk_norm: str = "none"
    """RMSNorm of queries and keys before their positions: none, of each head (Qwen3), or of all heads together in
    full (OLMoE)."""
    v_norm: bool = False
    """Whether values are normed, head by head, without weights (Gemma 4)."""
    attention_scale: float = 0.0
    """Factor of the dot products; 0 is head_dim^-½."""
    attention_softcap: float = 0.0
    """Bound on attention scores, cap · tanh(score / cap) (Gemma 2)."""
    attention_gate: bool = False
    """Whether a sigmoid gate of the token scales attention's output in softmax layers, channel by channel
    (Qwen3-Next)."""
    sinks: bool = False
    """Whether each query head has a learned logit that takes a share of attention and gives nothing (GPT-OSS)."""
    causal: bool = True
    """Whether a token sees none behind it; if not, it sees both sides of its document (encoders, as BERT)."""
    layers: tuple[str, ...] = ("full",)
    """Kinds of attention layers, repeated over the depth: full, window, sparse (a window and every sparse_stride-th
    token before it), global (full, with heads of its own), linear (elu + 1 features, no softmax), gated_delta (Gated
    DeltaNet), kda (Kimi Delta Attention), mamba2 (Mamba-2: groups are key heads, the state's size is that of a key)."""
    window: int = 0
    """Tokens that a query of a window or sparse layer sees, itself included."""
    sparse_stride: int = 0
    """Distance of the tokens that a sparse layer sees beyond its window."""
    q_lora_rank: int = 0
    """Latent width of queries; 0 projects them at once (latent attention only)."""
    kv_lora_rank: int = 0
    """Latent width of keys and values: multi-head latent attention (DeepSeek-V2); 0 is grouped-query attention."""
    rope_head_dim: int = 0
    """Rotary channels of head_dim in latent attention; all heads share the keys of these channels."""
    value_head_dim: int = 0
    """Width of one value head in latent attention; 0 is head_dim."""


@dataclass(frozen=True, kw_only=True)
class DeltaFields:
    """Layers with a gated delta rule (kinds gated_delta, kda and mamba2): a state instead of keys and values."""

    delta_key_heads: int = 0
    """Query and key heads of these layers; 0 is num_heads."""
    delta_value_heads: int = 0
    """Value heads, a multiple of the key heads; 0 is as many."""
    delta_key_dim: int = 0
    """Width of one of their query and key heads; 0 is head_dim."""
    delta_value_dim: int = 0
    """Width of one of their value heads; 0 is that of a key head."""
    delta_conv: int = 4
    """Tokens that the convolution before the rule reads, the newest included; 1 weighs each token alone."""
    delta_norm_eps: float = 0.0
    """Epsilon of the norm inside of these layers; 0 is norm_eps."""
    delta_negative: bool = False
    """Whether a step may write up to twice the difference, so that a state can change its sign (Olmo-Hybrid)."""


@dataclass(frozen=True, kw_only=True)
class GlobalFields:
    """Layers of the kind global: full attention with its own number and size of heads (Gemma 4)."""

    global_head_dim: int = 0
    """Width of one of their heads; 0 is head_dim."""
    global_kv_heads: int = 0
    """Their key/value heads; 0 is num_kv_heads."""
    global_shared_values: bool = False
    """Whether their values are their keys, before norm and positions, without a projection of their own."""


@dataclass(frozen=True, kw_only=True)
class PositionFields:
    """Positions: how attention learns the order of tokens."""

    position: str = "rope"
    """Kind of positions: rope, learned, sinusoidal, sinusoidal_halves (sines before cosines, Marian), alibi, t5 (bias
    of distance buckets), relative (Transformer-XL), none."""
    rope: Rope = field(default_factory=Rope)
    """Rotary positions, and how they are stretched to longer sequences."""
    rope_layers: tuple[bool, ...] = (True,)
    """Which layers have rotary positions, repeated over the depth; false ones have no positions (NoPE)."""
    local_rope_theta: float = 0.0
    """Rotary base of window layers, which are not stretched then (Gemma 3); 0 treats them like all others."""
    position_offset: int = 0
    """learned: row of the table that position 0 reads (RoBERTa, BART: 2); those before it are nobody's."""
    relative_buckets: int = 32
    """t5: buckets of distances, each with a bias of its own."""
    relative_max_distance: int = 128
    """t5: distance from which on all share the last bucket."""


@dataclass(frozen=True, kw_only=True)
class BlockFields:
    """Norms and the dense FFN."""

    norm: str = "rmsnorm"
    """rmsnorm or layernorm."""
    norm_order: str = "pre"
    """Norm before each part (pre), after each sum (post), before and after each part (sandwich, Gemma 2), after each
    part alone (output, OLMo 2), or pre in layers with a gated delta rule and output in others (hybrid, OLMo Hybrid)."""
    norm_offset: bool = False
    """Whether norms multiply by 1 + weight (Gemma)."""
    norm_eps: float = 1e-6
    """Epsilon inside every norm."""
    activation: str = "swiglu"
    """Of the FFN: swiglu, geglu, geglu_tanh, swiglu_oai (GPT-OSS), all gated; gelu, gelu_tanh, relu, relu2, silu,
    not."""
    layer_scalars: bool = False
    """Whether a factor that is not trained scales what each layer gives (Gemma 4)."""
    ffn_size: int = 384
    """Width F of the dense FFN."""
    ffn_bias: bool = False
    """Whether the dense FFN's projections have a bias."""


@dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """Layers with a mixture of experts: the computation of the router and the experts."""

    num_experts: int = 0
    """Routed experts E a layer; 0 makes every FFN dense."""
    experts_per_token: int = _experts(2)
    """Routed experts of each token (top-k)."""
    expert_ffn_size: int = _experts(128)
    """Width F of one routed expert."""
    expert_bias: bool = _experts(False)
    """Whether experts' projections have a bias (GPT-OSS)."""
    shared_ffn_size: int = _experts(0)
    """Width of the shared expert, which every token is sent to; 0 for none."""
    shared_gate: bool = _experts(True)
    """Whether a sigmoid gate of the token scales the shared expert (Qwen2-MoE)."""
    dense_layers: tuple[int, ...] = _experts(())
    """Layers that have the dense FFN all the same."""
    score_function: str = _experts("softmax")
    """From router logits to scores: softmax over all experts, or a sigmoid of each (DeepSeek-V3)."""
    router_bias: bool = _experts(False)
    """Whether the router's logits have a learned bias (GPT-OSS)."""
    selection_bias: bool = _experts(False)
    """Whether a bias without gradient is added to scores where experts are chosen, not where they are weighed
    (DeepSeek-V3)."""
    expert_groups: int = _experts(1)
    """Groups of experts; a token chooses among those of groups_per_token groups (DeepSeek). A group's score is its best
    expert's, or with a selection bias the sum of its best two."""
    groups_per_token: int = _experts(1)
    """Groups that a token chooses among."""
    normalize_gates: bool = _experts(True)
    """Whether the chosen experts' gates are rescaled to sum to one."""
    routed_scale: float = _experts(1.0)
    """Factor of the gates, after they are rescaled."""


@dataclass(frozen=True, kw_only=True)
class RouterTrainingFields:
    """Training of the routers; evaluation reads none of these fields."""

    balance_loss_weight: float = _training(0.001)
    """Weight of the load-balancing loss."""
    balance_scope: str = _training("sequence")
    """Over what experts shall be loaded alike: sequence (each packed document by itself), micro_batch (of one data
    rank), or global_batch (the step; its load is the step before's)."""
    router_z_loss_weight: float = _training(0.0)
    """Weight of the squared log-sum-exp of the router's logits, a mean over tokens, summed over layers (ST-MoE:
    1e-3)."""
    selection_bias_rate: float = _training(0.0)
    """How far an expert's selection bias moves after each step, up when it got fewer tokens than the mean, down when
    more (DeepSeek-V3: 1e-3); 0 leaves it."""
    router_jitter: float = _training(0.0)
    """In training, what the router reads is multiplied by random factors of 1 ± this (Switch: 1e-2)."""
    capacity_factor: float = _training(0.0)
    """In training, most tokens of a row that one expert takes, over the mean load of the row's experts; the later
    tokens beyond it pass by. 0 is dropless."""


@dataclass(frozen=True, kw_only=True)
class StreamFields:
    """Residual stream, embeddings at both ends, and weight initialisation."""

    tie_embeddings: bool = True
    """Whether the output head is the embedding table."""
    segments: int = 0
    """Kinds of segments, each with an embedding that its tokens get (BERT: 2); 0 for none. Texts are of the first."""
    embedding_norm: bool = False
    """Whether a norm follows the sum of the embeddings (BERT)."""
    head_transform: bool = False
    """Whether a projection, the FFN's activation and a norm stand before the output head (BERT)."""
    head_bias: bool = False
    """Whether the output head has a bias (BERT)."""
    pair_head: str = "none"
    """What the first token says of two segments: whether the second follows the first (nsp, BERT), or whether they are
    in their order (sop, ALBERT); none has no head for it."""
    embedding_scale: float = 1.0
    """Factor of the embeddings (Gemma: the root of hidden_size)."""
    residual_scale: float = 1.0
    """Factor of what each part adds to the residual stream (muP in depth)."""
    logit_scale: float = 1.0
    """Factor of the logits (muP: base width over width)."""
    logit_softcap: float = 0.0
    """Bound on the logits, cap · tanh(logit / cap) (Gemma 2)."""
    residual_dropout: float = _training(0.0)
    """Probability that a value of the embeddings, or of what a part adds, is dropped in training."""
    init_std: float = _training(0.02)
    """Standard deviation of initial weights."""
    embedding_std: float = _training(0.0)
    """Standard deviation of initial token embeddings; 0 is init_std. 1, with a head of its own, keeps tokens apart in
    what a young model's routers read."""


class DeltaSizes(NamedTuple):
    """Sizes of a layer with a gated delta rule."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def channels(self) -> int:
        """Number of query, key and value channels, all of which pass through the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


# A dataclass collects the fields of its bases from last to first, so the fields are in the order above.
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
    Sizes,
):
    """All fields of a decoder, and values derived from several of them. Nothing is checked here.

    If a number is optional, 0 means that there is none (or the usual one). The defaults describe a small Qwen2: RMSNorm
    before each part, rotary positions, grouped-query attention, SwiGLU.
    """

    @property
    def embedding_dim(self) -> int:
        """Width of the embedding tables."""
        return self.embedding_size or self.hidden_size

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return self.value_head_dim or self.head_dim

    @property
    def is_latent(self) -> bool:
        """True if keys and values come from a latent (multi-head latent attention)."""
        return self.kv_lora_rank > 0

    @property
    def delta_sizes(self) -> DeltaSizes:
        """Sizes of layers with a gated delta rule."""
        key_heads, key_dim = self.delta_key_heads or self.num_heads, self.delta_key_dim or self.head_dim
        return DeltaSizes(
            key_heads, self.delta_value_heads or key_heads, key_dim, self.delta_value_dim or key_dim, self.delta_conv
        )

    @property
    def has_constant_gates(self) -> bool:
        """True if a token has one expert and its gates sum to one: the gate is 1 for any output of the router.

        The router then gets no gradient from the model's loss, only from its own losses.
        """
        return self.num_experts > 1 and self.experts_per_token == 1 and self.normalize_gates

    @property
    def rotary_size(self) -> int:
        """Number of rotary channels per head."""
        if self.is_latent:
            return self.rope_head_dim
        if self.position != "rope":
            return 0
        return self.rope.rotary_size(self.head_dim)

    @property
    def scale(self) -> float:
        """Factor on the dot products of queries and keys."""
        stretched = 1.0
        if self.position == "rope":
            stretched = self.rope.score_scale()
        return (self.attention_scale or self.head_dim**-0.5) * stretched

    @property
    def depth(self) -> int:
        """Number of blocks with their own weights: the layers, followed by those for multi-token prediction."""
        return self.num_layers + self.mtp_layers

    def layer_kind(self, layer: int) -> str:
        """Return the kind of this layer's attention."""
        if layer >= self.num_layers:
            return "full"
        return self.layers[layer % len(self.layers)]

    def has_rope(self, layer: int) -> bool:
        """Return whether this layer has rotary positions."""
        if self.position != "rope":
            return False
        return layer >= self.num_layers or self.rope_layers[layer % len(self.rope_layers)]

    def rope_of(self, layer: int) -> Rope:
        """Return the rotary positions of this layer."""
        # A window is never longer than the training documents, so its rotation is not stretched (Gemma 3).
        if self.local_rope_theta and self.layer_kind(layer) == "window":
            partial = 1.0 if self.rope.kind == "proportional" else self.rope.partial
            return Rope(theta=self.local_rope_theta, partial=partial, interleaved=self.rope.interleaved)
        return self.rope

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer's FFN is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers


F = TypeVar("F", bound=ModelFields)


def encoder_of(config: F) -> F:
    """Return the encoder as a model of its own: the decoder's config, bidirectional and with the encoder's depth."""
    return replace(config, causal=False, num_layers=config.encoder_layers, encoder_layers=0)


def decoder_of(config: F) -> F:
    """Return the decoder without its encoder and without cross attention."""
    return replace(config, encoder_layers=0)


def names_of_role(role: Role) -> frozenset[str]:
    """Return the names of the fields with this role."""
    return frozenset(f.name for f in fields(ModelFields) if f.metadata.get("role", "function") == role)
