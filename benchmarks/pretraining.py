"""Pretraining of encoders compared with transformers: accuracy on masked tokens and on two segments.

    python -m benchmarks.pretraining [--help-pages FOLDER] [--only nsp sop masks] [--seeds 0 1 2] [--quick]

Texts are the English pages of LibreOffice's help (Debian's ``libreoffice-help-en-us``) with their paragraphs, 4,000
WordPiece tokens; without it, Python's standard library. ``nsp`` trains ``BertForPreTraining`` with width 192 and 4
layers, and ours from the same weights on the same examples with the same AdamW, float32, without dropout; ``sop`` does
so with ``AlbertForPreTraining``, on the first 80 words of each page: in the middle of a help page the order of two
paragraphs carries little information. ``masks`` compares masks that change with each epoch with constant ones, after
ten epochs of ours on a fifth of the pages. Results are over held-out rows, masked in the same way each time; the pair
head's accuracy is compared with that of the best threshold on common tokens.

``--save`` writes ``benchmarks/results/KIND/pretraining.json``, which keeps rows of other cases and seeds: each takes
minutes on a core, and two processes may divide them. Exit code 1 if a mean over seeds is outside its bound.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.generation import convert
from benchmarks.machine import with_saved_rows
from benchmarks.translation import learn
from longctx.batch import IGNORED_TARGET, Batch

CASES = ("nsp", "sop", "masks")
SEEDS = (0, 1, 2)
STEPS, LR = {"nsp": 2000, "sop": 800}, {"nsp": 1e-3, "sop": 5e-4}
MASKS_LR = 1e-3
ROWS, ROW_TOKENS, VOCABULARY = 16, 128, 4000
HELD_OUT_ROWS, EPOCHS, FIRST_WORDS = 256, 10, 80
ACCURACY_BOUND = 0.005
PAIR_BOUND = {"nsp": 0.7, "sop": 0.6}
_FEW = ["*[05].txt", "[a-c]*.py"]
"""A fifth of the pages, or some files of the standard library."""


@dataclass(frozen=True)
class Corpus:
    """Shards of texts."""

    folder: Path
    """All pages."""
    firsts: Path
    """Their beginnings."""
    few: Path
    """A fifth of the pages, uncut, for which ten epochs take minutes."""
    tokenizer: Any


def prepare(folder: Path, help_pages: Path) -> Corpus:
    """Write the pages as texts with a paragraph per line, train a tokenizer, and build the shards."""
    from data_pipeline.prepare.build_shards import build_shards
    from data_pipeline.prepare.sources import open_source
    from data_pipeline.prepare.train_tokenizer import train_tokenizer
    from launcher.demos.pairs import paragraphs_of_page

    texts, firsts = folder / "texts", folder / "firsts"
    source = first_source = "stdlib"
    if (help_pages / "en-US").is_dir():
        source, first_source = texts, firsts
        texts.mkdir()
        firsts.mkdir()
        for number, page in enumerate(sorted((help_pages / "en-US" / "text").rglob("*.html"))):
            paragraphs = list(filter(None, paragraphs_of_page(page).values()))
            (texts / f"{number:05}.txt").write_text("\n".join(paragraphs))
            (firsts / f"{number:05}.txt").write_text("\n".join(first_words(paragraphs)))
    tokenizer = train_tokenizer(open_source(source), folder / "t.json", vocab_size=VOCABULARY, kind="wordpiece")
    build_shards(open_source(source), tokenizer, folder / "shards", validation_fraction=0.05, paragraphs=True)
    build_shards(open_source(first_source), tokenizer, folder / "beginnings", validation_fraction=0.1, paragraphs=True)
    few = open_source(source, include=_FEW)
    build_shards(few, tokenizer, folder / "few", validation_fraction=0.15, paragraphs=True)
    return Corpus(folder / "shards", folder / "beginnings", folder / "few", tokenizer)


def first_words(paragraphs: Sequence[str]) -> list[str]:
    """Return the paragraphs up to ``FIRST_WORDS`` words in total."""
    found, left = [], FIRST_WORDS
    for paragraph in paragraphs:
        words = paragraph.split()[:left]
        if words:
            found.append(" ".join(words))
        left -= len(words)
    return found


def packing(kind: str) -> dict[str, Any]:
    """Return the packing rule for a kind."""
    from data_pipeline.rows.pack import Packing
    from data_pipeline.rows.text_segments import SegmentRule

    return {"packing": Packing(examples=SegmentRule(kind))} if kind else {}


def batches(corpus: Corpus, kind: str, *, seed: int = 0, static: bool = False) -> Any:
    """Return the loader of training rows; without ``kind`` texts are read unchanged."""
    from data_pipeline.loader import build_loader
    from data_pipeline.rows.token_masking import MaskRule

    options = {"rows_per_step": ROWS, "micro_batch_rows": ROWS, "mask": MaskRule(static=static)}
    return build_loader(corpus.folder, seq_len=ROW_TOKENS, seed=seed, **options, **packing(kind))


def held_out(corpus: Corpus, kind: str) -> Any:
    """Return the loader of held-out rows."""
    from data_pipeline.loader import build_validation_loader
    from data_pipeline.rows.token_masking import MaskRule

    options = {"max_rows": HELD_OUT_ROWS, "micro_batch_rows": ROWS, "mask": MaskRule()}
    return build_validation_loader(corpus.folder / "validation", seq_len=ROW_TOKENS, **options, **packing(kind))


def stock(kind: str, tokenizer: Any, seed: int = 0) -> nn.Module:
    """Build transformers' model of a kind."""
    import transformers

    sizes = {"vocab_size": tokenizer.vocab_size, "hidden_size": 192, "num_attention_heads": 4, "intermediate_size": 768}
    sizes |= {"num_hidden_layers": 4, "max_position_embeddings": ROW_TOKENS, "pad_token_id": tokenizer.padding}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(seed)
    if kind == "sop":
        config = transformers.AlbertConfig(embedding_size=96, hidden_act="gelu_new", **sizes)
        config._attn_implementation = "sdpa"
        return transformers.AlbertForPreTraining(config)
    config = transformers.BertConfig(**sizes)
    config._attn_implementation = "sdpa"
    return (transformers.BertForPreTraining if kind else transformers.BertForMaskedLM)(config)


def padded_step(model: Any, batch: Batch, kind: str) -> Tensor:
    """Return transformers' loss on a batch with its documents padded."""
    assert batch.segments is not None
    assert batch.labels is not None
    bounds, padding = batch.documents.bounds, set(batch.documents.padding or ())
    numbers = [n for n in range(batch.documents.num_documents) if n not in padding]

    def rows(values: Tensor, fill: int) -> Tensor:
        parts = [values.flatten()[bounds[n] : bounds[n + 1]] for n in numbers]
        return nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)

    tokens = rows(batch.tokens, model.config.pad_token_id)
    lengths = torch.tensor([bounds[n + 1] - bounds[n] for n in numbers])
    asked = "next_sentence_label" if kind == "nsp" else "sentence_order_label"
    order = batch.labels.flatten()[[bounds[n] for n in numbers]]
    given = {"input_ids": tokens, "token_type_ids": rows(batch.segments, 0), asked: order}
    given["attention_mask"] = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    return model(**given, labels=rows(batch.targets, IGNORED_TARGET)).loss


@torch.no_grad()
def figures(decoder: Any, corpus: Corpus, kind: str) -> dict[str, float]:
    """Return the accuracy on masked tokens and on pairs over held-out rows."""
    from launcher.evaluation.masked_evaluation import MaskedScores, word_overlap_accuracy

    decoder.eval()
    loader = held_out(corpus, kind)
    scores = MaskedScores()
    for batch in loader:
        scores.add(decoder, batch, corpus.folder, "float32")
    decoder.train()
    targets, loss, right, pairs, right_pairs = scores.sums.tolist()
    found = {"masked_accuracy": right / targets, "masked_loss": loss / targets}
    if pairs:
        found |= {"pair_accuracy": right_pairs / pairs, "word_overlap": word_overlap_accuracy(loader)}
    return {name: round(value, 4) for name, value in found.items()}


def measure_pairs(corpus: Corpus, kind: str, seed: int, steps: int) -> dict[str, Any]:
    """Train both sides on one kind of pairs; return their accuracies."""
    from longctx.objectives.build import Objective, build_objective

    if kind == "sop":
        corpus = replace(corpus, folder=corpus.firsts)
    theirs = stock(kind, corpus.tokenizer, seed).train()
    task = build_objective(convert(theirs, torch.float32), Objective("masked")).train()

    def our_loss(batch: Batch) -> Tensor:
        return task.loss(task.loss_sum(task(batch)), task.denominators(batch))

    ours = learn(
        task,
        our_loss,
        batches(corpus, kind, seed=seed),
        steps,
        lambda: figures(task.network, corpus, kind),
        lr=LR[kind],
    )
    found = learn(
        theirs,
        lambda batch: padded_step(theirs, batch, kind),
        batches(corpus, kind, seed=seed),
        steps,
        lambda: figures(convert(theirs, torch.float32), corpus, kind),
        lr=LR[kind],
    )
    return {"case": kind, "seed": seed, "date": date.today().isoformat(), "longctx": ours, "transformers": found}


def measure_masks(corpus: Corpus, steps: int | None) -> dict[str, Any]:
    """Train ours with masks that change with each epoch, and with constant masks; return the accuracies."""
    from longctx.objectives.build import Objective, build_objective

    corpus, found = replace(corpus, folder=corpus.few), {}
    for name, static in (("dynamic", False), ("static", True)):
        task = build_objective(convert(stock("", corpus.tokenizer), torch.float32), Objective("masked")).train()
        loader = batches(corpus, "", static=static)
        count = steps or EPOCHS * loader.pack_report().rows // ROWS

        def our_loss(batch: Batch, task: Any = task) -> Tensor:
            return task(batch)[0] / max(1, batch.num_targets)

        found[name] = learn(
            task, our_loss, loader, count, lambda task=task: figures(task.network, corpus, ""), lr=MASKS_LR
        )
    return {"case": "masks", "seed": 0, "date": date.today().isoformat(), **found}


def bounds(rows: Sequence[dict[str, Any]]) -> Iterator[Bound]:
    """Return the bounds on the results for one kind of pairs, as means over seeds."""
    for case in ("nsp", "sop"):
        last = [(row["longctx"][-1], row["transformers"][-1]) for row in rows if row["case"] == case]
        if not last:
            continue
        difference = abs(fmean(ours["masked_accuracy"] - theirs["masked_accuracy"] for ours, theirs in last))
        yield Bound("difference of the masked tokens told", difference, ACCURACY_BOUND, case)
        yield Bound(
            "pairs told", fmean(ours["pair_accuracy"] for ours, _ in last), PAIR_BOUND[case], case, at_least=True
        )


def main() -> int:
    """Print and save what the models learned; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--help-pages", type=Path, default=Path("/usr/share/libreoffice/help"), help="LibreOffice's help"
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="cases to run")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="seeds of weights and examples")
    options = parse(parser, quick="20 steps of one seed")
    torch.set_num_threads(1)  # matrices are small
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare(Path(folder), options.help_pages)
        rows: list[dict[str, Any]] = []
        code = 0
        for case in options.only:
            for seed in _seeds(case, options):
                rows.append(measure(corpus, case, seed, quick=options.quick))
                # Row by row, so that a later interruption keeps earlier measurements.
                code = judge(rows, options)
    return code


def judge(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> int:
    """Print the missed bounds, and merge the rows into the saved ones; return the exit code."""
    if options.save and not options.quick:
        rows = with_saved_rows("pretraining", CASES, rows)
    content = {"steps": STEPS, "rows_of_a_step": ROWS, "row_tokens": ROW_TOKENS, "rows": list(rows)}
    return conclude("pretraining", content, list(bounds(rows)), options)


def _seeds(case: str, options: argparse.Namespace) -> Sequence[int]:
    """Return the seeds: masks are compared once, and a quick run has one seed."""
    if case == "masks":
        return SEEDS[:1]
    return options.seeds[:1] if options.quick else options.seeds


def measure(corpus: Corpus, case: str, seed: int, *, quick: bool) -> dict[str, Any]:
    """Measure one row."""
    if case == "masks":
        return measure_masks(corpus, 20 if quick else None)
    return measure_pairs(corpus, case, seed, 20 if quick else STEPS[case])


if __name__ == "__main__":
    sys.exit(main())
