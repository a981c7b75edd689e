# pyright: reportMissingImports=false
"""``LongctxLM``: lm-eval's interface to our models. Only this file imports lm-eval.

``launcher/lm_eval.py`` starts it: lm-eval 0.4.13 finds models from other packages only after they are imported.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from launcher.evaluation.harness.chat_renderer import ChatRenderer
from launcher.evaluation.harness.request_batches import by_context, compact, portions
from launcher.evaluation.harness.request_encoder import Encoder, GenerationRequest, check_request_lengths, generation_of
from launcher.evaluation.harness.request_server import Ranks
from launcher.evaluation.harness.settings import Settings, parse_device
from longctx.architecture.size import count_parameters
from longctx.chat.template_files import DEFAULT, hash_templates
from longctx.errors import ConfigError
from longctx.generation.continuous_batching import MAX_SEQUENCES
from longctx.generation.scoring import Pair, Score
from parallel.runtime.device import choose_device

NAME = "longctx"
"""Name for ``--model``."""
PORTION_TOKENS = 1 << 18
"""Tokens per data rank and request; after each request the progress bar advances and answers reach ``--use_cache``."""

Answer = TypeVar("Answer")
_RANKS: list[Ranks] = []
"""Ranks started by a launcher; empty in a single process."""


def share_ranks(ranks: Ranks) -> None:
    """Let models in this process run on these ranks."""
    _RANKS[:] = [ranks]


@register_model(NAME)
class LongctxLM(LM):
    """Checkpoint, newest checkpoint of a run, or Hugging Face folder as an lm-eval model, on all started ranks."""

    def __init__(
        self,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **arguments: Any,
    ) -> None:
        """Load the model with ``arguments`` from ``--model_args`` (``Settings``) and lm-eval's own options."""
        super().__init__()
        self._settings = Settings.of(arguments)
        self._num_sequences = _sequences(batch_size, max_batch_size)
        # lm-eval creates the model itself, so ranks cannot be an argument.
        self._ranks = (_RANKS or [Ranks(choose_device(parse_device(device), "--device"))])[0]
        self._subject = self._ranks.load(self._settings)
        self._limit = self._settings.limit(self._subject.model)
        self._encoder = Encoder(self._subject.tokenizer)
        self._num_sampled = 0
        self._chat_renderer: ChatRenderer | None = None

    @property
    def max_length(self) -> int:
        """Maximum tokens per text."""
        return self._limit

    @property
    def tokenizer_name(self) -> str:
        """Hash over the tokenizer and its templates, lm-eval's cache key for rendered requests."""
        # lm-eval calls this only with a chat template. Cached requests then come without a rendering call.
        self._encoder.reads_control = True
        tokenizer = self._subject.tokenizer
        # Another template renders the same turns differently.
        chosen = self._chat_renderer.text if self._chat_renderer else ""
        parts = [tokenizer.fingerprint, hash_templates(tokenizer.files, tokenizer.path), chosen]
        return hashlib.sha256(repr([*parts, self._settings.enable_thinking]).encode()).hexdigest()

    def get_model_info(self) -> dict[str, Any]:
        """Return the model information that lm-eval stores with its results."""
        return {
            "model_name": self._subject.name,
            "model_weights": self._subject.fingerprint,
            "model_num_parameters": sum(count_parameters(self._subject.model).values()),
            "model_dtype": self._settings.dtype,
            "max_length": self._limit,
        }

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and True if greedy decoding would produce it."""
        texts = [request.args for request in requests]
        pairs = [_compact(self._encoder.pair(context, continuation)) for context, continuation in texts]
        self._check([pair.num_read for pair in pairs], "the longest needs")
        scores = self._score(pairs, [("loglikelihood", text) for text in texts], disable_tqdm)
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return each text's total log-likelihood, computed in windows of ``max_length`` tokens."""
        texts = [request.args[0] for request in requests]
        # Each window is a separate text that starts at position 0.
        windows = [[_compact(pair) for pair in self._encoder.windows(text, self._limit)] for text in texts]
        scores = iter(self._score([pair for parts in windows for pair in parts], None, disable_tqdm))
        sums = []
        for text, parts in zip(texts, windows, strict=True):
            sums.append(sum(next(scores).log_likelihood for _ in parts))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), sums[-1])
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the generated text after each context."""
        special = self._subject.tokenizer.special
        end = None
        if special.end is not None:
            end = self._subject.tokenizer.piece(special.end)
        # An empty context still needs one token to predict from.
        prompts = [compact(self._encoder.text(request.args[0]) or self._encoder.begin()) for request in requests]
        wanted = [generation_of(request.args[1], end=end) for request in requests]
        self._check(
            [len(ids) + how.max_new_tokens for ids, how in zip(prompts, wanted, strict=True)],
            "prompt plus max_gen_toks need up to",
        )
        # Requests from one task share their options; with several tasks, batch requests with equal options.
        kinds: dict[GenerationRequest, list[int]] = {}
        for index, how in enumerate(wanted):
            kinds.setdefault(how, []).append(index)
        answers: dict[int, str] = {}
        # lm-eval's own bar, so that its option to hide bars hides this one.
        with tqdm(total=len(requests), desc="longctx: generate_until", disable=disable_tqdm) as bar:
            for how, indices in kinds.items():
                costs = [len(prompts[index]) + how.max_new_tokens for index in indices]
                for part in portions(costs, PORTION_TOKENS * self._ranks.data_degree):
                    indices_in_part = [indices[at] for at in part]
                    # Seeds follow these numbers, independent of the portions.
                    indexed = [(self._num_sampled + n, prompts[index]) for n, index in enumerate(indices_in_part)]
                    self._num_sampled += len(indices_in_part)
                    texts = self._ranks.generate(indexed, how, self._num_sequences)
                    for index, text in zip(indices_in_part, texts, strict=True):
                        answers[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    bar.update(len(indices_in_part))
        return [answers[index] for index in range(len(requests))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render turns as text; without a generation prompt the last turn stays open."""
        self._encoder.reads_control = True
        if self._chat_renderer is None:
            self._chat_renderer = self._create_chat_renderer(DEFAULT)
        return self._chat_renderer.render(chat_history, asks=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Choose a template by name, or the default for ``True``, and return its text; None if not requested."""
        if not chat_template:
            return None
        self._encoder.reads_control = True
        self._chat_renderer = self._create_chat_renderer(chat_template if isinstance(chat_template, str) else DEFAULT)
        return self._chat_renderer.text

    def _create_chat_renderer(self, name: str) -> ChatRenderer:
        return ChatRenderer(self._subject.tokenizer, name, self._settings.chat_options())

    def _check(self, needed: Sequence[int], subject: str) -> None:
        hint = (
            "Use a task with shorter texts, fewer examples (--num_fewshot), fewer new tokens (--gen_kwargs "
            "max_gen_toks=N), or a longer limit: --model_args max_length=N,beyond_positions=true"
        )
        check_request_lengths(needed, self._limit, subject, hint)

    def _score(
        self, pairs: list[Pair], cached: list[tuple[str, tuple[str, ...]]] | None, disable_tqdm: bool
    ) -> list[Score]:
        """Score pairs portion by portion; ``cached`` holds each pair's key in lm-eval's cache."""
        # Keep pairs with a common context together, largest first.
        order = [index for group in by_context(pairs) for index in group]
        scores: dict[int, Score] = {}
        with tqdm(total=len(pairs), desc="longctx: loglikelihood", disable=disable_tqdm) as bar:
            costs = [pairs[index].num_read for index in order]
            for part in portions(costs, PORTION_TOKENS * self._ranks.data_degree):
                indices_in_part = [order[at] for at in part]
                found = self._ranks.score([pairs[index] for index in indices_in_part])
                for index, score in zip(indices_in_part, found, strict=True):
                    scores[index] = score
                    if cached is not None:
                        name, text = cached[index]
                        self.cache_hook.add_partial(name, text, (score.log_likelihood, score.is_greedy))
                bar.update(len(indices_in_part))
        return [scores[index] for index in range(len(pairs))]


def run_lm_eval(arguments: Sequence[str]) -> None:
    """Run lm-eval's own command line, with our model unless another is named."""
    from lm_eval.__main__ import cli_evaluate

    words = list(arguments)
    names_model = any(word in ("--model", "-M") or word.startswith("--model=") for word in words)
    # These subcommands load no model.
    if words and words[0] not in ("ls", "validate") and not names_model:
        words += ["--model", NAME]
    # lm-eval reads the process's command line.
    sys.argv = ["lm_eval", *words]
    cli_evaluate()


def _compact(pair: Pair) -> Pair:
    return Pair(compact(pair.context), compact(pair.continuation))


def _sequences(batch_size: int | str | None, max_batch_size: int | None) -> int:
    """Return how many texts to generate together, from lm-eval's ``--batch_size``."""
    if batch_size is None or str(batch_size).startswith("auto"):
        return max_batch_size or MAX_SEQUENCES
    if not str(batch_size).isdigit() or int(batch_size) < 1:
        raise ConfigError(f"--batch_size {batch_size}: give a number of at least 1, or auto.")
    return int(batch_size)
