"""Model answers to prompts: greedy generation, or one forward pass over the expected answer.

Axes: B rows, n tokens of the expected answer, M model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from launcher.evaluation.evaluation_options import EvaluationOptions
from longctx.evaluation import EvaluationSample, EvaluationTask
from longctx.evaluation.independent_samples import IndependentTask
from longctx.evaluation.scorers import starts_with
from longctx.generation.continuous_batching import generate_batch
from longctx.generation.detokenize import TextStream
from longctx.generation.prefill import prefill
from longctx.model.decoder import Decoder
from longctx.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class PromptTokens:
    """Sample as token ids, given to every rank that shares the prompt."""

    ids: list[int]
    max_new_tokens: int
    target_ids: list[int] | None = None
    """Expected answer, if it is read rather than generated."""


def prompt_of(
    task: EvaluationTask, sample: EvaluationSample, tokenizer: Tokenizer, options: EvaluationOptions
) -> PromptTokens:
    """Return a sample's prompt, with the answer as target from ``options.teacher_forced_from`` tokens on."""
    ids = tokenizer.encode_prompt(sample.prompt)
    target_ids = None
    if sample.length >= options.teacher_forced_from and is_same_event(task):
        whole = tokenizer.encode_prompt(sample.prompt + sample.target)
        # If the answer's first characters merge with the prompt's last token, the prompt's ids are not a prefix.
        if whole[: len(ids)] == ids:
            target_ids = whole[len(ids) :]
    return PromptTokens(ids=ids, max_new_tokens=sample.answer_tokens, target_ids=target_ids)


def is_same_event(task: EvaluationTask) -> bool:
    """Return True if the score depends only on whether the output starts with the target, which one pass can decide.

    Other rules give partial scores for other outputs, which must be generated.
    """
    return isinstance(task, IndependentTask) and task.rule is starts_with


def write_answers(
    model: Decoder, prompts: Sequence[PromptTokens], tokenizer: Tokenizer, chunk_tokens: int
) -> list[str]:
    """Return the text after each prompt. Ranks that share prompts make the same call and get the same result.

    Prompts that need generation are batched.
    """
    ids: dict[int, list[int]] = {}
    generated: dict[int, list[int]] = {}
    # A batch has a single token limit, so group prompts by it.
    for index, prompt in enumerate(prompts):
        if prompt.target_ids is None:
            generated.setdefault(prompt.max_new_tokens, []).append(index)
        else:
            ids[index] = forced(model, prompt.ids, prompt.target_ids, chunk_tokens)
    for max_new_tokens, indices in generated.items():
        batch = generate_batch(
            model,
            [prompts[index].ids for index in indices],
            max_new_tokens,
            stop_ids=tokenizer.special.stop_ids,
            max_sequences=len(indices),
            chunk_tokens=chunk_tokens,
        )
        ids.update((indices[at], new_ids) for at, new_ids in batch)
    return [_text_after(prompt, ids[index], tokenizer) for index, prompt in enumerate(prompts)]


def _text_after(prompt: PromptTokens, ids: list[int], tokenizer: Tokenizer) -> str:
    text = TextStream(tokenizer.decode, prompt.ids)
    # A model's vocabulary may be padded past its tokenizer's.
    parts = [text.add(token) for token in ids if token < tokenizer.vocab_size]
    return "".join(parts) + text.finish()


@torch.no_grad()
def forced(model: Decoder, prompt_ids: list[int], target_ids: list[int], chunk_tokens: int) -> list[int]:
    """Return the target's longest prefix that greedy decoding would produce, and the one token after it.

    Reads the prompt as usual, then the target in one pass instead of one step per token.
    """
    cache = model.new_cache()
    cache.reserve(len(target_ids))
    last_BtM = prefill(model, prompt_ids, cache, chunk_tokens)[:, -1:]
    # Every rank gets the full target, as it does with generated tokens.
    chunk = cache.chunk(len(target_ids))
    device = last_BtM.device
    tokens_Bn = torch.tensor([target_ids], device=device)
    hidden_BnM = model(tokens_Bn, chunk.indices[None].to(device), cache=cache, chunk=chunk)
    # The prompt's last hidden state predicts the first target token.
    logits_BnV = model.logits(torch.cat((last_BtM, hidden_BnM), dim=1))
    greedy_ids = logits_BnV[0].float().argmax(-1).tolist()
    for right, (wanted, token) in enumerate(zip(target_ids, greedy_ids, strict=False)):
        # From here on, greedy decoding would have read a different token.
        if token != wanted:
            return greedy_ids[: right + 1]
    return greedy_ids
