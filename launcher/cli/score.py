"""The verb ``score``; ``launcher/score.py`` runs it over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from launcher.cli.console import Json, note, say, say_json
from launcher.cli.evaluate import token_progress
from launcher.cli.options import RankFlags


def score(
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR")],
    data: Annotated[str, arg(metavar="SHARDS")],
    output: Annotated[Path, arg(metavar="DIR")],
    tokenizer: Annotated[Path | None, arg(metavar="TOKENIZER")] = None,
    experts: bool = False,
    beyond_positions: bool = False,
    ranks: OmitArgPrefixes[RankFlags],
    json: Json = False,
) -> None:
    """Write the log-likelihood of every token of a shard folder, each given its document before it.

    Arrow files of whole documents: number, name, token ids, log-likelihoods in nats (null for the first token).
    A block of documents is on the disk before the next one begins: the same command goes on where it stopped.
    Over ranks: --ranks N starts N of them here, --hostfile FILE those of its hosts; of many short documents with
    --parallel.context 1, so that each rank has documents of its own.

    Args:
        checkpoint: Checkpoint, run folder (its newest checkpoint), or Hugging Face folder.
        data: Shard folder, or its URL.
        output: Folder for the files.
        tokenizer: For a folder that has none of its own: SentencePiece model, tokenizer.json, or a folder with one.
        experts: Write which experts read each token, too, layer by layer.
        beyond_positions: Allow documents beyond the model's positions.
        ranks: Device, memory, and ranks that deepspeed or torchrun starts.
    """
    import launcher.evaluation.scores as scores
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
    is_rank_0 = environment_rank()[0] == 0
    try:
        total = scores.score(options, token_progress)
    except KeyboardInterrupt:
        if is_rank_0:
            note(f"{output} holds what was scored: the same command goes on from there.")
        raise
    if not is_rank_0:
        return
    if json:
        say_json(vars(total))
        return
    say(f"{total.documents:,} documents, {total.tokens:,} tokens: {total.mean:.4f} nats a token")
    if total.counted_tokens != total.tokens:
        say(f"  of the {total.counted_tokens:,} that count in a loss: {total.counted_mean:.4f}")
    say(str(output))
