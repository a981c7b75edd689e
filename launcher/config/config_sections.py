"""``RunConfig``: a run's settings, from defaults, then a TOML file, then flags. Strict, frozen, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Self

import tomli_w

from data_pipeline.mixture.file import is_mixture
from data_pipeline.rows.fim import FimRule
from data_pipeline.rows.images import ImageRule
from data_pipeline.rows.micro_batches import MicroBatches
from data_pipeline.rows.pack import ExampleRule, Packing
from data_pipeline.rows.preferences import PreferenceRule
from data_pipeline.rows.span_corruption import SpanRule
from data_pipeline.rows.text_segments import SegmentRule
from data_pipeline.rows.token_masking import MaskRule
from launcher.config.data_section import DataSection
from longctx.architecture.layer_specs import can_share_prefixes
from longctx.config import ModelConfig
from longctx.preference_options import PreferenceOptions

LEAST_CHUNK = 1024
"""Smallest chunk that train.chunk_tokens=auto chooses: smaller matmuls do not fill a GPU."""

NO_PRESET = "none"
"""``model.preset`` if the model comes from a checkpoint or from the section's own fields."""

AUTO = "auto"
"""``run.resume`` if a run's first start and every later one use the same command."""
NEWEST = ("latest", "newest-good", AUTO)
"""Values of ``run.resume`` with which the run's own folder and store determine the checkpoint."""

PLAIN = ModelConfig(qkv_bias=False, norm_eps=1e-5, tie_embeddings=False)
"""Llama-like decoder apart from its sizes: the base for fields without a preset and without a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """The run's folder, start, limits and checks."""

    output_dir: str = "runs/quickstart"
    """Run folder: config, metrics, logs, checkpoints, report."""
    resume: str = "no"
    """Checkpoint folder to resume from, "latest" or "newest-good" (hashes checked) in this run, "auto" (newest-good, or
    a new run if there is none yet), or "no"."""
    start_from: str = "no"
    """Checkpoint, run folder (its newest checkpoint) or Hugging Face folder with the model and weights for a new run,
    at step 0 with its own optimizer and schedule. [model] names only the changes: rope, max_positions, window, and how
    the model is trained. Not read by a run that resumes."""
    memory_check: bool = True
    """Refuse to start a run that needs more memory than is free, and show the arithmetic."""
    seed: int = 0
    """Seed for the initial weights and the data order."""
    hostfile: str = "launcher"
    """Hostfile to check the world size against: "launcher" takes deepspeed's own --hostfile, "none" disables the check.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Compute device; auto uses GPUs if there are any: each rank on the machine then needs its own."""
    timeout_seconds: float = 600.0
    """Seconds that a rank may wait for the others, be silent or make no progress before the run ends with an error."""
    meet_seconds: float = 45.0
    """Seconds that ranks wait at the start for the last one to arrive."""
    max_seconds: float = 0.0
    """Seconds after process start at which the run stops with a checkpoint, as on a signal; 0 never. The stop comes
    earlier by the duration of a step and of the last save, so that the save is within the limit."""
    orphan_seconds: float = 10.0
    """Seconds that a run without its launcher may take to end its step; after that it ends without a save."""
    audit_every: int = 100
    """Every so many steps, up to four operations per rank (matmuls, attention, a range in AdamW's update) are computed
    again on two other ranks: a wrong number ends the run and names the rank. 0: never. Cost: docs/silent-errors.md."""
    log_every: int = 1
    """Steps between lines in the log and on the console; metrics.jsonl has every step in any case."""
    trackers: tuple[Literal["wandb", "trackio", "mlflow"], ...] = ()
    """Experiment trackers in addition to TensorBoard; `pip install 'longctx-train[NAME]'`."""
    tracker_project: str = "longctx"
    """Project in the trackers (MLflow: experiment); the run is named after its folder."""
    replicas_every: int = 20
    """Steps between checks for changed bits: ranks compare the weights that several of them hold, and each rank
    compares state that it alone holds with the state it left one step before; 0 never. A save makes both comparisons
    and checks the values that it writes."""


@dataclass(frozen=True, kw_only=True)
class ModelSection(ModelConfig):
    """The decoder: a preset, the model in run.start_from, or neither (a plain decoder), with some fields changed."""

    preset: str = NO_PRESET
    """Named shape under the other fields (longctx/config.py). none: the model in run.start_from, otherwise a plain
    decoder like Llama, with its sizes given as fields."""

    def config(self) -> ModelConfig:
        """Return the model without the preset's name; the same object for the same fields."""
        return _model_of(self)


# Sections are frozen, so equal fields share one model object.
@cache
def _model_of(section: ModelSection) -> ModelConfig:
    values = dataclasses.asdict(section)
    del values["preset"]
    return ModelConfig.from_dict(values)


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """Optimization."""

    steps: int = 700
    """Optimizer steps in the full run, including resumed parts."""
    stop_after: int = 0
    """Stop after this step with a checkpoint, the schedule unchanged, to continue later with run.resume; 0 never."""
    tokens_per_step: int = 2048
    """Tokens (including padding) per optimizer step over all ranks; gradient accumulation follows from it."""
    micro_batch_rows: int = 1
    """Rows that pass through the model at once. Follows from parallel.tokens_per_rank if that is set."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype for weights and activations; auto is bfloat16 if the device multiplies it natively, otherwise float32. With
    zero.stage=0, which cannot accumulate it in float32, auto is float32 on a CPU and refused on a GPU. Master weights,
    moments and accumulation are float32 in any case."""
    products: Literal["auto", "native", "float32"] = "auto"
    """How a CPU multiplies bfloat16: native directly; float32 after conversion, with one rounding at the end; auto is
    native if the processor (rank 0's) has bfloat16 instructions, otherwise float32, which is faster there. GPUs are
    native."""
    lr: float = 3e-4
    """Peak learning rate. A run with run.start_from must set it."""
    warmup_steps: int = 40
    """Linear warm-up steps."""
    schedule: Literal["cosine", "inverse_sqrt"] = "cosine"
    """Decay of the rate after the warm-up: by a cosine to final_lr_ratio, or with the inverse root of the step, as lr ·
    sqrt(warmup_steps / step), for any number of steps (the Transformer)."""
    final_lr_ratio: float = 0.05
    """Learning rate at the last step as a share of the peak; cosine in between."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer for the weights: adamw, or muon, which orthogonalizes the update of each matrix in the blocks (per
    expert) and leaves embeddings, head, norms and biases to AdamW. Learning rate and decay are those for AdamW."""
    momentum: float = 0.95
    """Muon's decay rate for the gradient mean."""
    weight_decay: float = 0.1
    """Decoupled weight decay for matrices; norms and biases do not decay."""
    beta1: float = 0.9
    """AdamW's decay rate for the gradient mean."""
    beta2: float = 0.95
    """AdamW's decay rate for the squared gradient's mean."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    clip_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 never."""
    skip_steps: int = 3
    """Consecutive steps that may be skipped, on all ranks, because their loss, router logits or gradient is not finite
    or a spike; one more ends the run, and so does a weight that is not finite. 0 ends it at the first."""
    spike_sigmas: float = 0.0
    """A step with a loss or gradient norm more than this many standard deviations above the mean of the last 128 is a
    spike (6 is usual); 0: no step is."""
    objective: Literal["causal", "masked", "spans", "classes", "preferences"] = "causal"
    """Prediction target: the next token (causal), in pairs that of the target; spans that data.mask_rate removes from a
    text, given the rest (spans, T5, with an encoder); tokens that it hides in their text (masked, BERT), which needs
    model.causal=false; an image's class (classes), which needs model.classes; or, of two replies, the preferred one
    (preferences, with the loss in [preference])."""
    z_loss: float = 0.0
    """Weight for the squared log-sum-exp of each target's logits, which keeps the softmax normalized (PaLM: 1e-4)."""
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over the vocabulary. Logged losses are those for the plain target."""
    mtp_weight: float = 0.0
    """Loss weight for multi-token prediction blocks (model.mtp_layers); the loss is a mean over their own targets
    (DeepSeek-V3: 0.3, at the end 0.1)."""
    class_weight: float = 0.0
    """Loss weight for the class head of a model that also predicts tokens; the loss is a mean over images (Image GPT's
    fine-tuning: 1)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Let torch.compile fuse each block's parts around attention, and on GPUs the loss; auto is on for GPUs if a
    compiler is found, and off for CPUs, which gain no speed. The first step then compiles."""
    keep: Literal["all", "attention", "inputs"] = "all"
    """Activations saved per block until backward, which recomputes the rest (activation checkpointing): all; attention
    saves the block's input and attention's result, so that recomputation sends no messages; inputs saves only the
    input, and keys and values are sent, and attention computed, once more. Experts are never chosen again."""
    store: Literal["device", "host", "disk"] = "device"
    """Storage for saved activations until backward: the device, or host memory, pinned for GPUs, copied while
    neighbouring blocks compute. The last block's stay on the device, which needs them at once. With train.chunk_tokens
    every block's leave the device, and they may go to a file in train.store_path (disk)."""
    store_path: str = ""
    """Folder on a local disk for train.store=disk; its file has no name and disappears with the process."""
    chunk_tokens: int | Literal["auto"] = 0
    """A rank's tokens that pass through a layer at a time; 0 is all at once. Tensors between the layer's parts are then
    in train.store, with one chunk on the device, which bounds a layer's memory. Backward recomputes each chunk's
    projections and FFN; train.keep=all also saves queries, keys and values, inputs saves no attention. auto is 0 if the
    plan leaves a tenth of the free memory, otherwise the first of 16384, 8192 … 1024 that does, with as many head
    groups as needed."""
    head_groups: int = 1
    """With train.chunk_tokens, number of groups in which heads pass through attention, one after another: the device
    holds that much less of queries, keys and values at once. Must divide the key heads, or be a multiple of them that
    divides the query heads. Layers with fewer heads have as many groups as divide both."""
    recompute_experts: Literal["none", "activation", "all"] = "activation"
    """Expert values that backward recomputes: none, the activation between the two matmuls, or all but the input tokens
    (which are then dispatched once more if experts are on other ranks). With train.keep other than all it is always
    all."""
    record_routing: str = "no"
    """Folder for every step's expert choices, one file per step; "no" writes none."""
    replay_routing: str = "no"
    """Folder with such files, whose expert choices replace the routers' own; "no" replaces none."""


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """Division of the work between ranks; the data-parallel degree is what remains of the world."""

    context: int = 1
    """Context-parallel degree: ranks that share one sequence. With tokens_per_rank, ranks that share a micro-batch; 1,
    the default, then means all ranks."""
    tokens_per_rank: int = 0
    """Instead of a fixed degree, the tokens per micro-batch that a rank may hold: as many rows as the context ranks can
    take go side by side, a short document stays on one rank and a long one spreads over as many as it needs. 0 uses the
    fixed degree and train.micro_batch_rows."""
    ulysses: int = 1
    """How many of those hold the same tokens and split attention heads (Ulysses); the remaining factor is the ring
    (ring attention)."""
    expert: int = 1
    """Expert-parallel degree: neighbouring ranks that divide each layer's experts between them, independent of their
    sequences; divides the ranks and model.num_experts."""
    expert_tile_tokens: int | Literal["auto"] = "auto"
    """A rank's tokens that are dispatched to their experts at a time, while earlier ones are computed; 0 is all at
    once. Bounds the memory that a long row's experts take. auto is 4096 on GPUs with experts on several ranks,
    otherwise 0."""
    layout: str = "auto"
    """Placement of tokens on ranks: contiguous, zigzag, striped, balanced or auto. zigzag balances attention over long
    documents, balanced over any packed documents; auto takes the one that fits the rows and the layers, and logs it."""
    transport: Literal["auto", "p2p", "two_level", "all_gather"] = "auto"
    """How ring attention receives keys and values: p2p from their owner, two_level once per node and then around inside
    it (auto does so if a ring spans nodes), all_gather all at once, for more memory."""
    communication_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype for key and value gradients between ranks; bfloat16 halves the bytes and rounds each rank's part."""
    kernel: str = "auto"
    """Attention kernel on one device; auto takes the fastest that can serve the run, and logs it."""
    deterministic: bool = False
    """Require a bitwise repeatable attention backward on GPUs too (slower there); on CPUs it always is."""
    check_rows: Literal["on", "off"] = "on"
    """Ranks compare checksums over all bits that they exchange for attention and experts, once per step and before its
    update: wrong, stale or swapped messages end the run, with sender, receiver, layer and hop."""


@dataclass(frozen=True, kw_only=True)
class ZeroSection:
    """DeepSpeed ZeRO."""

    stage: int | Literal["auto"] = "auto"
    """State partitioned over ranks: 0 none; 1 optimizer state; 2 gradients too; 3 weights too. auto is 2 on GPUs and 1
    on CPUs; the log shows the bytes of each."""
    overlap_comm: Literal["auto", "on", "off"] = "auto"
    """Reduce gradients during backward; auto does so on GPUs, and in stage 3 anywhere. Stage 1 in bfloat16 reduces at
    the end of the step in any case."""
    reduce_bucket_size: int = 50_000_000
    """Gradients (values, not bytes) that stages 2 and 3 reduce at once: larger buckets need fewer messages and more
    memory, 4 bytes each for the message and 2 or 4 for each of two buffers."""
    allgather_bucket_size: int = 500_000_000
    """Updated weights (values, not bytes) that stages 1 and 2 all-gather at once; an even number."""
    prefetch_bucket_size: int = 50_000_000
    """Weights (values, not bytes) that stage 3 gathers before they are needed (stage3_prefetch_bucket_size)."""
    max_live_parameters: int = 1_000_000_000
    """Maximum gathered weights (values, not bytes) that stage 3 keeps (stage3_max_live_parameters); fewer need less
    memory and more gathering."""
    param_persistence_threshold: int = 100_000
    """Size below which stage 3 keeps a full parameter on every rank (stage3_param_persistence_threshold)."""
    sub_group_size: int | Literal["auto"] = "auto"
    """Parameters per rank that stage 3 updates at once; auto is 1,000,000,000, or 100,000,000 with offload=nvme, which
    holds four times one sub-group in memory, 4 bytes per value."""
    hpz_partition_size: int = 1
    """hpZ for stage 3: this many neighbouring ranks, such as those in a node, keep a second copy of the weights among
    them, so that backward gathers within them (zero_hpz_partition_size); 1 is none. Each rank then holds the weights'
    bytes divided by this number."""
    quantized_weights: bool = False
    """qwZ for stage 3: weights travel in 8 bits (zero_quantized_weights). GPUs only; results are not exact."""
    quantized_gradients: bool = False
    """qgZ for stage 3: gradients travel in 4 and 8 bits between nodes (zero_quantized_gradients). GPUs only; results
    are not exact."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Storage for master weights, moments and gradients, and the place for AdamW: none is the device, cpu host memory
    (offload_optimizer). nvme, in stage 3, keeps master weights and moments on a disk and brings one sub-group at a time
    into host memory."""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """Storage for stage 3's partition of the weights: none is the device, cpu host memory, nvme a disk (offload_param).
    """
    nvme_path: str = ""
    """Folder on that disk, local to each machine. Its files have no names: the system removes them as soon as the run
    ends, for any reason."""
    pin_memory: bool = True
    """Keep offloaded state in page-locked memory; false if the machine allows too little of it (ulimit -l)."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Checkpoints."""

    every_steps: int = 100
    """Steps between checkpoints; 0 saves only at the end."""
    keep_last: int = 2
    """Newest checkpoints to keep; older ones are removed once a newer one is committed. 0 keeps all."""
    keep_every: int = 0
    """Also keep older checkpoints whose step this number divides; 0: none."""
    keep_best: int = 0
    """Also keep this many older checkpoints with the lowest held-out loss; 0: none."""
    wait: bool = False
    """Training waits until a checkpoint is written. Otherwise it waits for a copy in memory, which a thread writes."""
    store: str = ""
    """URL of a folder (s3://BUCKET/RUN, gs://BUCKET/RUN) that receives a copy of every checkpoint, in the background;
    older ones are removed there by the same rule. A run that resumes also searches there. Empty: none."""


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """Held-out loss."""

    every_steps: int = 100
    """Steps between validations; 0 validates only at the end."""
    rows: int = 16
    """Rows with data.seq_len tokens per validation, always the same ones; 0 never validates."""
    sample_tokens: int = 0
    """Tokens of sample text that every validation writes into its record, greedy; 0 writes none."""
    sample_prompt: str = ""
    """Start of the document that the sample text continues; may be empty."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A pretraining run. Every key can stand in a TOML file (`--config run.toml`) or be a flag (`--train.lr 1e-3`)."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=lambda: ModelSection(**vars(PLAIN)))
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    preference: PreferenceOptions = field(default_factory=PreferenceOptions)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    zero: ZeroSection = field(default_factory=ZeroSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    validation: ValidationSection = field(default_factory=ValidationSection)

    def value(self, key: str) -> Any:
        """Return a dotted key's value."""
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return the config with other values for dotted keys."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
        parts = {name: dataclasses.replace(getattr(self, name), **of) for name, of in sections.items()}
        return dataclasses.replace(self, **parts)

    @property
    def rows_per_step(self) -> int:
        """Rows per optimizer step."""
        return self.train.tokens_per_step // self.data.seq_len

    @property
    def last_step(self) -> int:
        """Last step of this process."""
        if self.train.stop_after:
            return min(self.train.steps, self.train.stop_after)
        return self.train.steps

    def saves_after(self, step: int) -> bool:
        """Return True if the run's schedule saves a checkpoint after this step."""
        return self._is_due(step, self.checkpoint.every_steps)

    def validates_after(self, step: int) -> bool:
        """Return True if the run's schedule validates after this step, provided that it has held-out data."""
        return self._is_due(step, self.validation.every_steps)

    def _is_due(self, step: int, every: int) -> bool:
        """Return True if a task with the interval ``every`` (0: only at the end) is due after this step."""
        return step == self.last_step or (every > 0 and step % every == 0)

    def micro_batches(self, world_size: int) -> MicroBatches:
        """Divide a step's rows into micro-batches. ``parallel.context`` must be resolved."""
        return MicroBatches.assign(
            self.rows_per_step,
            most_rows=self.train.micro_batch_rows,
            data_degree=world_size // self.parallel.context,
        )

    @property
    def sync_micro_batches(self) -> bool:
        """True if data ranks wait for each other in every micro-batch, not only at the end of a step.

        Rows with similar cost are then assigned to the same micro-batch.
        """
        # Stages 2 and 3 reduce gradients during backward, and stage 3 gathers weights; 0 and 1 reduce once per step.
        # Experts outside a rank's own context group are called in every layer.
        assert self.zero.stage != AUTO, "zero.stage must be resolved first"
        return self.zero.stage >= 2 or self.parallel.context % self.parallel.expert != 0

    @property
    def packing(self) -> Packing:
        """How documents are packed into rows. Raise ConfigError for conflicting options."""
        data, fim = self.data, None
        rule = FimRule(data.fim_rate, data.fim_spm_rate, data.fim_segment_tokens)
        # A mixture's source may have its own share.
        if data.fim_rate or is_mixture(data.train):
            fim = rule
        return Packing(data.packing, data.min_rest_tokens, fim, self.examples)

    @property
    def examples(self) -> ExampleRule | None:
        """Rule that builds examples from documents; None if texts are read unchanged."""
        if self.model.image.is_used:
            return self._images
        if self.train.objective == "spans":
            return SpanRule(self.data.mask_rate, self.data.span_length)
        if self.train.objective == "preferences":
            return PreferenceRule(self.shares_prompts)
        if self.model.pair_head != "none":
            return SegmentRule(self.model.pair_head)
        return None

    @property
    def can_share_prompts(self) -> bool:
        """True if one rank has all tokens of a row, and every layer can continue from a shared prompt."""
        parallel = self.parallel
        # A bitwise repeatable kernel is chosen where ranks share a row.
        is_alone = parallel.context == 1 and not parallel.tokens_per_rank and not parallel.deterministic
        return is_alone and can_share_prefixes(self.model.config())

    @property
    def shares_prompts(self) -> bool:
        """True if a record's prompt is computed once for both replies."""
        if self.data.share_prompts == AUTO:
            return self.can_share_prompts
        return self.data.share_prompts == "on"

    @property
    def _images(self) -> ImageRule:
        image, objective = self.model.image, self.train.objective
        return ImageRule(
            height=image.height,
            width=image.width,
            channels=image.channels,
            patch=image.patch,
            class_token=image.class_token,
            begin=not image.patch and objective == "causal",
            flip=self.data.flip,
            has_labels=self.model.classes > 0,
        )

    @property
    def mask(self) -> MaskRule | None:
        """Rule for masking tokens; None if the objective does not mask."""
        data = self.data
        if self.train.objective != "masked":
            return None
        return MaskRule(data.mask_rate, data.mask_whole_words, data.mask_static)

    @property
    def head_share(self) -> float:
        """Share of tokens with logits in training: only the masked ones if the objective is masked."""
        # With chunks the head processes all tokens of the residual stream.
        if self.mask is None or self.train.chunk_tokens:
            return 1.0
        return self.mask.rate

    def accumulation(self, world_size: int) -> int:
        """Return how many micro-batches one rank has per step."""
        return len(self.micro_batches(world_size))

    def to_toml(self) -> str:
        """Return the config as TOML."""
        return tomli_w.dumps(dataclasses.asdict(self))
