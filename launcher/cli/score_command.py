"""The verb ``score``; ``launcher/score.py`` executes it over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from launcher.cli.cli_output import Json, note, print_json, print_line
from launcher.cli.evaluate_command import token_progress
from launcher.cli.shared_options import RankFlags
from longctx.errors import ConfigError


def score_tokens(
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR")],
    data: Annotated[str, arg(metavar="SHARDS")],
    output: Annotated[Path | None, arg(metavar="DIR")] = None,
    references: bool = False,
    tokenizer: Annotated[Path | None, arg(metavar="TOKENIZER")] = None,
    experts: bool = False,
    beyond_positions: bool = False,
    ranks: OmitArgPrefixes[RankFlags],
    json: Json = False,
) -> None:
    """Write the log-likelihood of every token in a shard folder, given its document before it.

    Writes Arrow files with complete documents: number, name, token ids, log-likelihoods in nats (null for the first
    token). A range of documents is on disk before the next one starts, so the same command continues after an
    interruption. Over ranks: --ranks N starts N ranks here, --hostfile FILE those on its hosts; for many short
    documents use --parallel.context 1, so that each rank has documents of its own.

    Args:
        checkpoint: Checkpoint, run folder (its newest checkpoint), or Hugging Face folder.
        data: Shard folder, or its URL.
        output: Folder for the files.
        references: For a folder of preferences and its validation folder: store each reply's log-likelihood there
            instead. The model is then the reference that dpo, ipo and kto compare with.
        tokenizer: For a folder without its own: SentencePiece model, tokenizer.json, or a folder with one.
        experts: Also write which experts read each token, layer by layer.
        beyond_positions: Allow documents longer than the model's positions.
        ranks: Device, memory, and ranks that deepspeed or torchrun starts.
    """
    if references:
        _store_references(
            checkpoint=checkpoint,
            data=data,
            output=output,
            tokenizer=tokenizer,
            experts=experts,
            beyond_positions=beyond_positions,
            ranks=ranks,
            as_json=json,
        )
        return
    if output is None:
        raise ConfigError("score writes files into --output DIR. Name a folder, or use --references for preferences.")
    import launcher.evaluation.score_run as scores
    from parallel.runtime.launched import environment_rank

    options = scores.ScoreOptions(
        checkpoint=checkpoint,
        data=data,
        output=output,
        tokenizer=tokenizer,
        experts=experts,
        beyond_positions=beyond_positions,
        **ranks.values(),
    )
    # All ranks compute; rank 0 prints.
    is_rank_0 = environment_rank()[0] == 0
    try:
        total = scores.score_shards(options, token_progress)
    except KeyboardInterrupt:
        if is_rank_0:
            note(f"{output} holds the scores so far: the same command resumes from there.")
        raise
    if not is_rank_0:
        return
    if json:
        print_json(vars(total))
        return
    print_line(f"{total.documents:,} documents, {total.tokens:,} tokens: {total.mean:.4f} nats per token")
    if total.counted_tokens != total.tokens:
        print_line(f"  over the {total.counted_tokens:,} loss tokens: {total.target_mean:.4f}")
    print_line(str(output))


def _store_references(
    *,
    checkpoint: Path,
    data: str,
    output: Path | None,
    tokenizer: Path | None,
    experts: bool,
    beyond_positions: bool,
    ranks: RankFlags,
    as_json: bool,
) -> None:
    """Store the replies' log-likelihoods in the folder of preferences."""
    for name, is_given in (("--output", output is not None), ("--experts", experts)):
        if is_given:
            raise ConfigError(f"{name} has no effect with --references, which writes into --data. Leave it out.")
    import launcher.evaluation.reference_run as references
    from parallel.runtime.launched import environment_rank

    options = references.ReferenceOptions(
        checkpoint=checkpoint, data=data, tokenizer=tokenizer, beyond_positions=beyond_positions, **ranks.values()
    )
    found = references.score_replies(options, token_progress)
    if environment_rank()[0] != 0:
        return
    if as_json:
        print_json({folder: vars(stored) for folder, stored in found.items()})
        return
    for folder, stored in found.items():
        first, second = stored.means
        print_line(f"{folder}: {stored.records:,} records, {stored.tokens:,} tokens")
        print_line(f"  log-likelihood of a first reply {first:.2f} nats, of a second {second:.2f}")
