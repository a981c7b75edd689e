"""``Trainer``: a run from its config. The step reads top to bottom; everything it needs is built once before."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline.loader import build_loader, build_validation_loader
from launcher.checkpoint.folder import find_resume, find_start, prune, remove_partial, set_aside_newer
from launcher.checkpoint.load import load_checkpoint, load_weights
from launcher.checkpoint.save import save_checkpoint
from launcher.config.sections import RunConfig
from launcher.metrics.record import Record, truncate_after
from launcher.metrics.tensorboard import check_tensorboard
from launcher.metrics.throughput import (
    document_lengths,
    mfu,
    model_tflops,
    peak_device_flops,
    tokens_per_second,
    training_flops,
)
from launcher.metrics.writer import MetricsWriter, RecordWriter
from launcher.report.page import write_report
from launcher.run_folder import prepare_folder, start_logging, write_facts
from launcher.training.broken_step import BrokenStep
from launcher.training.expert_record import DeadExpertWatch, expert_layers, expert_record
from launcher.training.learning_rate import learning_rate
from launcher.training.routing_files import RoutingFiles
from launcher.training.totals import StepSums, StepTotals
from launcher.training.validation import validate
from longctx.batch import Batch
from longctx.checkpoint_format import TOKENIZER, hash_file, list_checkpoints
from longctx.config import ModelConfig
from longctx.errors import ConfigError, GradientError, TrainingError
from longctx.model.experts.balance import load_share, move_selection_bias_
from longctx.objectives.loss_sum import LossSum
from parallel.layout.cached import cached_layout
from parallel.layout.sequence import SequenceLayout
from parallel.loss import StepCounts, count_step, micro_batch_loss
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.runtime.device import device_name, peak_memory_bytes
from parallel.runtime.process import broadcast_object, on_every_rank
from parallel.transport.select import resolve_transport
from parallel.zero.engine import ZeroEngine
from parallel.zero.options import OptimizerOptions

log = logging.getLogger(__name__)


class Trainer:
    """One run: folder, data, model and optimiser; ``train`` takes it from where it stands to its last step."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        """Check and build everything; every rank alike. The process group must be up."""
        self.config, self.model_config = config, config.model.config()
        parallel = config.parallel
        self.mesh = Mesh.build(context=parallel.context, ulysses=parallel.ulysses, expert=parallel.expert)
        self.device = device
        self.folder = on_every_rank(lambda: prepare_folder(config))
        start_logging(self.folder, self.mesh.rank)
        on_every_rank(check_tensorboard)
        # Rank 0 alone looks and hashes; a warning about a checkpoint passed over is then said once.
        found = on_every_rank(lambda: find_resume(self.folder, config.run.resume) if self._leads else None)
        resume_from = broadcast_object(found)
        start_from = on_every_rank(lambda: find_start(config.run.start_from)) if resume_from is None else None
        on_every_rank(self._open_data)
        self._expert_layers = expert_layers(self.model_config)
        self._dead_experts = DeadExpertWatch(self._expert_layers, self.model_config.num_experts)
        self._load_LE: Tensor | None = None
        self.engine = self._build_engine()
        self.step = 0
        self._resumed, self._started = resume_from is not None, start_from is not None
        if resume_from is not None:
            self._resume(resume_from)
        if start_from is not None:
            self._start(start_from)
        self._open_routing()
        if self._resumed:  # not before everything that could refuse this start has agreed to it
            on_every_rank(lambda: self._rewind_folder() if self._leads else None)
        if self._leads:
            write_facts(self.folder, config, self.mesh, self.engine.num_parameters)

    def train(self) -> None:
        """Run the remaining steps, validating and saving as the config says, and write the report."""
        config, last = self.config, self._last_step
        if self.step >= last:
            log.info("Nothing to do: the run is at step %d of %d. Raise train.steps to go on.", self.step, last)
            return
        self._announce()
        with self._writer() as writer:
            if self._resumed:
                writer.write({"kind": "event", "event": "resume", "step": self.step})
            if self._started and config.validation.rows:
                writer.write(self._validate())  # what the weights can do before this run changes them
            while self.step < last:
                self._train_recorded_step(writer)
                if self._due(config.validation.every_steps) and config.validation.rows:
                    writer.write(self._validate())
                if self._due(config.checkpoint.every_steps):
                    self._save()
        self._finish()

    def _train_recorded_step(self, writer: RecordWriter) -> None:
        """``_train_step``, and its record in the metrics, also of a step that could not be taken."""
        try:
            writer.write(self._train_step())
        except TrainingError as error:
            if error.record is not None:
                writer.write(dict(error.record))
            raise

    def _train_step(self) -> Record:
        """One optimiser step over the next rows; returns its record.

        TrainingError on every rank alike, before anything is changed, when router logits, loss or gradient are not
        finite.
        """
        started = time.perf_counter()
        order = self.loader.state_dict()
        batches = [next(self.loader) for _ in range(self.loader.micro_batches_per_step)]
        shares = [self._share(batch) for batch in batches]
        waited = time.perf_counter() - started
        if self._routing.active:
            self._routing.begin(self.step + 1, order, self._places(batches))
        counts = count_step(shares, self.device)
        sums = self._forward_backward(shares, counts)
        flops = sum(training_flops(self.model_config, document_lengths(b.cu_seqlens.tolist())) for b in batches)
        totals = sums.over_ranks(flops / self.mesh.context)  # each rank of a sequence counted all of it
        totals.check_router_logits(self._expert_layers, self.step + 1)  # before anything is changed by them
        lr = learning_rate(self.step + 1, self.config.train)
        grad_norm = self._update(totals, counts, lr, order)
        self.step += 1
        self._balance(totals.counts_LE)
        self._routing.end()
        seconds = time.perf_counter() - started
        return self._record(totals, counts, lr=lr, grad_norm=grad_norm, seconds=seconds, waited=waited)

    def _update(self, totals: StepTotals, counts: StepCounts, lr: float, order: dict[str, Any]) -> float:
        """The optimiser step; returns the gradient norm. ``order`` says where the step's rows begin."""
        loss = totals.nll / max(1, counts.targets)
        if not totals.finite:
            raise self._broken(loss, lr, order)
        try:
            return self.engine.step(lr)
        except GradientError as error:
            raise self._broken(loss, lr, order, error) from error

    def _broken(
        self, loss: float, lr: float, order: dict[str, Any], gradient: GradientError | None = None
    ) -> TrainingError:
        """What to say of a loss, or else a gradient, that is not finite. Collective."""
        broken = BrokenStep(
            step=self.step + 1,
            loss=loss,
            grad_norm=None if gradient is None else gradient.norm,
            gradients=[] if gradient is None else gradient.names,
            weights=self.engine.broken_weights(),
            rows=self._rows_from(order),
            lr=self.config.train.lr,
            checkpoint=next(reversed(list_checkpoints(self.folder)), None),
        )
        record = {"kind": "train", "step": broken.step, "loss": loss, "lr": lr, "grad_norm": broken.grad_norm}
        return TrainingError(broken.message(), record)

    def _rows_from(self, order: dict[str, Any]) -> str:
        """Where a step's rows stand in the data, in words."""
        data, seed, row, epoch = self.config.data, self.config.run.seed, order["epoch_row"], order["epoch"]
        said = f"{self.config.rows_per_step} rows of {data.train} from row {row} of epoch {epoch} on"
        if seed or epoch:
            return f"{said} (run.seed {seed})"
        return f"{said} (python -m launcher data inspect {data.train} --seq-len {data.seq_len} --row {row})"

    def _forward_backward(self, shares: list[Batch], counts: StepCounts) -> StepSums:
        """Gradients of the step's loss; returns this rank's sums."""
        sums, decoder = StepSums(), self.engine.model.decoder
        for number, share in enumerate(shares):
            decoder.replay = self._routing.replay(number)
            self._seed(number)
            loss = LossSum(*self.engine.forward(share))
            parts = (loss.objective_sum, loss.balance_sum, loss.z_sum)
            self.engine.backward(micro_batch_loss(*parts, counts, self.model_config))
            sums.add(loss)
        decoder.training_seed = decoder.replay = None  # validation drops nothing and chooses by itself
        return sums

    def _seed(self, micro_batch: int) -> None:
        """Let what is random in training depend on the run's seed, the step, and where a row stands in it: on no
        degree, no history."""
        decoder = self.engine.model.decoder
        decoder.training_seed = self.config.run.seed * 0x9E3779B1 + self.step
        decoder.training_start = self._first_token(micro_batch)

    def _balance(self, counts_LE: Tensor) -> None:
        """Let the step's loads move the selection bias, and serve the next step's balance loss."""
        if not self.model_config.num_experts:
            return
        if self.model_config.selection_bias_rate:
            move_selection_bias_(self.engine.model.decoder, counts_LE, self.model_config.selection_bias_rate)
        self._remember_load(counts_LE)
        if self._leads and (dead := self._dead_experts.find(counts_LE)):
            log.warning("%s", self._dead_experts.warning(dead, self.step, self.model_config))

    def _remember_load(self, counts_LE: Tensor) -> None:
        self._load_LE = counts_LE
        self.engine.model.load_LE = load_share(counts_LE).to(self.device)

    def _record(
        self, totals: StepTotals, counts: StepCounts, *, lr: float, grad_norm: float, seconds: float, waited: float
    ) -> Record:
        """The step's record."""
        return {
            "kind": "train",
            "step": self.step,
            "loss": totals.nll / max(1, counts.targets),
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": self.loader.tokens_consumed,
            "tokens_per_second": tokens_per_second(counts.tokens, seconds),
            "step_seconds": seconds,
            "data_wait_seconds": waited,
            "max_memory_bytes": peak_memory_bytes(self.device),
            "model_tflops": model_tflops(totals.flops, seconds, num_devices=self.mesh.world_size),
            "mfu": mfu(totals.flops, seconds, self._peak_flops),
            **expert_record(totals, self._expert_layers, counts.tokens),
        }

    def _validate(self) -> Record:
        assert self.validation is not None
        record = validate(
            self.engine.model,
            self.validation,
            self._share,
            seq_len=self.config.data.seq_len,
            vocab_size=self.model_config.vocab_size,
        )
        return {**record, "step": self.step}

    def _share(self, batch: Batch) -> Batch:
        """This rank's tokens of a micro-batch."""
        layout = self._layout(batch)
        return batch.flatten_rows().map_tokens(lambda x: layout.split(x, self.mesh.context_rank, 1)).to(self.device)

    def _layout(self, batch: Batch) -> SequenceLayout:
        bounds, mesh = tuple(batch.cu_seqlens.tolist()), self.mesh
        return cached_layout(self.config.parallel.layout, mesh.context, mesh.ulysses, bounds)

    def _places(self, batches: list[Batch]) -> list[Tensor]:
        """For each micro-batch, where this rank's tokens stand among all of the step's."""
        rank = self.mesh.context_rank
        return [self._first_token(number) + self._layout(b).indices(rank) for number, b in enumerate(batches)]

    def _first_token(self, micro_batch: int) -> int:
        """Where this rank's rows of a micro-batch begin among all tokens of the step."""
        row = (micro_batch * self.mesh.data + self.mesh.data_rank) * self.config.train.micro_batch_rows
        return row * self.config.data.seq_len

    def _due(self, every: int) -> bool:
        """Whether something done every so many steps (0: at the end only) is due after this one."""
        return self.step == self._last_step or (every > 0 and self.step % every == 0)

    @property
    def _last_step(self) -> int:
        """The step this process ends at."""
        steps, stop = self.config.train.steps, self.config.train.stop_after
        return min(steps, stop) if stop else steps

    def _open_data(self) -> None:
        config, mesh = self.config, self.mesh
        common: dict[str, Any] = {
            "seq_len": config.data.seq_len,
            "micro_batch_rows": config.train.micro_batch_rows,
            "data_rank": mesh.data_rank,
            "data_degree": mesh.data,
        }
        self.loader = build_loader(
            config.data.train, rows_per_step=config.rows_per_step, seed=config.run.seed, **common
        )
        vocab_size = self.loader.shards.manifest.vocab_size
        if vocab_size > self.model_config.vocab_size:
            raise ConfigError(
                f"data.train={config.data.train!r} holds token ids below {vocab_size}, but "
                f"model.vocab_size={self.model_config.vocab_size}.\nTry --model.vocab_size {vocab_size}."
            )
        self.validation = None
        if config.validation.rows:
            self.validation = build_validation_loader(
                config.validation_folder, max_rows=config.validation.rows, **common
            )

    def _build_engine(self) -> ZeroEngine:
        train, parallel = self.config.train, self.config.parallel
        model = build_parallel_model(
            self.model_config,
            self.mesh,
            layout=parallel.layout,
            kernel=parallel.kernel,
            transport=parallel.transport,
            communication_dtype=None
            if parallel.communication_dtype == "float32"
            else getattr(torch, parallel.communication_dtype),
            deterministic=parallel.deterministic,
            recompute=train.recompute,
            z_loss=train.z_loss,
            label_smoothing=train.label_smoothing,
            seed=self.config.run.seed,
        )
        model.decoder.expert_tile_tokens = parallel.expert_tile_tokens
        model.decoder.recompute_experts = train.recompute_experts
        options = OptimizerOptions(
            betas=(train.beta1, train.beta2), eps=train.eps, weight_decay=train.weight_decay, clip_norm=train.clip_norm
        )
        return ZeroEngine(
            model,
            stage=self.config.zero.stage,
            dtype=self.config.dtype,
            accumulation=self.loader.micro_batches_per_step,
            options=options,
        )

    def _open_routing(self) -> None:
        train = self.config.train
        self._routing = RoutingFiles(
            train.record_routing, train.replay_routing, self.model_config, train.tokens_per_step
        )
        steps = range(self.step + 1, self._last_step + 1)
        on_every_rank(lambda: self._routing.prepare(steps, resumes=self._resumed))

    def _resume(self, checkpoint: Path) -> None:
        """Take weights, moments, data order and step from a checkpoint."""
        training = load_checkpoint(checkpoint, self.engine, self.model_config).manifest["training"]
        if "loader" in training:
            on_every_rank(lambda: self.loader.load_state_dict(training["loader"]))
            self.step = training["step"]
        if training.get("expert_load"):  # the last step's, which the next one's balance loss may read
            self._remember_load(torch.tensor(training["expert_load"]))
        log.info("Resumed from %s at step %d.", checkpoint, self.step)

    def _start(self, checkpoint: Path) -> None:
        """Take a checkpoint's weights and nothing else."""
        load_weights(checkpoint, self.engine, self.model_config)
        log.info("Started from the weights of %s.", checkpoint)
        theirs, ours = checkpoint / TOKENIZER, self.loader.shards.folder / TOKENIZER
        if self._leads and theirs.is_file() and hash_file(theirs) != hash_file(ours):
            log.warning("%s is not the tokenizer that %s was made with: ids may mean other text.", theirs, ours.parent)

    def _rewind_folder(self) -> None:
        """Set aside what the run did after this step: it will be done anew. Good wherever it is killed."""
        remove_partial(self.folder)
        set_aside_newer(self.folder, self.step)  # first: rows may be newer than the newest checkpoint, never older
        truncate_after(self.folder, self.step)

    def _save(self) -> None:
        """Commit a checkpoint, then let go of the oldest."""
        started = time.perf_counter()
        training = {
            "step": self.step,
            "loader": self.loader.state_dict(),
            "world_size": self.mesh.world_size,
            "zero_stage": self.engine.stage,
            "expert_load": [] if self._load_LE is None else self._load_LE.tolist(),
            "config": dataclasses.asdict(self.config),
        }
        path = save_checkpoint(
            self.folder,
            self.engine,
            step=self.step,
            model=self.model_config,
            training=training,
            tokenizer=self.loader.shards.folder / TOKENIZER,
        )
        if self._leads:
            prune(self.folder, self.config.checkpoint.keep_last)
        log.info("Saved %s in %.1f s.", path, time.perf_counter() - started)

    def _finish(self) -> None:
        if not self._leads:
            return
        report = write_report(self.folder)
        newest = list_checkpoints(self.folder)[-1]
        log.info("Done: %d steps. Checkpoint %s, report %s.", self.step, newest, report)

    def _announce(self) -> None:
        config, model = self.config, self.model_config
        log.info(
            "%s on %s, %s%s, ZeRO %d, %s; %.2fM parameters; %d rows of %d tokens a step in %d micro-batches a rank.",
            self.mesh.describe(),
            device_name(self.device),
            config.parallel.layout,
            f" rows by {resolve_transport(config.parallel.transport, self.mesh)}" if self.mesh.context > 1 else "",
            config.zero.stage,
            config.train.dtype,
            self.engine.num_parameters / 1e6,
            config.rows_per_step,
            config.data.seq_len,
            self.loader.micro_batches_per_step,
        )
        if model.num_experts:
            log.info("%s", _describe_experts(config, model))
        report = self.loader.pack_report()
        log.info("Data: %d rows an epoch, %.2f %% padding.", self.loader.num_rows, 100 * report.padding_share)

    @property
    def _peak_flops(self) -> float | None:
        """FLOP/s of all devices together, where the maker's figure is known."""
        one = peak_device_flops(device_name(self.device), self.config.train.dtype)
        return None if one is None else one * self.mesh.world_size

    @property
    def _leads(self) -> bool:
        return self.mesh.rank == 0

    def _writer(self) -> RecordWriter:
        return RecordWriter(MetricsWriter(self.folder) if self._leads else None, self.config.train.steps)


def _describe_experts(config: RunConfig, model: ModelConfig) -> str:
    """One line for the log."""
    shared = ", one shared" if model.shared_ffn_size else ""
    ranks = f"; {model.num_experts // config.parallel.expert} on a rank" if config.parallel.expert > 1 else ""
    tiles = f", {config.parallel.expert_tile_tokens} tokens at a time" if config.parallel.expert_tile_tokens else ""
    capacity = f"; capacity {model.capacity_factor:g}" if model.capacity_factor else ""
    return f"{model.num_experts} experts a layer, {model.experts_per_token} a token{shared}{ranks}{tiles}{capacity}."
