"""The verbs ``data plan`` and ``data sample``: show the packed rows that a run reads, as statistics or as text."""

from __future__ import annotations

import dataclasses
import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional, arg

from launcher.cli.cli_output import Json, print_json, print_line, progress, table
from launcher.wording import format_count
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from data_pipeline.mixture.mixed_order import MixtureEstimate
    from data_pipeline.rows.epoch_blocks import PackReport
    from data_pipeline.rows.row_preview import RowPreview
    from launcher.config.config_sections import RunConfig
    from launcher.config.resolve import TargetMachine

# Equal to ``rows.pack.Kind``, and repeated here: tyro needs it at runtime, and the CLI imports data_pipeline (NumPy)
# only in the verbs that use it.
PackingKind = Literal["best_fit", "concatenate", "one_document"]


def plan_rows(
    *,
    config: Annotated[str | None, arg(metavar="F.toml")] = None,
    ranks: int = 0,
    json: Json = False,
    settings: Annotated[tuple[str, ...], tyro.conf.Suppress] = (),
) -> None:
    """Report a run's rows: padding, cuts, tokens by document length, and load balance between data ranks.

    Takes the config and flags of `train`. Reads lengths, not tokens. A rank's work is the model's FLOPs for its
    documents. The report compares the busiest rank with the mean, for rows in their order and with data.balance: the
    other ranks wait for it in every step, or in every micro-batch with zero.stage 2 or 3 and with experts on several
    data ranks.

    Args:
        config: The run's file, or a recipe name.
        ranks: Ranks in the run; default: those in run.hostfile if it names a file, otherwise the fewest that the
            degrees allow.
    """
    if ranks < 0:
        raise ConfigError(f"--ranks {ranks} must be at least 1, or 0 for the default.")
    from data_pipeline.inspect import PLANNED_DOCUMENTS
    from data_pipeline.loader import open_order
    from data_pipeline.mixture.mixed_order import MixedOrder
    from data_pipeline.rows.row_preview import preview_rows
    from data_pipeline.rows.row_reader import RowReader, documents_in, reader_options_for
    from data_pipeline.shards.reader import ShardSet
    from launcher.config.load_config import load_run_config
    from launcher.config.resolve import resolve_without_data
    from launcher.config.run_config_rules import check_run
    from launcher.metrics.throughput import training_flops
    from launcher.plan.planned_world import World

    argv = list(settings)
    if config is not None:
        argv[:0] = ["--config", config]
    run_config = load_run_config(argv)
    world = World.of(run_config, ranks)
    check_run(run_config, world.ranks)
    # Rows per micro-batch may depend on the ranks.
    run_config = resolve_without_data(run_config, _machine(run_config, world.ranks))
    data, micro_batches = run_config.data, run_config.micro_batches(world.ranks)
    open_folder = partial(ShardSet.open, verify=False, cache=data.cache)
    seed, packing, source_seq_len = run_config.run.seed, run_config.packing, data.source_seq_len
    order_options = {"seed": seed, "packing": packing, "source_seq_len": source_seq_len}
    folders, order = open_order(data.train, data.seq_len, open_folder=open_folder, **order_options)
    source_options = reader_options_for(folders, packing, data.seq_len, source_seq_len, seed=seed)
    row_reader = RowReader(
        documents_in(folders, order.fim_by_folder), data.seq_len, source_seq_len=source_seq_len, **source_options
    )
    cost = partial(training_flops, run_config.model.config())
    # Read from the resolved config: it depends on the ZeRO stage, which may be "auto".
    sync_micro_batches = run_config.sync_micro_batches
    with progress(f"planning {data.train}"):
        estimate = preview_rows(
            order,
            row_reader,
            micro_batches,
            cost,
            documents=PLANNED_DOCUMENTS,
            sync_per_micro_batch=sync_micro_batches,
        )
    if json:
        print_json(dataclasses.asdict(estimate))
        return
    rows_per_rank = sum(micro_batches.sizes)
    print_line(
        f"{data.train}: rows of {data.seq_len:,} tokens on {format_count(micro_batches.data_degree, 'data rank')}, "
        f"{format_count(rows_per_rank, 'row')} per step on each\n"
    )
    print_line(table(["", ""], _packing_rows(estimate, run_config.train.steps, sync_micro_batches=sync_micro_batches)))
    print_line("\n" + table(["tokens per piece", "share of tokens"], _length_rows(estimate)))
    if isinstance(order, MixedOrder):
        usage = order.estimate_usage(order.start(), run_config.train.steps * run_config.rows_per_step)
        print_line("\n" + table(["source", "tokens in the run", "passes"], _source_rows(usage)))


def sample_rows(
    folder: Annotated[Positional[str], arg(metavar="DIR")],
    *,
    seq_len: int,
    rows: int = 4,
    first_row: int = 0,
    seed: int = 0,
    packing: PackingKind = "best_fit",
    min_rest_tokens: int = 1,
    fim_rate: float = 0.0,
    fim_spm_rate: float = 0.5,
    fim_segment_tokens: int = 0,
    source_seq_len: int = 0,
    output: Annotated[Path | None, arg(metavar="F.txt")] = None,
) -> None:
    """Decode consecutive rows of a run and print their full text, each document below its name.

    Rows are the run's if the options below equal its config. A mixture file may have changed during a run: these are
    the rows of a run that used its present form from the start.

    Args:
        folder: Shard folder, or its URL (s3://, gs://); or a mixture file.
        seq_len: Tokens per row.
        rows: Rows to print.
        first_row: First row, from 0; rows before it are planned, in about a second per million documents.
        seed: The run's run.seed.
        packing: The run's data.packing.
        min_rest_tokens: The run's data.min_rest_tokens.
        fim_rate: The run's data.fim_rate.
        fim_spm_rate: The run's data.fim_spm_rate.
        fim_segment_tokens: The run's data.fim_segment_tokens.
        source_seq_len: The run's data.source_seq_len, for pairs.
        output: File to write; default: standard output.
    """
    from data_pipeline.inspect import decode_rows
    from data_pipeline.rows.fim import FimRule
    from data_pipeline.rows.pack import Packing

    rule = Packing(packing, min_rest_tokens, FimRule(fim_rate, fim_spm_rate, fim_segment_tokens))
    options = {"rows": rows, "first_row": first_row, "seed": seed, "packing": rule}
    row_texts = decode_rows(folder, seq_len=seq_len, source_seq_len=source_seq_len, **options)
    # One row at a time: each appears as soon as it is decoded, and memory holds a single row.
    if output is None:
        for row_text in row_texts:
            print_line(row_text)
        return
    from longctx.files import write_atomically

    text = "\n".join(row_texts)
    write_atomically(output, text.encode())
    print_line(f"Written to {output}: {len(text):,} characters.")


def _machine(config: RunConfig, ranks: int) -> TargetMachine:
    """Return the machine for a run on ``ranks`` ranks, with the config's device or this machine's."""
    import torch

    from launcher.config.resolve import TargetMachine

    device_type = config.run.device
    if device_type == "auto":
        device_type = "cpu"
        if torch.cuda.is_available():
            device_type = "cuda"
    # Rows do not depend on the dtype, so native bfloat16 is assumed.
    return TargetMachine(ranks=ranks, device_type=device_type, native_bfloat16=True)


def _packing_rows(estimate: RowPreview, steps: int, *, sync_micro_batches: bool) -> list[list[str]]:
    """Build table rows about packing cost and load balance between data ranks, for a run with ``steps`` steps."""
    packing, prefix = estimate.packing, ""
    if not packing.exact:
        prefix = "about "
    lines = [
        ["rows per epoch", f"{prefix}{packing.rows:,}"],
        ["steps per epoch", f"{prefix}{estimate.steps_of_epoch:,.1f}"],
        ["passes over the data", f"{prefix}{steps / max(estimate.steps_of_epoch, 1e-9):,.2f}"],
        ["padding", f"{prefix}{packing.padding_share:.2%}"],
    ]
    lines.extend([name, count] for name, count in truncation_counts(packing).items())
    label = "busiest rank"
    if sync_micro_batches:
        # With these settings ranks wait for each other in every micro-batch, not only once per step.
        label = "busiest rank per micro-batch"
    for name, factors in (("in their order", estimate.work.in_order), ("data.balance", estimate.work.balanced)):
        # Empty if an epoch has fewer rows than one step.
        if factors:
            mean, most = statistics.fmean(factors), max(factors)
            lines.append([f"{label}, rows {name}", f"{mean:.3f} times the mean ({most:.3f} at most)"])
    return lines


def truncation_counts(packing: PackReport) -> dict[str, str]:
    """Return counts of documents and tokens that rows cut or omit, formatted, by their label in a table."""
    prefix = ""
    if not packing.exact:
        prefix = "about "
    if packing.pairs_left_out is not None:
        return {"pairs left out, longer than a row on either side": f"{prefix}{packing.pairs_left_out:,}"}
    return {
        "documents longer than a row": f"{prefix}{packing.documents_cut:,}",
        "truncated tokens": f"{prefix}{packing.truncated_tokens:,}",
    }


def _source_rows(usage: MixtureEstimate) -> list[list[str]]:
    """Build table rows with the tokens and epochs that a run takes from each source."""
    rows = [[source.name, f"{source.tokens:,.0f}", f"{source.epochs:.2f}"] for source in usage.sources]
    # Estimates are floats: less than one token is rounding.
    if usage.missing_tokens >= 1:
        rows.append(["(used up: missing)", f"{usage.missing_tokens:,.0f}", ""])
    return rows


def _length_rows(estimate: RowPreview) -> list[list[str]]:
    """Build table rows with the share of tokens in pieces of each length; a piece is one document's tokens in a row."""
    total = sum(estimate.piece_tokens.values())
    rows = []
    # Key 2^k covers lengths from 2^k to 2^(k+1) - 1 tokens.
    for key, tokens in estimate.piece_tokens.items():
        shortest = 2 ** int(key.removeprefix("2^"))
        rows.append([f"{shortest:,} to {2 * shortest - 1:,}", f"{tokens / total:.1%}"])
    return rows
