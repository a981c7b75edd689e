"""Preference losses, compared with TRL's trainers on the same pairs: loss, rewards, gradients, CPU seconds per step.

    python -m benchmarks.preferences [--only dpo ipo simpo orpo kto] [--steps N] [--quick] [--save]

Needs TRL (tested with 1.16), which pulls datasets and accelerate. Both sides get the same weights, through an exported
folder, and the same records, read from TRL's own batches. For values both run in float64. ORPO then has one record with
a prompt of one token: TRL adds the prompt's likelihood to its loss, in a mean over the batch's tokens, and we do not.
For time both run in float32 on one thread, in turns: forward, loss and backward. TRL holds its reference model and runs
it in every step (``reference``), or stores its log-likelihoods beforehand (``stored``), as ours are; simpo and orpo
have none.

A record is a prompt of 256 tokens and two replies of 48 to 96. Ours computes each prompt once, TRL twice; ``shared`` is
the share of TRL's tokens that this saves, without its padding.

``--save`` writes ``benchmarks/results/KIND/preferences.json``. Exit code 1 outside a bound, 2 without TRL.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.bounds import Bound, conclude, parse
from benchmarks.machine import with_saved_rows
from longctx.batch import IGNORED_TARGET, Batch, PackedDocuments
from longctx.config import ModelConfig
from longctx.model.decoder import Decoder
from longctx.objectives.preferences import Preferences
from longctx.preference_options import PreferenceOptions

OPTIONS = {
    "dpo": PreferenceOptions(loss="dpo", beta=0.1),
    "ipo": PreferenceOptions(loss="ipo", beta=0.1),
    "simpo": PreferenceOptions(loss="simpo", beta=2.0, margin=0.5),
    "orpo": PreferenceOptions(loss="orpo", beta=0.1),
    "kto": PreferenceOptions(loss="kto", beta=0.1, desirable_weight=1.2, undesirable_weight=0.8),
}
RECORDS, PROMPT, REPLIES, VOCABULARY = 4, 256, (48, 96), 512
REFERENCE_SEED = 105
"""Gives KTO a KL estimate above 0, where it is not clamped."""
STEPS, QUICK_STEPS, VALUE_BOUND, TIME_BOUND = 12, 3, 1e-6, 0.7


@dataclass(frozen=True)
class Record:
    """A prompt and two replies, token ids; for KTO the second is another prompt's."""

    prompt: Tensor
    first: Tensor
    second: Tensor
    label: int = 1


def model_config() -> ModelConfig:
    """Return a small Llama."""
    return ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        ffn_size=704,
        tie_embeddings=False,
        qkv_bias=False,
        norm_eps=1e-5,
    )


class Peer:
    """One of TRL's trainers, with its model, reference and a batch."""

    def __init__(
        self, name: str, folder: Path, *, prompt_tokens: int, stored: bool = False, records: int = RECORDS
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.name = name
        models = [AutoModelForCausalLM.from_pretrained(folder / which) for which in ("policy", "reference")]
        self.model, self.reference = models
        trainer, arguments, extra = self._trainer(name, self.reference)
        options = OPTIONS[name]
        self.trainer = trainer(
            model=self.model,
            args=arguments(
                output_dir=str(folder / "out"),
                per_device_train_batch_size=records,
                report_to=[],
                use_cpu=True,
                beta=options.beta,
                max_length=None,
                gradient_checkpointing=False,
                bf16=False,
                **(extra | ({"precompute_ref_log_probs": True} if stored else {})),
            ),
            train_dataset=dataset(name, prompt_tokens, records),
            processing_class=tokenizer(),
            **({"ref_model": self.reference} if options.kind.needs_reference else {}),
        )
        self.model.train()
        self.batch = next(iter(self.trainer.get_train_dataloader()))

    @staticmethod
    def _trainer(name: str, reference: Any) -> tuple[Any, Any, dict[str, Any]]:
        if name == "kto":
            from trl import KTOConfig, KTOTrainer  # pyright: ignore[reportMissingImports]

            names = ("desirable_weight", "undesirable_weight")
            return KTOTrainer, KTOConfig, {weight: getattr(OPTIONS[name], weight) for weight in names}
        if name == "orpo":
            from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # pyright: ignore[reportMissingImports]

            return ORPOTrainer, ORPOConfig, {}
        if name == "simpo":
            from trl.experimental.cpo import CPOConfig, CPOTrainer  # pyright: ignore[reportMissingImports]

            margin = OPTIONS[name].margin
            return CPOTrainer, CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": margin}
        from trl import DPOConfig, DPOTrainer  # pyright: ignore[reportMissingImports]

        return DPOTrainer, DPOConfig, {"loss_type": ["sigmoid"] if name == "dpo" else ["ipo"]}

    def loss(self) -> Tensor:
        """Return the loss of the batch."""
        return self.trainer.compute_loss(self.model, self.batch)

    def metrics(self) -> dict[str, float]:
        """Return the last batch's figures."""
        metrics = getattr(self.trainer, "_metrics", None) or self.trainer._stored_metrics
        return {name: float(values[-1]) for name, values in metrics["train"].items() if values}

    def records(self) -> list[Record]:
        """Return the batch's records."""
        batch = self.batch
        if "chosen_input_ids" in batch:
            sides = [(batch[f"{side}_input_ids"], batch[f"{side}_labels"] != -100) for side in ("chosen", "rejected")]
        elif self.name == "kto":
            sides = [(batch[f"{side}input_ids"], batch[f"{side}completion_mask"] > 0) for side in ("", "KL_")]
        else:
            halves = zip(batch["input_ids"].chunk(2), (batch["completion_mask"] > 0).chunk(2), strict=True)
            sides = list(halves)
        labels = batch.get("label", torch.ones(len(sides[0][0])))
        found = []
        for row, label in enumerate(labels):
            replies = [ids[row][is_reply[row]] for ids, is_reply in sides]
            ids, is_reply = sides[0]
            prompt = ids[row][: int(is_reply[row].nonzero()[0])]
            found.append(Record(prompt, *replies, label=int(label)))
        return found


def dataset(name: str, prompt_tokens: int, records: int) -> Any:
    """Return random records as TRL's dataset, of words that are tokens."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    generator = torch.Generator().manual_seed(0)

    def text(least: int, most: int) -> str:
        count = int(torch.randint(least, most + 1, (1,), generator=generator))
        return " ".join(f"w{n}" for n in torch.randint(3, VOCABULARY, (count,), generator=generator))

    rows = []
    for number in range(records):
        row = {"prompt": text(prompt_tokens, prompt_tokens), "chosen": " " + text(*REPLIES)}
        if name == "kto":
            row = {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 2 == 0}
        else:
            row["rejected"] = " " + text(*REPLIES)
        rows.append(row)
    return Dataset.from_list(rows)


def tokenizer() -> Any:
    """Return a tokenizer whose words are w3, w4 …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": 0, "<end>": 1, "<unknown>": 2}
    known = special | {f"w{n}": n for n in range(len(special), VOCABULARY)}
    words = Tokenizer(models.WordLevel(known, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>")


def packed(records: list[Record], reference_P2: Tensor) -> Batch:
    """Return the records as one row: each prompt but its last token, which begins both replies' documents."""
    tokens, prefixes, is_reply, labels = [], [], [], []
    for record in records:
        before = -1
        if len(record.prompt) > 1:
            before = len(tokens)
            tokens.append(record.prompt[:-1])
            prefixes.append(-1)
            is_reply.append(False)
            labels.append(IGNORED_TARGET)
        for number, reply in enumerate((record.first, record.second)):
            tokens.append(torch.cat([record.prompt[-1:], reply]))
            prefixes.append(before)
            is_reply.append(True)
            labels.append(IGNORED_TARGET if number else record.label)
    documents = PackedDocuments.of_lengths([len(part) for part in tokens], (), tuple(prefixes))
    row, starts = torch.cat(tokens), documents.cu_seqlens[:-1]
    counts = torch.tensor(documents.lengths)
    targets = row.roll(-1).where(torch.tensor(is_reply).repeat_interleave(counts), IGNORED_TARGET)
    targets[documents.cu_seqlens[1:] - 1] = IGNORED_TARGET
    label_T = torch.full_like(row, IGNORED_TARGET)
    label_T[starts] = torch.tensor(labels)
    first_positions = torch.tensor(documents.first_positions) - starts
    per_token = {
        "tokens": row,
        "targets": targets,
        "labels": label_T,
        "positions": torch.arange(len(row)) + first_positions.repeat_interleave(counts),
        "document_ids": torch.arange(len(tokens)).repeat_interleave(counts),
    }
    return Batch(**{name: x[None] for name, x in per_token.items()}, documents=documents, reference_P2=reference_P2)  # type: ignore[arg-type]


def export(folder: Path) -> dict[str, Decoder]:
    """Export a policy and a reference near it."""
    from longctx.conversion import save_hf

    config, found = model_config(), {}
    for which in ("policy", "reference"):
        decoder = Decoder(config, seed=0)
        if which == "reference":
            generator = torch.Generator().manual_seed(REFERENCE_SEED)
            with torch.no_grad():
                for p in decoder.parameters():
                    p.add_(0.002 * torch.randn(p.shape, generator=generator))
        save_hf(config, dict(decoder.named_parameters()), folder / which)
        found[which] = decoder
    return found


@contextmanager
def float64(peer: Peer) -> Iterator[None]:
    """Let TRL's Llama and its head compute in float64, where their code asks for float32."""

    class Doubled:
        float32 = float = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    for model in (peer.model, peer.reference):
        rotary, config = model.double().model.rotary_emb, model_config()
        powers = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        rotary.inv_freq = config.rope.theta**-powers
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        for module in (type(peer.model).__module__, "trl.kernels.chunked_logprob"):
            if module in sys.modules:
                patches.enter_context(mock.patch.object(sys.modules[module], "torch", Doubled()))
        yield


def task_of(decoder: Decoder, name: str) -> Preferences:
    return Preferences(decoder, options=OPTIONS[name]).train()


def references(decoders: dict[str, Decoder], records: list[Record]) -> Tensor:
    """Return the reference's log-likelihoods, as the verb that stores them computes them."""
    batch = packed(records, torch.zeros(len(records), 2, dtype=torch.float64))
    return task_of(decoders["reference"], "dpo").reply_sums(batch)


def our_loss(task: Preferences, batch: Batch) -> Tensor:
    """Return the mean over records."""
    return task.loss(task.loss_sum(task(batch)), task.denominators(batch))


def compare(name: str, folder: Path, decoders: dict[str, Decoder]) -> dict[str, Any]:
    """Return the largest differences in float64, relative to the largest value."""
    is_orpo = name == "orpo"
    peer = Peer(name, folder, prompt_tokens=1 if is_orpo else 24, records=1 if is_orpo else RECORDS)
    records = peer.records()
    for decoder in decoders.values():
        decoder.double()
    task = task_of(decoders["policy"], name)
    batch = packed(records, references(decoders, records))
    with float64(peer):
        theirs = peer.loss()
        theirs.backward()
    ours = our_loss(task, batch)
    ours.backward()
    wanted = {weight: p.grad for weight, p in peer.model.named_parameters()}
    worst = 0.0
    for weight, p in task.network.named_parameters():
        of_peer = wanted[weight]
        assert p.grad is not None
        assert of_peer is not None
        worst = max(worst, float((p.grad - of_peer).abs().max() / of_peer.abs().max()))
    sums, figures = task.loss_sum(task(batch)).sums, peer.metrics()
    mine = {"rewards/chosen": "first_reward", "rewards/rejected": "second_reward", "rewards/margins": "margin"}
    rewards = [abs(float(sums[own]) / len(records) - figures[their]) for their, own in mine.items() if their in figures]
    if name == "kto":
        # TRL sums the labelled replies' rewards by label; our second reward is a mismatched reply's.
        rewards = []
    task.zero_grad()
    for decoder in decoders.values():
        decoder.float()
    own, other = float(ours.detach()), float(theirs.detach())
    return {
        "loss": own,
        "loss_difference": abs(own - other) / abs(other),
        "gradient_difference": worst,
        "reward_difference": max(rewards, default=0.0),
    }


def spent(step: Callable[[], Tensor], model: torch.nn.Module) -> float:
    """Return CPU seconds of a step."""
    begun = time.process_time()
    step().backward()
    seconds = time.process_time() - begun
    model.zero_grad()
    return seconds


def race(name: str, folder: Path, decoders: dict[str, Decoder], steps: int) -> dict[str, Any]:
    """Return median CPU seconds per step, and the ratios over TRL's."""
    peers = {"reference": Peer(name, folder, prompt_tokens=PROMPT)}
    if OPTIONS[name].kind.needs_reference:
        peers["stored"] = Peer(name, folder, prompt_tokens=PROMPT, stored=True)
    task, records = task_of(decoders["policy"], name), peers["reference"].records()
    batch = packed(records, references(decoders, records))
    found: dict[str, list[float]] = {who: [] for who in ("longctx", *peers)}
    for number in range(steps + 2):
        turns = [("longctx", lambda: our_loss(task, batch), task)]
        turns += [(who, peer.loss, peer.model) for who, peer in peers.items()]
        for who, step, model in turns[:: 1 if number % 2 else -1]:
            found[who].append(spent(step, model))
    # The first steps allocate.
    kept = {who: seconds[2:] for who, seconds in found.items()}
    row: dict[str, Any] = {"cpu_seconds": {who: round(median(seconds), 4) for who, seconds in kept.items()}}
    for who in peers:
        ratios = [ours / theirs for ours, theirs in zip(kept["longctx"], kept[who], strict=True)]
        row[f"ratio_{who}"] = round(median(ratios), 3)
    apart = sum(2 * len(r.prompt) + len(r.first) + len(r.second) for r in records)
    row["shared"] = round(1 - batch.tokens.numel() / apart, 3)
    return row


def bounds(rows: Sequence[dict[str, Any]]) -> Iterator[Bound]:
    """Yield each loss's bounds."""
    for row in rows:
        for what in ("loss", "gradient", "reward"):
            yield Bound(f"{what} against TRL", row["values"][f"{what}_difference"], VALUE_BOUND, row["case"])
        yield Bound("CPU seconds of a step over TRL's", row["ratio_reference"], TIME_BOUND, row["case"])


def main() -> int:
    """Print and save differences and times; return 1 if one is outside its bound, 2 without TRL."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=OPTIONS, default=list(OPTIONS), help="losses to compare")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps")
    options = parse(parser, quick=f"{QUICK_STEPS} timed steps")
    try:
        import trl  # pyright: ignore[reportMissingImports]
    except ImportError:
        print("TRL is not installed. Try pip install trl.", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            decoders = export(Path(folder))
            row: dict[str, Any] = {"case": name, "seed": 0, "date": date.today().isoformat(), "trl": trl.__version__}
            row["values"] = compare(name, Path(folder), decoders)
            row |= race(name, Path(folder), decoders, QUICK_STEPS if options.quick else options.steps)
        print(row, flush=True)
        rows.append(row)
    if options.save and not options.quick:
        rows = with_saved_rows("preferences", list(OPTIONS), rows)
    return conclude("preferences", {"rows": rows}, list(bounds(rows)), options)


if __name__ == "__main__":
    sys.exit(main())
