"""``RunConfig``: all settings of a run, from defaults, then a TOML file, then flags. Strict, frozen, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Self

import tomli_w

from data_pipeline.mixture.file import is_mixture
from data_pipeline.rows.fim import FimRule
from data_pipeline.rows.mask import MaskRule
from data_pipeline.rows.micro_batches import MicroBatches
from data_pipeline.rows.pack import ExampleRule, Kind, Packing
from data_pipeline.rows.segments import SegmentRule
from data_pipeline.rows.spans import SpanRule
from longctx.config import ModelConfig

LEAST_CHUNK = 1024
"""The fewest tokens at a time that train.chunk_tokens=auto comes to: products of fewer do not fill a GPU."""

NO_PRESET = "none"
"""What ``model.preset`` is where the model comes from a checkpoint, or from the section's own fields."""

AUTO = "auto"
"""What ``run.resume`` is where the first start of a run and every later one are the same command."""
NEWEST = ("latest", "newest-good", AUTO)
"""What ``run.resume`` is where the run's own folder and store say which checkpoint it goes on from."""

PLAIN = ModelConfig(qkv_bias=False, norm_eps=1e-5, tie_embeddings=False)
"""A decoder like Llama's, but for its sizes: what fields without a preset and without a checkpoint are laid over."""


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Where the run lives and how it starts."""

    output_dir: str = "runs/quickstart"
    """Folder of the run: config, metrics, logs, checkpoints, report."""
    resume: str = "no"
    """Checkpoint folder to go on from, "latest" or "newest-good" (hashes checked) of this run, "auto" (newest-good, and
    a new run where there is none yet), or "no"."""
    start_from: str = "no"
    """Checkpoint, run folder (its newest) or Hugging Face folder whose model and weights a new run takes, at step 0
    with an optimiser and schedule of its own. [model] names only what shall change: rope, max_positions, window, and
    how the model is trained. A run that resumes does not read it."""
    memory_check: bool = True
    """Whether a run that needs more memory than is free is refused at its start, with the arithmetic."""
    seed: int = 0
    """Seed of the initial weights and the order of the data."""
    hostfile: str = "launcher"
    """Hostfile the world size is checked against: "launcher" takes deepspeed's own --hostfile, "none" opts out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto takes GPUs if there are any: each rank of the machine then needs its own."""
    timeout_seconds: float = 600.0
    """Seconds that a rank may wait for the others, be silent or stand still before the run ends with an error."""
    meet_seconds: float = 45.0
    """Seconds that ranks wait at the start for the last one to come."""
    max_seconds: float = 0.0
    """Seconds from the start of the process after which the run stops with a checkpoint, as on a signal; 0 never. Ends
    earlier by what a step and the last save took, so that the save is within them."""
    orphan_seconds: float = 10.0
    """How long a run whose launcher is gone may take to end its step; then it ends without a save."""
    audit_every: int = 100
    """Every so many steps, one call of each rank (a matrix product, attention, a range of AdamW's update) is computed
    again on two others: a wrong number ends the run and names the rank. 0: never. What it costs: docs/silent-errors.md.
    """
    log_every: int = 1
    """Steps from a line of the log and the console to the next; metrics.jsonl has every step in any case."""
    trackers: tuple[Literal["wandb", "trackio", "mlflow"], ...] = ()
    """Experiment trackers besides TensorBoard; `pip install 'longctx-train[NAME]'`."""
    tracker_project: str = "longctx"
    """Their project (MLflow: experiment); the run is called like its folder."""
    replicas_every: int = 20
    """Steps from one comparison, over ranks, of the bits of weights that several hold alike to the next, and of what
    each rank alone holds with what it left there a step before; 0 never. A save compares both and what it writes."""


@dataclass(frozen=True, kw_only=True)
class ModelSection(ModelConfig):
    """The decoder: a preset, the model of run.start_from, or neither (a plain decoder), with some fields changed."""

    preset: str = NO_PRESET
    """Named shape that the other fields start from (longctx/config.py). none: the model of run.start_from, else a
    plain decoder like Llama, whose sizes must then be named."""

    def config(self) -> ModelConfig:
        """Return the model without the preset's name; the same object for the same fields."""
        return _model_of(self)


@cache
def _model_of(section: ModelSection) -> ModelConfig:
    values = dataclasses.asdict(section)
    del values["preset"]
    return ModelConfig.from_dict(values)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """What the run reads."""

    train: str = "runs/data"
    """Shard folder to train on, as `data build` wrote it, or its URL (s3://BUCKET/FOLDER, gs://BUCKET/FOLDER); or the
    .toml file of a mixture of several."""
    validation: str = ""
    """Shard folder or mixture to validate on; empty: the "validation" folders inside those of data.train."""
    cache: str = ""
    """Folder of each host for copies of shards that are packed or in a store; empty: $LONGCTX_CACHE/data, else
    ~/.cache/longctx/data. Its disk must have room for all of them."""
    seq_len: int = 2048
    """Tokens a row; longer documents are cut into rows of this length. Of pairs it is the targets' row, and none is
    cut."""
    source_seq_len: int = 0
    """Most tokens of sources beside a row of pairs, for a model with model.encoder_layers; 0 for texts. A pair that is
    longer on either side is left out and counted."""
    packing: Kind = "best_fit"
    """How documents become rows: best_fit cuts none that fits in one; concatenate lays them end to end and cuts
    wherever a row ends; one_document gives each row one piece and padding. Validation packs by best_fit."""
    min_rest_tokens: int = 1
    """The last piece of a document longer than a row is left out where it has fewer tokens; 1 leaves out none."""
    fim_rate: float = 0.0
    """Share of the documents whose middle is to be filled in: prefix, suffix, then the middle. 0 is none. Needs a
    tokenizer with ids for the three, as `tokenizer train --fim` makes. Validation fills in nothing."""
    fim_spm_rate: float = 0.5
    """Share of these in which the suffix stands first."""
    fim_segment_tokens: int = 0
    """A document longer than this is filled in by parts of so many tokens, which must divide the tokens of a row; 0:
    data.seq_len, or with a mixture's stages the most that divides all of their rows."""
    span_length: float = 3.0
    """With train.objective=spans, mean tokens of a span that is taken out. A row has a sentinel for each of its pieces'
    spans, as `tokenizer train --sentinels` makes them."""
    mask_rate: float = 0.15
    """With train.objective=spans, share of the tokens that are taken out; with masked, share of the tokens to predict:
    80 % of them are read as the tokenizer's mask, 10 % as another token, 10 % as they are. Needs a tokenizer with a
    mask, as `tokenizer train --mask` makes.
    """
    mask_whole_words: bool = False
    """Whether words are masked in place of tokens."""
    mask_static: bool = False
    """Whether every epoch masks the same tokens."""
    balance: bool = True
    """Whether the rows of a step are dealt out to data ranks by their work, attention within documents counted, in
    place of their order: no rank waits for one with longer documents. The step's loss and gradient stay what they are.
    """
    prefetch_steps: int = 1
    """Steps that are read ahead while others are computed; 0: each step waits for its own reading."""
    workers: int = 1
    """Threads that read the micro-batches of a step. More of them help where storage answers late."""
    verify: Literal["read", "start", "off"] = "read"
    """When shards are checked against their checksums: read checks what is read, as it is read; start reads all before
    the first step as well, each once unless its size, times or inode change, divided among ranks; off none."""


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """Optimisation."""

    steps: int = 700
    """Optimiser steps of the whole run, resumed parts included."""
    stop_after: int = 0
    """End after this step with a checkpoint, the schedule unchanged, to go on later with run.resume; 0 never."""
    tokens_per_step: int = 2048
    """Tokens (padding included) that one optimiser step sees over all ranks; gradient accumulation follows from it."""
    micro_batch_rows: int = 1
    """Rows that go through the model at once. Follows from parallel.tokens_per_rank where that is set."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations; auto is bfloat16 where the device multiplies it natively, else float32. With
    zero.stage=0, which cannot accumulate it in float32, auto is float32 on a CPU and refused on a GPU. Masters,
    moments and accumulation are float32 in any case."""
    products: Literal["auto", "native", "float32"] = "auto"
    """How a CPU multiplies bfloat16: native as it is; float32 converted, and rounded once at the end; auto is native
    where the processor (rank 0's) has bfloat16 instructions, else float32, which is faster there. GPUs are native."""
    lr: float = 3e-4
    """Peak learning rate. A run with run.start_from must set it."""
    warmup_steps: int = 40
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "inverse_sqrt"] = "cosine"
    """How the rate falls behind the warm-up: by a cosine to final_lr_ratio, or with the root of the steps, as
    lr · sqrt(warmup_steps / step), whatever the number of steps (the Transformer)."""
    final_lr_ratio: float = 0.05
    """Learning rate at the last step as a share of the peak; cosine in between."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """What updates the weights: adamw, or muon, which makes the update of each matrix of the blocks orthogonal (experts
    one by one) and leaves embeddings, head, norms and biases to AdamW. Learning rate and decay are those of AdamW."""
    momentum: float = 0.95
    """Muon's decay of the gradient's mean."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; norms and biases do not decay."""
    beta1: float = 0.9
    """AdamW's decay of the gradient's mean."""
    beta2: float = 0.95
    """AdamW's decay of the gradient's square."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    clip_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 never."""
    skip_steps: int = 3
    """Steps in a row that may be left out, on all ranks, because their loss, router logits or gradient is not finite
    or a spike; one more ends the run, and so does a weight that is not finite. 0 ends it at the first."""
    spike_sigmas: float = 0.0
    """A step whose loss or gradient norm lies more than so many standard deviations above the mean of the last 128 is
    a spike (6 is usual); 0: none is."""
    objective: Literal["causal", "masked", "spans"] = "causal"
    """What is predicted: the next token (causal), of pairs of the target; spans that data.mask_rate takes out of a
    text, from what is left of it (spans, T5, with an encoder); or tokens that it hides in their text (masked, BERT),
    which needs model.causal=false.
    """
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of each target's logits, which keeps the softmax normalised (PaLM: 1e-4)."""
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over the vocabulary. Logged losses are those of the plain target."""
    mtp_weight: float = 0.0
    """Weight of the loss of blocks for multi-token prediction (model.mtp_layers), a mean over their own targets
    (DeepSeek-V3: 0.3, at the end 0.1)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile makes fused kernels of each block's parts around attention, and on GPUs of the loss; auto
    is on for GPUs where a compiler is found and off for CPUs, where it gains nothing. The first step then compiles."""
    keep: Literal["all", "attention", "inputs"] = "all"
    """What survives of each block until backward, which computes the rest again (activation checkpointing): all;
    attention keeps the block's input and attention's result, so that recomputation sends nothing; inputs keeps the
    input alone, and keys, values and attention's work are sent and done once more. Experts are never chosen again."""
    store: Literal["device", "host", "disk"] = "device"
    """Where what is kept lives until backward: on the device, or in the machine's memory, pinned for GPUs, copied while
    neighbouring blocks compute. The last block's stays on the device, which wants it at once. With train.chunk_tokens
    every block's leaves the device, and it may go to a file in train.store_path (disk)."""
    store_path: str = ""
    """Folder on a local disk for train.store=disk; its file has no name and is gone with the process."""
    chunk_tokens: int | Literal["auto"] = 0
    """Tokens of a rank that go through a layer at a time; 0 is all at once. What passes between the layer's parts then
    lies in train.store, and the device holds one chunk of it: bounds the memory that a layer takes. Backward computes
    each chunk's projections and FFN again; train.keep=all keeps queries, keys and values besides, inputs no attention.
    auto is 0 where the plan leaves a tenth of the free memory, else the first of 16384, 8192 … 1024 that does, with as
    many groups of heads as it takes.
    """
    head_groups: int = 1
    """With train.chunk_tokens, heads go through attention in so many groups, one after another: so much less of
    queries, keys and values is on the device at once. Divides the key heads, or is a multiple of them that divides the
    query heads. Layers of fewer heads have as many groups as divide both."""
    recompute_experts: Literal["none", "activation", "all"] = "activation"
    """What backward recomputes of the experts: nothing, the activation between their two products, or all but their
    input tokens (which are then dispatched once more where experts are on other ranks). With train.keep other than
    all it is always all."""
    record_routing: str = "no"
    """Folder to write every step's choice of experts to, a file a step; "no" writes none."""
    replay_routing: str = "no"
    """Folder of such files whose choice of experts is followed instead of the routers' own; "no" follows none."""


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """How the ranks divide the work; the data-parallel degree is what remains of the world."""

    context: int = 1
    """Context-parallel degree: ranks that share one sequence. With tokens_per_rank, ranks that share a micro-batch; 1,
    as when it is left out, is then all ranks."""
    tokens_per_rank: int = 0
    """In place of a fixed degree, the tokens of a micro-batch that a rank may hold: as many rows as the ranks of
    context can take go side by side, a short document stays on one rank and a long one spreads over as many as it
    takes. 0 is the fixed degree and train.micro_batch_rows."""
    ulysses: int = 1
    """How many of those hold the same tokens and split attention heads (Ulysses); the rest is the ring (ring
    attention)."""
    expert: int = 1
    """Expert-parallel degree: neighbouring ranks over which the experts of each layer are spread, whatever sequences
    these work on; divides the ranks and model.num_experts."""
    expert_tile_tokens: int | Literal["auto"] = "auto"
    """Tokens of a rank that are dispatched to their experts at a time, while those before are computed; 0 is all at
    once. Bounds the memory that the experts of a long row take. auto is 4096 on GPUs whose experts are on several
    ranks, else 0."""
    layout: str = "auto"
    """Which token lives where: contiguous, zigzag, striped, balanced or auto. zigzag evens out attention over long
    documents, balanced over any packed documents; auto takes the one that fits the rows and the layers and says which.
    """
    transport: Literal["auto", "p2p", "two_level", "all_gather"] = "auto"
    """How ring attention gets keys and values: p2p from their owner, two_level once to each node and round inside it
    (auto does so where a ring spans nodes), all_gather all at once, for more memory."""
    communication_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of key and value gradients between ranks; bfloat16 halves the bytes and rounds each rank's part."""
    kernel: str = "auto"
    """Attention kernel of one device; auto takes the fastest that can serve the run and says which."""
    deterministic: bool = False
    """Whether attention's backward must repeat to the bit on GPUs too (slower there); on CPUs it always does."""
    check_rows: Literal["on", "off"] = "on"
    """Whether ranks compare sums over all bits of what they send one another for attention and experts, once a step and
    before its update: wrong, stale or exchanged messages end the run, with sender, receiver, layer and hop."""


@dataclass(frozen=True, kw_only=True)
class ZeroSection:
    """DeepSpeed ZeRO."""

    stage: int | Literal["auto"] = "auto"
    """What is spread over ranks: 0 nothing; 1 optimiser state; 2 gradients too; 3 weights too. auto is 2 on GPUs and 1
    on CPUs; the log says the bytes of each."""
    overlap_comm: Literal["auto", "on", "off"] = "auto"
    """Whether gradients are reduced while backward goes on; auto does so on GPUs, and in stage 3 anywhere. Stage 1 in
    bfloat16 reduces at the end of the step in any case."""
    reduce_bucket_size: int = 50_000_000
    """Gradients (values, not bytes) that stages 2 and 3 reduce at once: larger ones need fewer messages and more
    memory, 4 bytes each for the message and 2 or 4 for each of two buffers."""
    allgather_bucket_size: int = 500_000_000
    """Updated weights (values, not bytes) that stages 1 and 2 gather at once; an even number."""
    prefetch_bucket_size: int = 50_000_000
    """Weights (values, not bytes) that stage 3 gathers before they are needed (stage3_prefetch_bucket_size)."""
    max_live_parameters: int = 1_000_000_000
    """Gathered weights (values, not bytes) that stage 3 keeps at most (stage3_max_live_parameters); fewer need less
    memory and more gathering."""
    param_persistence_threshold: int = 100_000
    """Size below which stage 3 keeps a parameter whole on every rank (stage3_param_persistence_threshold)."""
    sub_group_size: int | Literal["auto"] = "auto"
    """Parameters of a rank that stage 3 updates at once; auto is 1,000,000,000, or 100,000,000 with offload=nvme, which
    holds four times one sub-group in memory, 4 bytes a value."""
    hpz_partition_size: int = 1
    """hpZ of stage 3: so many neighbouring ranks, such as those of a node, keep a second copy of the weights among
    them, so that backward gathers within them (zero_hpz_partition_size); 1 is none. It takes the weights' bytes divided
    by it on each rank."""
    quantized_weights: bool = False
    """qwZ of stage 3: weights travel in 8 bits (zero_quantized_weights). GPUs only; results are not exact."""
    quantized_gradients: bool = False
    """qgZ of stage 3: gradients travel in 4 and 8 bits between nodes (zero_quantized_gradients). GPUs only; results are
    not exact."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where masters, moments and gradients live, and where AdamW runs: none is the device, cpu the machine's memory
    (offload_optimizer). nvme, in stage 3, keeps masters and moments on a disk and brings a sub-group at a time into the
    machine's memory."""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """Where stage 3 keeps its part of the weights: the device, or cpu, the machine's memory, or nvme, a disk
    (offload_param)."""
    nvme_path: str = ""
    """Folder on that disk, one that each machine has for itself. Files there have no names: the system removes them as
    soon as the run ends, however it ends."""
    pin_memory: bool = True
    """Whether what is offloaded lies in page-locked memory; false where the machine allows too little of it
    (ulimit -l)."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Saving."""

    every_steps: int = 100
    """Steps between checkpoints; 0 saves at the end only."""
    keep_last: int = 2
    """Checkpoints kept; older ones go once a newer one is committed. 0 keeps all."""
    keep_every: int = 0
    """Of the older ones, those whose step this number divides stay; 0: none."""
    keep_best: int = 0
    """Of the older ones, so many with the lowest held-out loss stay; 0: none."""
    wait: bool = False
    """Training waits until a checkpoint is written. Else it waits for a copy in memory, of which a thread writes."""
    store: str = ""
    """URL of a folder (s3://BUCKET/RUN, gs://BUCKET/RUN) that gets a copy of every checkpoint, in the background; older
    ones go there by the same rule. A run that resumes looks there too. Empty: none."""


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """Held-out loss."""

    every_steps: int = 100
    """Steps between validations; 0 validates at the end only."""
    rows: int = 16
    """Rows of data.seq_len tokens that a validation reads, always the same ones; 0 never validates."""
    sample_tokens: int = 0
    """Tokens of sample text that every validation writes into its record, greedy; 0 writes none."""
    sample_prompt: str = ""
    """Beginning of the document that the sample text continues; may be empty."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A pretraining run. Every key can stand in a TOML file (`--config run.toml`) or be a flag (`--train.lr 1e-3`)."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=lambda: ModelSection(**vars(PLAIN)))
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    zero: ZeroSection = field(default_factory=ZeroSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    validation: ValidationSection = field(default_factory=ValidationSection)

    def value(self, key: str) -> Any:
        """Return the value of a dotted key."""
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
        """Rows of one optimiser step."""
        return self.train.tokens_per_step // self.data.seq_len

    @property
    def last_step(self) -> int:
        """Last step of this process."""
        if self.train.stop_after:
            return min(self.train.steps, self.train.stop_after)
        return self.train.steps

    def saves_after(self, step: int) -> bool:
        """Return whether the run's schedule saves a checkpoint after this step."""
        return self._is_due(step, self.checkpoint.every_steps)

    def validates_after(self, step: int) -> bool:
        """Return whether the run's schedule validates after this step, provided that it has held-out data."""
        return self._is_due(step, self.validation.every_steps)

    def _is_due(self, step: int, every: int) -> bool:
        """Return whether a task done every ``every`` steps (0: at the end only) is due after this one."""
        return step == self.last_step or (every > 0 and step % every == 0)

    def micro_batches(self, world_size: int) -> MicroBatches:
        """Return the division of a step's rows into micro-batches. ``parallel.context`` must be settled."""
        return MicroBatches.deal(
            self.rows_per_step,
            most_rows=self.train.micro_batch_rows,
            data_degree=world_size // self.parallel.context,
        )

    @property
    def in_lockstep(self) -> bool:
        """True if data ranks wait for one another in each micro-batch, not only at the end of a step.

        Rows of similar cost are then dealt into the same micro-batch.
        """
        # Stages 2 and 3 reduce gradients as backward goes on, and stage 3 gathers weights; 0 and 1 reduce once a step.
        # Experts outside a rank's own context group are called in every layer.
        assert self.zero.stage != AUTO, "``settle`` comes first"
        return self.zero.stage >= 2 or self.parallel.context % self.parallel.expert != 0

    @property
    def packing(self) -> Packing:
        """Packing of documents into rows. ConfigError for options that do not go together."""
        data, fim = self.data, None
        rule = FimRule(data.fim_rate, data.fim_spm_rate, data.fim_segment_tokens)
        # A source of a mixture may have a share of its own.
        if data.fim_rate or is_mixture(data.train):
            fim = rule
        return Packing(data.packing, data.min_rest_tokens, fim, self.examples)

    @property
    def examples(self) -> ExampleRule | None:
        """Rule that builds examples from texts; None if texts are read as they are."""
        if self.train.objective == "spans":
            return SpanRule(self.data.mask_rate, self.data.span_length)
        if self.model.pair_head != "none":
            return SegmentRule(self.model.pair_head)
        return None

    @property
    def mask(self) -> MaskRule | None:
        """Rule for masking tokens; None if the objective does not mask."""
        data = self.data
        if self.train.objective != "masked":
            return None
        return MaskRule(data.mask_rate, data.mask_whole_words, data.mask_static)

    @property
    def head_share(self) -> float:
        """Share of the tokens with logits in training: only the masked ones if the objective is masked."""
        # With chunks the head processes all tokens of the residual stream.
        if self.mask is None or self.train.chunk_tokens:
            return 1.0
        return self.mask.rate

    def accumulation(self, world_size: int) -> int:
        """Return the number of micro-batches of one rank in a step."""
        return len(self.micro_batches(world_size))

    def to_toml(self) -> str:
        """Return the config as TOML."""
        return tomli_w.dumps(dataclasses.asdict(self))
