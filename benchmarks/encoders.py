"""Encoders and encoder–decoders, compared with transformers: CPU seconds and memory per step, tokens written per
second.

    python -m benchmarks.encoders [--quick] [--only marian bert writing]

One process, two threads, float32, the same weights in both. ``marian`` has 6 + 6 layers of width 512 (the original
Transformer's base shape) and 64 pairs, with lengths from sentences in LibreOffice's help and their German translations
(Debian's ``libreoffice-help-en-us`` and ``-de``, 8,000 BPE tokens); ``bert`` has 8 layers of width 512 and 32 pages
from the same help, cut at 512 tokens. transformers pads both to the longest; we pack rows. Both losses are compared.
``writing`` is greedy, for the 64 pairs' sources, eight at a time, each until it has as many tokens as its target:
transformers writes until the longest of eight ends, while we replace a finished source by the next one.

CPU seconds are the minimum over rounds in which both take turns; memory, from fresh processes, is the peak above
weights and gradients. ``--save`` writes ``benchmarks/results/KIND/encoders.json``; exit code 1 if a result is outside
its bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.decoder import THREADS, in_process
from benchmarks.generation import convert, cpu_seconds
from benchmarks.ranks import with_resident_rise
from longctx.batch import IGNORED_TARGET, Batch, PackedDocuments, Stream, with_targets

# Token counts (source, target) for 64 sentences and for 32 pages: evenly spaced ranks in the sorted corpora above.
PAIR_LENGTHS = (
    (7, 8), (8, 8), (8, 9), (9, 8), (9, 8), (9, 16), (10, 12), (10, 14), (11, 15), (11, 12), (11, 11), (12, 14),
    (12, 13), (12, 14), (13, 24), (13, 13), (13, 12), (14, 20), (14, 12), (14, 19), (15, 13), (15, 17), (15, 9),
    (16, 22), (16, 18), (17, 16), (17, 23), (18, 18), (18, 20), (18, 20), (19, 24), (19, 19), (20, 26), (20, 19),
    (21, 21), (22, 24), (22, 24), (23, 23), (23, 26), (24, 30), (25, 28), (25, 27), (26, 21), (27, 31), (28, 27),
    (29, 30), (30, 31), (31, 33), (32, 27), (33, 42), (34, 34), (35, 37), (37, 45), (38, 40), (40, 44), (42, 35),
    (44, 41), (46, 43), (49, 46), (51, 52), (55, 63), (59, 57), (64, 68), (72, 69),
)  # fmt: skip
PAGE_LENGTHS = (
    19, 26, 33, 39, 46, 54, 62, 69, 77, 87, 96, 104, 113, 126, 139, 152, 165, 181, 198, 214, 230, 248, 274, 297,
    331, 370, 411, 461, 512, 512, 512, 512,
)  # fmt: skip
VOCABULARY = 8_000
PROMPTS, END = 8, 2
"""Number of texts written at a time, and the end id."""
CASES = ("marian", "bert", "writing")
TIME_BOUND, MEMORY_BOUND, SPEED_BOUND = 0.8, 0.5, 1.2
TIME_WHY = "transformers computes its padding, and keeps all logits"


def marian() -> Any:
    """Build transformers' Marian with the base shape."""
    import transformers

    config = transformers.MarianConfig(
        vocab_size=VOCABULARY, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_position_embeddings=512,
        activation_function="relu", dropout=0.0, attention_dropout=0.0, scale_embedding=True, init_std=0.03,
        pad_token_id=0, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return transformers.MarianMTModel(config)


def bert() -> Any:
    """Build transformers' BERT, smaller than base."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048,
        max_position_embeddings=512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(config)


def documents(lengths: Sequence[int], seed: int) -> list[Tensor]:
    """Return random tokens with these lengths, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, VOCABULARY, (length,), generator=generator) for length in lengths]


def padded(texts: Sequence[Tensor], fill: int = 0) -> tuple[Tensor, Tensor]:
    """Return the texts [B, longest], and the mask of tokens without padding."""
    tokens = nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=fill)
    lengths = torch.tensor([len(text) for text in texts])
    return tokens, (torch.arange(tokens.shape[1]) < lengths[:, None]).long()


def packed(texts: Sequence[Tensor]) -> Stream:
    """Return the texts in one row."""
    lengths = [len(text) for text in texts]
    return Stream(
        tokens=torch.cat(list(texts))[None],
        positions=torch.cat([torch.arange(length) for length in lengths])[None],
        document_ids=torch.arange(len(texts)).repeat_interleave(torch.tensor(lengths))[None],
        documents=PackedDocuments.of_lengths(lengths, ()),
    )


def pair_batches() -> tuple[dict[str, Tensor], Batch]:
    """Return the pairs in transformers' form, and as one row with its sources."""
    sources, targets = (documents([pair[side] for pair in PAIR_LENGTHS], side) for side in range(2))
    read = [torch.cat([torch.tensor([1]), target[:-1]]) for target in targets]
    given: dict[str, Tensor] = dict(zip(("input_ids", "attention_mask"), padded(sources), strict=True))
    given["decoder_input_ids"], given["labels"] = padded(read)[0], padded(targets, IGNORED_TARGET)[0]
    row = with_targets(packed(read), torch.cat(targets)[None])
    return given, replace(row, source=packed(sources))


def page_batches() -> tuple[dict[str, Tensor], Batch]:
    """Return the pages in transformers' form, and as one row; every seventh token is to be predicted."""
    pages = documents(PAGE_LENGTHS, 2)
    labels = [page.masked_fill(torch.arange(len(page)) % 7 != 0, IGNORED_TARGET) for page in pages]
    read = [page.masked_fill(torch.arange(len(page)) % 7 == 0, 4) for page in pages]
    given: dict[str, Tensor] = dict(zip(("input_ids", "attention_mask"), padded(read), strict=True))
    given["labels"] = padded(labels, IGNORED_TARGET)[0]
    targets = torch.cat(labels)[None]
    row = with_targets(packed(read), targets)
    return given, replace(row, masked_indices=(targets[0] != IGNORED_TARGET).nonzero().flatten())


BUILD = {"marian": (marian, pair_batches, "causal"), "bert": (bert, page_batches, "masked")}


def steps(case: str) -> dict[str, tuple[nn.Module, Callable[[], Tensor]]]:
    """Return both models, and functions that compute a loss and its gradients."""
    from longctx.objectives.build import Objective, build_objective

    build, batches, objective = BUILD[case]
    model = build()
    given, row = batches()
    task = build_objective(convert(model, torch.float32), Objective(objective)).train()
    count = int((row.targets != IGNORED_TARGET).sum())

    def theirs() -> Tensor:
        loss = model(**given, use_cache=False).loss if case == "marian" else model(**given).loss
        loss.backward()
        return loss.detach()

    def ours() -> Tensor:
        loss = task(row)[0] / count
        loss.backward()
        return loss.detach()

    return {"transformers": (model, theirs), "longctx": (task, ours)}


def measure_time(case: str, rounds: int) -> dict[str, Any]:
    """Measure CPU seconds and losses of both, by turns."""
    torch.set_num_threads(THREADS)
    ways = steps(case)
    losses = {who: float(step()) for who, (_, step) in ways.items()}  # the first use of anything is not counted
    seconds: dict[str, list[float]] = {who: [] for who in ways}
    for _ in range(rounds):
        for who, (_, step) in ways.items():
            start = time.process_time()
            step()
            seconds[who].append(time.process_time() - start)
    return {"cpu_seconds": {who: round(min(found), 3) for who, found in seconds.items()}, "losses": losses}


def measure_memory(case: str, who: str) -> float:
    """Measure MiB over weights and gradients in a process that runs one of the two."""
    torch.set_num_threads(THREADS)
    model, step = steps(case)[who]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step()  # the first use of code takes memory too
    return with_resident_rise(step)[1]


def measure_step(case: str, rounds: int) -> dict[str, Any]:
    """Measure one table row for a training step."""
    timed = in_process(measure_time, case, rounds)
    mib = {who: round(in_process(measure_memory, case, who)) for who in ("transformers", "longctx")}
    seconds = timed["cpu_seconds"]
    given, row = BUILD[case][1]()
    shapes = [given[name].numel() for name in ("input_ids", "decoder_input_ids") if name in given]
    own = row.tokens.numel() + (row.source.tokens.numel() if row.source is not None else 0)
    return {
        "case": case,
        **timed,
        "time_ratio": round(seconds["longctx"] / seconds["transformers"], 3),
        "activation_mib": mib,
        "memory_ratio": round(mib["longctx"] / mib["transformers"], 3),
        "padding_share": round(1 - own / sum(shapes), 3),
    }


@dataclass(frozen=True)
class Until:
    """Greedy choice, with the end id once a text has its length; lengths are in the order in which texts begin."""

    lengths: Iterator[int]

    def start(self) -> Callable[[Tensor], int]:
        """Return a function that chooses one text's tokens."""
        left = count(next(self.lengths) - 1, -1)
        return lambda logits_V: int(logits_V.argmax()) if next(left) else END


def measure_writing(rounds: int) -> dict[str, Any]:
    """Measure CPU seconds for both to write from all sources, by turns."""
    import transformers

    from longctx.generation.continuous_batching import generate_batch

    torch.set_num_threads(THREADS)
    reference = marian().eval()
    # Wide embeddings: with a new model's own, one token would repeat forever.
    nn.init.normal_(reference.get_input_embeddings().weight)
    model = convert(reference, torch.float32)
    # In text order, and not grouped by length.
    order = torch.randperm(len(PAIR_LENGTHS), generator=torch.Generator().manual_seed(3)).tolist()
    pairs = [PAIR_LENGTHS[number] for number in order]
    sources, lengths = documents([source for source, _ in pairs], 3), [target for _, target in pairs]

    class Ends(transformers.LogitsProcessor):
        """Ends each row after its number of tokens."""

        def __init__(self, lengths: Sequence[int]) -> None:
            self.ends = torch.tensor(lengths)

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, END] = torch.where(self.ends == input_ids.shape[1], torch.inf, -torch.inf)
            return scores

    def theirs(count: int) -> list[list[int]]:
        found = []
        for first in range(0, count, PROMPTS):
            batch = slice(first, min(first + PROMPTS, count))
            tokens, mask = padded(sources[batch])
            options = {"max_new_tokens": max(lengths[batch]), "do_sample": False, "num_beams": 1}
            ends = transformers.LogitsProcessorList([Ends(lengths[batch])])
            rows = reference.generate(tokens, attention_mask=mask, logits_processor=ends, **options)
            found += [row[1 : 1 + n].tolist() for row, n in zip(rows, lengths[batch], strict=True)]
        return found

    def ours(count: int) -> list[list[int]]:
        given = [ids.tolist() for ids in sources[:count]]
        until: Any = Until(iter(lengths))
        options = {"sources": given, "stop_ids": [END], "max_sequences": PROMPTS}
        found = dict(generate_batch(model, [[1]] * count, max(lengths), until, **options))
        return [found[index] for index in range(count)]

    ways = {"transformers": theirs, "longctx": ours}
    ids = {who: way(len(sources)) for who, way in ways.items()}
    seconds: dict[str, list[float]] = {who: [] for who in ways}
    for _ in range(rounds):
        for who, way in ways.items():
            seconds[who].append(cpu_seconds(way, len(sources)))
    fastest = {who: round(min(found), 3) for who, found in seconds.items()}
    return {
        "case": "writing",
        "cpu_seconds": fastest,
        "speed_ratio": round(fastest["transformers"] / fastest["longctx"], 3),
        "same_texts": sum(a == b for a, b in zip(*ids.values(), strict=True)),
    }


def measure(case: str, rounds: int) -> dict[str, Any]:
    """Measure one table row."""
    if case == "writing":
        return in_process(measure_writing, rounds)
    return measure_step(case, rounds)


def bounds(row: dict[str, Any]) -> Iterator[Bound]:
    """Return a row's bounds."""
    case = row["case"]
    again = ("--only", case)
    if case == "writing":
        what = "tokens a CPU second over transformers'"
        yield Bound(what, row["speed_ratio"], SPEED_BOUND, case, at_least=True, again=again)
        yield Bound("texts that are transformers'", row["same_texts"], len(PAIR_LENGTHS), case, at_least=True)
    else:
        yield Bound("CPU seconds over transformers'", row["time_ratio"], TIME_BOUND, case, TIME_WHY, again=again)
        yield Bound("activation memory over transformers'", row["memory_ratio"], MEMORY_BOUND, case)
        error = abs(row["losses"]["longctx"] / row["losses"]["transformers"] - 1)
        yield Bound("difference of the losses", error, 1e-5, case)


def main() -> int:
    """Print and save the table; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="cases to run")
    options = parse(parser, quick="one round")
    rows = []
    for case in options.only:
        rows.append(measure(case, 1 if options.quick else 5))
        print(rows[-1], flush=True)
    content = {"threads": THREADS, "rows": rows}
    stated = [bound for row in rows for bound in bounds(row)]
    return conclude("encoders", content, stated, options, whole=set(options.only) == set(CASES))


if __name__ == "__main__":
    sys.exit(main())
