"""Learning to translate, compared with transformers' Marian: BLEU after the same steps, and after the same CPU seconds.

    python -m benchmarks.translation [--help-pages FOLDER] [--quick]

Pairs are those of ``make demo-translate``: LibreOffice's help in English and German by paragraphs, with complete pages
held out, or without it sums in words. Both sides start from the same weights, see the same pairs in the same order, and
take the same steps with the same AdamW, float32, without dropout, three seeds. transformers pads a step's pairs; ours
are packed. BLEU is sacrebleu's, over 400 held-out pairs, each side writing with its own greedy search; CPU seconds are
those of forward, backward and update. ``--save`` writes ``benchmarks/results/KIND/translation.json``; exit code 1 if a
result is outside its bound.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.generation import convert
from longctx.batch import IGNORED_TARGET, PADDING_DOCUMENT, Batch

SEEDS = (0, 1, 2)
STEPS, WARMUP, LR = 600, 120, 2e-3
EVALUATIONS = 5
ROWS, ROW_TOKENS, VOCABULARY = 4, 512, 4000
HELD_OUT, ANSWER_TOKENS = 400, 100
BLEU_BOUND = 0.5
BEAMS, LENGTH_PENALTY = 4, 0.6


@dataclass(frozen=True)
class Corpus:
    """Shards of pairs, and the held-out ones as ids and text."""

    train: Path
    tokenizer: Any
    sources: list[list[int]]
    references: list[str]


def prepare(folder: Path, help_pages: Path | None) -> Corpus:
    """Write the pairs, train a tokenizer for both sides, and build the shards."""
    from data_pipeline.prepare.build_shards import build_shards
    from data_pipeline.prepare.sources import open_source
    from data_pipeline.prepare.train_tokenizer import train_tokenizer
    from data_pipeline.shards.reader import ShardSet, SourceSide
    from launcher.demos import pairs

    pairs.main([str(folder), *(["--help-pages", str(help_pages)] if help_pages else [])])
    sides: dict[str, Any] = {"source_field": "en", "text_field": "de"}
    train = folder / "train.jsonl"
    vocabulary = VOCABULARY if train.stat().st_size > 5_000_000 else 600
    tokenizer = train_tokenizer(open_source(train, **sides), folder / "t.model", vocab_size=vocabulary)
    for name in ("train", "held-out"):
        build_shards(open_source(folder / f"{name}.jsonl", **sides), tokenizer, folder / name, validation_fraction=0)
    held_out = ShardSet.open(folder / "held-out")
    pieces = [(number, 0, 1 << 30) for number in range(min(HELD_OUT, held_out.num_documents))]
    sources = [ids.tolist() for ids in SourceSide(held_out).slices(pieces)]
    references = [tokenizer.decode(ids) for ids in held_out.slices(pieces)]
    return Corpus(folder / "train", tokenizer, sources, references)


def stock(tokenizer: Any, seed: int) -> nn.Module:
    """Build transformers' Marian, small."""
    import transformers

    special = tokenizer.special
    config = transformers.MarianConfig(
        vocab_size=tokenizer.vocab_size, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, max_position_embeddings=ROW_TOKENS,
        activation_function="relu", dropout=0.0, attention_dropout=0.0, scale_embedding=True, init_std=128**-0.5,
        pad_token_id=special.padding, eos_token_id=special.end, bos_token_id=special.begin,
        decoder_start_token_id=special.begin, forced_eos_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    return transformers.MarianMTModel(config)


def batches(corpus: Corpus, seed: int) -> Iterator[Batch]:
    """Yield each step's rows, end to end."""
    from data_pipeline.loader import build_loader

    sizes: dict[str, Any] = {"rows_per_step": ROWS, "micro_batch_rows": ROWS}
    loader = build_loader(corpus.train, seq_len=ROW_TOKENS, source_seq_len=ROW_TOKENS, seed=seed, **sizes)
    for batch in loader:
        yield batch.flatten_rows()


def pairs_of(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Return source and target of each pair in a batch."""
    assert batch.source is not None
    sides = []
    for side in (batch.source, batch):
        bounds, padding = side.documents.bounds, set(side.documents.padding or ())
        ids = side.tokens.flatten()
        texts = [ids[bounds[n] : bounds[n + 1]] for n in range(side.documents.num_documents) if n not in padding]
        sides.append(texts)
    assert (batch.document_ids == PADDING_DOCUMENT).any() or len(sides[0]) == len(sides[1])
    return list(zip(*sides, strict=True))


def padded_step(model: Any, batch: Batch) -> Tensor:
    """Return transformers' loss on a batch with its pairs padded."""
    pairs = pairs_of(batch)
    padding = model.config.pad_token_id

    def rows(texts: Sequence[Tensor], fill: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=fill)

    sources = rows([source for source, _ in pairs], padding)
    lengths = torch.tensor([len(source) for source, _ in pairs])
    mask = (torch.arange(sources.shape[1]) < lengths[:, None]).long()
    read = rows([target[:-1] for _, target in pairs], padding)
    labels = rows([target[1:] for _, target in pairs], IGNORED_TARGET)
    given = {"input_ids": sources, "attention_mask": mask, "decoder_input_ids": read, "labels": labels}
    return model(**given, use_cache=False).loss


def learn(
    model: nn.Module,
    loss_of: Callable[[Batch], Tensor],
    rows: Iterator[Batch],
    steps: int,
    figures: Callable[[], dict[str, float]],
    *,
    lr: float = LR,
) -> list[dict[str, float]]:
    """Take the steps; return loss, CPU seconds and ``figures`` at even distances."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    spent, found, every = 0.0, [], max(1, steps // EVALUATIONS)
    for step in range(1, steps + 1):
        batch = next(rows)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(step / WARMUP, (WARMUP / step) ** 0.5)
        start = time.process_time()
        loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        spent += time.process_time() - start
        if step % every == 0:
            found.append({"step": step, "loss": float(loss.detach()), "cpu_seconds": round(spent, 1), **figures()})
            print(found[-1], flush=True)
    return found


def score(corpus: Corpus, written: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the BLEU of translations of the held-out sources."""
    from sacrebleu.metrics import BLEU

    texts = [corpus.tokenizer.decode(list(ids)) for ids in written]
    return {"bleu": round(BLEU().corpus_score(texts, [corpus.references]).score, 2)}


@torch.no_grad()
def write_theirs(model: Any, corpus: Corpus) -> list[list[int]]:
    """Return transformers' greedy translations, fifty at a time."""
    model.eval()
    written, end, start = [], corpus.tokenizer.special.end, corpus.tokenizer.special.begin
    for first in range(0, len(corpus.sources), 50):
        texts = [torch.tensor(ids) for ids in corpus.sources[first : first + 50]]
        given = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=model.config.pad_token_id)
        mask = torch.arange(given.shape[1]) < torch.tensor([len(text) for text in texts])[:, None]
        found = model.generate(given, attention_mask=mask.long(), max_new_tokens=ANSWER_TOKENS, num_beams=1)
        for ids in found.tolist():
            text = ids[1:] if ids[0] == start else ids
            written.append(text[: text.index(end)] if end in text else text)
    model.train()
    return written


@torch.no_grad()
def write_ours(decoder: Any, corpus: Corpus, strategy: Any = None) -> list[list[int]]:
    """Return our translations."""
    from longctx.generation.continuous_batching import generate_batch

    special = corpus.tokenizer.special
    decoder.eval()
    prompts = [[special.begin]] * len(corpus.sources)
    found = dict(
        generate_batch(decoder, prompts, ANSWER_TOKENS, strategy, sources=corpus.sources, stop_ids=special.stops)
    )
    decoder.train()
    return [found[index] for index in range(len(corpus.sources))]


def measure(corpus: Corpus, seed: int, steps: int) -> dict[str, Any]:
    """Train both sides from one seed; return their results."""
    from longctx.generation.beams import Beams
    from longctx.objectives.build import build_objective

    theirs = stock(corpus.tokenizer, seed).train()
    task = build_objective(convert(theirs, torch.float32)).train()

    def our_loss(batch: Batch) -> Tensor:
        return task(batch)[0] / batch.num_targets

    ours = learn(task, our_loss, batches(corpus, seed), steps, lambda: score(corpus, write_ours(task.network, corpus)))
    beams = score(corpus, write_ours(task.network, corpus, Beams(num_beams=BEAMS, length_penalty=LENGTH_PENALTY)))
    found = learn(
        theirs,
        lambda batch: padded_step(theirs, batch),
        batches(corpus, seed),
        steps,
        lambda: score(corpus, write_theirs(theirs, corpus)),
    )
    return {"seed": seed, "longctx": ours, "transformers": found, "beams": beams["bleu"]}


def at_equal_seconds(row: dict[str, Any]) -> float:
    """Return our last BLEU minus transformers' after as many CPU seconds, interpolated between its evaluations."""
    seconds, bleu = ([0.0, *(at[name] for at in row["transformers"])] for name in ("cpu_seconds", "bleu"))
    last = row["longctx"][-1]
    return last["bleu"] - float(np.interp(last["cpu_seconds"], seconds, bleu))


def bounds(rows: Sequence[dict[str, Any]]) -> Iterator[Bound]:
    """Return the bounds on the results, as means over seeds."""
    last = {who: sum(row[who][-1]["bleu"] for row in rows) / len(rows) for who in ("longctx", "transformers")}
    yield Bound("difference of BLEU after the same steps", abs(last["longctx"] - last["transformers"]), BLEU_BOUND)
    ahead = sum(map(at_equal_seconds, rows)) / len(rows)
    yield Bound("BLEU over transformers' at equal CPU seconds", ahead, 0.0, at_least=True)
    beams = sum(row["beams"] for row in rows) / len(rows)
    yield Bound("BLEU of four beams over that of greedy search", beams - last["longctx"], 0.0, at_least=True)


def main() -> int:
    """Print and save what the models learned; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--help-pages", type=Path, help="LibreOffice's help; unless given, where Debian installs it")
    options = parse(parser, quick="one seed and 20 steps")
    torch.set_num_threads(1)  # matrices are small
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare(Path(folder), options.help_pages)
        for seed in SEEDS[:1] if options.quick else SEEDS:
            rows.append(measure(corpus, seed, 20 if options.quick else STEPS))
    content = {"steps": STEPS, "rows_of_a_step": ROWS, "row_tokens": ROW_TOKENS, "held_out": HELD_OUT, "rows": rows}
    return conclude("translation", content, list(bounds(rows)), options)


if __name__ == "__main__":
    sys.exit(main())
