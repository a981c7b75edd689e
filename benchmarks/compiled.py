"""``train.compile`` on a CPU: a step compiled, eager, and its floor; loss and optimizer alone.

    python -m benchmarks.compiled [--quick] [--only bfloat16 …]

One process, one thread, rows of 2048 tokens, width 512, 2 layers, a vocabulary of 8,000. CPU seconds are the minimum
over rounds in which all take turns in one process; the floor (``benchmarks/floor.py``) is the step's matmuls and
attention alone. Then the step is trained on rows with other lengths and documents, which must compile nothing.
``parts`` are the operations that a training run leaves eager on a CPU, and their time compiled: the loss between its
matmuls, and AdamW. Saved in ``benchmarks/results/KIND/compiled.json``; exit code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.decoder import in_process
from benchmarks.floor import Floor
from longctx.batch import IGNORED_TARGET, Batch, PackedDocuments
from longctx.config import ModelConfig
from longctx.kernels.cross_entropy import losses_, whole_losses
from longctx.kernels.loss_options import PLAIN
from longctx.kernels.regions import Regions, compile_count
from longctx.model.decoder import Decoder
from longctx.model.training_pass import Execution
from longctx.objectives.causal_lm import CausalLM

THREADS, TOKENS, VOCABULARY = 1, 2048, 8_000
MODEL = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=512,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    qkv_bias=False,
    ffn_size=1376,
)
DTYPES = ("bfloat16", "float32")
SLOWER, DIFFERENCE = 1.25, {"float32": 1e-6, "bfloat16": 1e-3}
OTHERS = ([700, 513], [1, 1023, 5], [1999])
"""Document lengths in the further rows."""


def row(lengths: list[int]) -> Batch:
    """Return a row with these documents."""
    packed = PackedDocuments.of(torch.tensor([0, *lengths]).cumsum(0))
    tokens = torch.randint(VOCABULARY, (1, packed.num_tokens), generator=torch.Generator().manual_seed(len(lengths)))
    targets = tokens.roll(-1)
    targets[0, packed.cu_seqlens[1:] - 1] = IGNORED_TARGET
    positions = torch.cat([torch.arange(n) for n in lengths]).view(1, -1)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(1, -1)
    return Batch(tokens=tokens, targets=targets, positions=positions, document_ids=ids, documents=packed)


def least_seconds(actions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Measure each action's CPU seconds, the minimum over rounds in which they take turns."""
    seconds = dict.fromkeys(actions, float("inf"))
    for _ in range(rounds):
        for name, action in actions.items():
            start = time.process_time()
            action()
            seconds[name] = min(seconds[name], time.process_time() - start)
    return {name: round(found, 4) for name, found in seconds.items()}


def build(dtype: str, compiler: str | None) -> CausalLM:
    """Build the model."""
    return CausalLM(Decoder(MODEL, execution=Execution(compiler=compiler))).to(getattr(torch, dtype))


def train(lm: CausalLM, batch: Batch) -> Tensor:
    """Run forward and backward; return the loss."""
    loss = lm(batch)[0] / batch.tokens.numel()
    lm.zero_grad()
    loss.backward()
    return loss.detach()


def measure_step(dtype: str, rounds: int) -> dict[str, Any]:
    """Measure one table row."""
    torch.set_num_threads(THREADS)
    batch, models = row([TOKENS]), {"eager": build(dtype, None), "compiled": build(dtype, "inductor")}
    started = time.perf_counter()
    losses = {who: float(train(lm, batch)) for who, lm in models.items()}
    wall, graphs = time.perf_counter() - started, compile_count().graphs
    floor = Floor.build(models["eager"].network, batch.tokens)
    for action in floor.actions().values():
        action()
    actions = {who: lambda lm=lm: train(lm, batch) for who, lm in models.items()} | floor.actions()
    seconds = least_seconds(actions, rounds)
    for lengths in OTHERS:
        train(models["compiled"], row(lengths))
    whole = seconds["products"] + seconds["attention"]
    return {
        "dtype": dtype,
        "cpu_seconds": seconds | {"floor": round(whole, 4)},
        "over_floor": {who: round(seconds[who] / whole, 3) for who in models},
        "compiled_over_eager": round(seconds["compiled"] / seconds["eager"], 3),
        "loss_difference": abs(losses["compiled"] / losses["eager"] - 1),
        "first_step_seconds": round(wall, 1),
        "graphs": graphs,
        "graphs_of_other_rows": compile_count().graphs - graphs,
    }


def measure_parts(rounds: int) -> dict[str, dict[str, float]]:
    """Measure CPU seconds for the operations that stay eager on a CPU, and for the same compiled."""
    torch.set_num_threads(THREADS)
    run = Regions("inductor")
    targets = torch.randint(VOCABULARY, (TOKENS,))
    found = {}
    for dtype in DTYPES:
        # in place: each starts from the previous one's result, and takes as long
        logits = torch.randn(TOKENS, VOCABULARY).to(getattr(torch, dtype))
        actions = {
            "eager": lambda logits=logits: losses_(logits, targets, PLAIN, with_gradient=True),
            "compiled": lambda logits=logits: run(whole_losses, logits, targets, PLAIN, True, tokens_dim=0),
        }
        least_seconds(actions, 1)
        found[f"loss, {dtype}"] = least_seconds(actions, rounds)
    return found | {"AdamW": least_seconds(optimizers(), rounds)}


def optimizers() -> dict[str, Callable[[], Any]]:
    """Return AdamW steps on 4 million float32 values: PyTorch's loop, its fused kernel, and the loop compiled."""
    actions = {}
    for name, fused in (("eager", False), ("fused", True), ("compiled", False)):
        weight = torch.nn.Parameter(torch.randn(1 << 22))
        weight.grad = torch.randn_like(weight)
        # a tensor: as a Python number, a new learning rate would compile again
        lr = torch.tensor(1e-3) if name == "compiled" else 1e-3
        step = torch.optim.AdamW([weight], lr=lr, fused=fused, foreach=False).step
        if name == "compiled":
            step = torch.compile(step)
        for _ in range(2):
            step()
        actions[name] = step
    return actions


def bounds(row: dict[str, Any]) -> Iterator[Bound]:
    """Return a row's bounds."""
    dtype = row["dtype"]
    again = ("--only", dtype)
    yield Bound("compiled over eager CPU seconds", row["compiled_over_eager"], SLOWER, dtype, again=again)
    yield Bound("relative difference of losses", row["loss_difference"], DIFFERENCE[dtype], dtype)
    yield Bound("graphs compiled for other rows", row["graphs_of_other_rows"], 0, dtype)


def print_row(row: dict[str, Any]) -> None:
    """Print one row for the console."""
    seconds, over = row["cpu_seconds"], row["over_floor"]
    print(
        f"{row['dtype']:10} floor {seconds['floor']:.2f}  eager {seconds['eager']:.2f} ({over['eager']:.2f} ×)  "
        f"compiled {seconds['compiled']:.2f} ({over['compiled']:.2f} ×)  ratio {row['compiled_over_eager']:.3f}  "
        f"first steps {row['first_step_seconds']} s, {row['graphs']} graphs, then {row['graphs_of_other_rows']}  "
        f"losses differ by {row['loss_difference']:.1e}",
        flush=True,
    )


def main() -> int:
    """Print and save the table; return 1 if a result is outside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes to run")
    options = parse(parser, quick="one round")
    rounds = 1 if options.quick else 3
    rows = []
    for dtype in options.only:
        rows.append(in_process(measure_step, dtype, rounds))
        print_row(rows[-1])
    content: dict[str, Any] = {"tokens": TOKENS, "threads": THREADS, "rows": rows}
    whole = set(options.only) == set(DTYPES)
    if whole:
        content["parts"] = in_process(measure_parts, rounds)
        print(content["parts"], flush=True)
    stated = [bound for row in rows for bound in bounds(row)]
    return conclude("compiled", content, stated, options, whole=whole)


if __name__ == "__main__":
    sys.exit(main())
