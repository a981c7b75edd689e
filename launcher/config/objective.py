"""Rules between the objective, causal or bidirectional attention, and the data."""

from __future__ import annotations

from launcher.config.config_sections import RunConfig
from launcher.config.data_section import DataSection
from launcher.config.image_objective import check_images
from launcher.config.preference_objective import check_preference_objective
from longctx.errors import ConfigError

_READ_BY = {
    "masked": ("mask_rate", "mask_whole_words", "mask_static"),
    "spans": ("mask_rate", "span_length"),
}
"""Keys in ``[data]`` that only these objectives read."""


def check_objective(config: RunConfig) -> None:
    """Raise ConfigError if the model can see its targets, or for options that the objective does not read."""
    _check_pairs(config)
    _check_pair_head(config)
    _check_mtp(config)
    _check_adapter(config)
    check_images(config)
    check_preference_objective(config)
    objective, causal = config.train.objective, config.model.causal
    if objective == "causal" and not causal:
        raise ConfigError(
            "train.objective=causal predicts the next token, but model.causal=false lets every token attend to it.\n"
            "Try --train.objective masked, or --model.causal true."
        )
    if objective == "masked" and causal:
        raise ConfigError(
            "train.objective=masked needs context on both sides, but a causal model attends only to earlier tokens.\n"
            "Try --model.causal false, or --train.objective causal."
        )
    if objective == "masked":
        # Creating the mask rule validates its values.
        assert config.mask is not None
        if config.validation.sample_tokens:
            raise ConfigError(
                f"validation.sample_tokens={config.validation.sample_tokens} needs a model that generates text, and "
                "a bidirectional one cannot. Set validation.sample_tokens=0."
            )
        if config.data.fim_rate:
            raise ConfigError(
                f"data.fim_rate={config.data.fim_rate} is for train.objective=causal: fill-in-the-middle needs a "
                "causal model. Set data.fim_rate=0."
            )
    # An option without effect is an error: its user expects one.
    for reader, names in _READ_BY.items():
        for name in names:
            value, default = getattr(config.data, name), getattr(DataSection(), name)
            if value != default and name not in _READ_BY.get(objective, ()):
                raise ConfigError(
                    f"data.{name}={value} has no effect with train.objective={objective}. Leave it out, or set "
                    f"train.objective={reader}."
                )


def _check_mtp(config: RunConfig) -> None:
    """Raise ConfigError for MTP blocks without a loss weight, or a loss weight without MTP blocks."""
    blocks, weight = config.model.mtp_layers, config.train.mtp_weight
    if blocks and not weight:
        raise ConfigError(
            f"model.mtp_layers={blocks}: only the loss of train.mtp_weight trains these blocks, and it is 0.\n"
            "Try --train.mtp_weight 0.1, or model.mtp_layers=0 (blocks of a Hugging Face folder are then kept as is)."
        )
    if weight and not blocks:
        raise ConfigError(
            f"train.mtp_weight={weight} weights the loss of multi-token prediction blocks, but the model has none "
            "(model.mtp_layers=0).\nSet model.mtp_layers=1, import a folder that has them with convert --mtp, or set "
            "train.mtp_weight=0."
        )


def _check_adapter(config: RunConfig) -> None:
    """Raise ConfigError for an optimizer that adapters do not support, or ways to move weights that change bytes."""
    if config.model.adapter.is_used and config.train.optimizer == "muon":
        raise ConfigError(
            f"train.optimizer=muon is not supported with model.adapter.rank={config.model.adapter.rank}: it "
            "orthogonalizes full matrices, and A and B are factors of one.\nTry --train.optimizer adamw."
        )
    kind = config.model.adapter.quantize_base
    if kind == "none":
        return
    if config.zero.quantized_weights:
        raise ConfigError(
            f"zero.quantized_weights=true is not supported with model.adapter.quantize_base={kind}: it would quantize "
            f"the codes of weights that are already stored in {kind}.\nSet zero.quantized_weights=false: they travel "
            "in their few bits."
        )
    if config.zero.offload_parameters == "nvme":
        raise ConfigError(
            f"zero.offload_parameters=nvme is not supported with model.adapter.quantize_base={kind}: a disk holds "
            f"weights of one dtype.\nTry zero.offload_parameters=cpu, where they take their {kind} bytes."
        )


def _check_pair_head(config: RunConfig) -> None:
    """Raise ConfigError unless a pair head can be trained on the data."""
    head = config.model.pair_head
    if head == "none":
        return
    for name, wanted, why in (
        ("train.objective", "masked", "its segments are trained with masked tokens"),
        ("data.packing", "best_fit", "both segments must be complete"),
        ("data.min_rest_tokens", 1, "both segments must be complete"),
    ):
        value = config.value(name)
        if value != wanted and (name, value) != ("data.packing", "one_document"):
            raise ConfigError(
                f"{name}={value} does not work with a pair head (model.pair_head={head}): {why}. Set {name}={wanted}."
            )
    assert config.examples is not None
    config.examples.most_tokens(config.data.seq_len, 0)


def _check_pairs(config: RunConfig) -> None:
    """Raise ConfigError unless sources come with an encoder, and without options for single sequences."""
    source, layers = config.data.source_seq_len, config.model.encoder_layers
    if source < 0:
        raise ConfigError(f"data.source_seq_len={source} must not be negative; 0 is for texts.")
    if config.train.objective == "spans" and not layers:
        raise ConfigError(
            "train.objective=spans needs an encoder for the corrupted text, but model.encoder_layers=0.\n"
            "Set model.encoder_layers and data.source_seq_len, or train.objective=masked with model.causal=false."
        )
    if bool(source) != bool(layers):
        raise ConfigError(
            f"model.encoder_layers={layers} and data.source_seq_len={source}: an encoder reads the pairs' sources, "
            "and the two go together.\nSet both, or neither."
        )
    if not layers:
        return
    if config.train.objective == "spans":
        # Creating the example rule validates its values.
        assert config.examples is not None
        config.examples.most_tokens(config.data.seq_len, source)
    for name, wanted, why in (
        (
            "train.objective",
            "causal",
            "the decoder predicts the target's next token, from pairs (causal) or texts (spans)",
        ),
        ("data.fim_rate", 0, "pairs must be complete"),
        ("data.packing", "best_fit", "rows of pairs have two lengths"),
        ("data.min_rest_tokens", 1, "pairs must be complete"),
        ("parallel.tokens_per_rank", 0, "side-by-side rows are assigned by one length"),
    ):
        value = config.value(name)
        if value != wanted and (name, value) not in (("data.packing", "one_document"), ("train.objective", "spans")):
            raise ConfigError(
                f"{name}={value} does not work with pairs (data.source_seq_len={source}): {why}. Set {name}={wanted}."
            )
    if config.model.position == "learned" and source > config.model.max_positions:
        raise ConfigError(
            f"data.source_seq_len={source} exceeds the table of learned positions, model.max_positions="
            f"{config.model.max_positions}.\nTry --data.source_seq_len {config.model.max_positions}."
        )
