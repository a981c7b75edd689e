"""``ChatEncoder``: a conversation's token ids and loss mask; an error if the mask cannot be derived."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from longctx.chat.chat_rule import ChatRule, TrainOn
from longctx.chat.control_token_guard import ControlTokenGuard, ControlTokenMatcher, RestoredText
from longctx.chat.conversation import ASSISTANT, Conversation, part_text
from longctx.chat.template import ChatTemplate, RenderedChat, TemplateError
from longctx.chat.template_files import DEFAULT, WITH_TOOLS, find_chat_templates, special_token_variables
from longctx.errors import DataError
from longctx.tokenizer.control import Span, TokenSpans
from longctx.tokenizer.rendered import encode_rendered
from longctx.tokenizer.tokenizer_base import Tokenizer

TEMPLATE_REJECTS = "the chat template refuses it"
REWRITES_PREVIOUS_TURNS = "the template changes a turn when others follow"
PROMPT_MISMATCH = "the template begins a reply otherwise than its prompt for one ends"
MERGED_PROMPT_TOKEN = "a reply's first token is one with the prompt's last"
CONTROL_TOKENS_IN_TEXT = "control tokens in its text"
UNCONDITIONAL_PROMPT = "the template writes the prompt for a reply behind each"
MISPLACED_MARKS = "the template marks replies elsewhere than it writes them"
PROMPT_DEPENDS_ON_REPLY = "the template writes another prompt for each reply"
INTERRUPTED_REPLY = "the template marks a reply in several parts"
EMPTY_LOSS_MASK = "no token counts"
EMPTY_LOSS_MASK_AFTER_CUT = "no token counts in the part that is kept"
REMEDIES = {
    REWRITES_PREVIOUS_TURNS: (
        "Make one document per reply (--train-on each), or train on the last reply (--train-on last)."
    ),
    PROMPT_MISMATCH: "Train on all tokens (--train-on all), or use another template: --chat-template FILE.",
    TEMPLATE_REJECTS: "Check the roles and their order, or use another template: --chat-template FILE.",
    EMPTY_LOSS_MASK: "Train on all tokens (--train-on all), or check if the replies' role is assistant.",
    EMPTY_LOSS_MASK_AFTER_CUT: "Keep more (--max-tokens N), or split long conversations: --too-long split-turns.",
    MERGED_PROMPT_TOKEN: "Let the template's prompt end with a newline or control token: --chat-template FILE.",
    CONTROL_TOKENS_IN_TEXT: "Remove them from the texts.",
    UNCONDITIONAL_PROMPT: "Use a template that adds it only if add_generation_prompt is true: --chat-template FILE.",
    PROMPT_DEPENDS_ON_REPLY: "Use a template with one prompt for all replies: --chat-template FILE.",
    INTERRUPTED_REPLY: "Mark each reply once by {% generation %}: --chat-template FILE.",
    MISPLACED_MARKS: "Move {% generation %} out of macros and {% set %} blocks: --chat-template FILE.",
}
"""Reasons why a conversation cannot be trained on, each with a remedy."""


class ChatEncodingError(DataError):
    """Error for a conversation that a template rejects, or without a derivable loss mask."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class EncodedChat:
    """An encoded conversation."""

    text: str
    ids: np.ndarray
    """int32 [N]."""
    loss_mask: np.ndarray
    """Loss mask, bool [N]: True if predicting this token counts in the loss."""
    end_offsets: np.ndarray
    """End offset of each token in the text, int64 [N]."""

    def truncate(self, num_tokens: int) -> EncodedChat:
        """Return the first ``num_tokens`` tokens, at least one, and their text."""
        prefix = slice(num_tokens)
        text = self.text[: self.end_offsets[prefix][-1]]
        return EncodedChat(text, self.ids[prefix], self.loss_mask[prefix], self.end_offsets[prefix])


_DEFAULT_RULE = ChatRule()


class ChatEncoder:
    """Encoder from conversations to token ids, using a tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer, rule: ChatRule = _DEFAULT_RULE) -> None:
        """Raise DataError if neither the tokenizer nor the rule has a template."""
        self.tokenizer, self.rule = tokenizer, rule
        texts = {DEFAULT: rule.template}
        if rule.template is None:
            texts = find_chat_templates(tokenizer.files, tokenizer.path)
        if not texts:
            raise DataError(
                f"tokenizer={tokenizer.path} has no chat template, like most base models.\nSet one with `data build "
                "--chat-template FILE`, for example the chat_template.jinja from the family's chat model."
            )
        now = None
        if rule.now:
            now = datetime.datetime.fromisoformat(rule.now)
        self._templates = {name: ChatTemplate(text or "", name=_named(name), now=now) for name, text in texts.items()}
        self._variables = template_variables(tokenizer) | dict(rule.options)
        self._control_strings = ControlTokenMatcher(tokenizer.control_finder.texts())
        self._has_unconditional_prompt: dict[ChatTemplate, bool] = {}

    @property
    def has_reply_marks(self) -> bool:
        """True if a template marks replies."""
        return any(template.has_reply_marks for template in self._templates.values())

    @property
    def _train_on(self) -> TrainOn:
        """Tokens that count within one document: with ``each``, a document's last reply."""
        if self.rule.train_on == "each":
            return "last"
        return self.rule.train_on

    def close(self) -> None:
        """Stop the rendering processes."""
        for template in self._templates.values():
            template.close()

    def encode(self, conversation: Conversation) -> EncodedChat:
        """Return a conversation's ids and loss mask, without a length limit.

        Raise NotCountedError if its template rejects it, or if the loss mask cannot be derived.
        """
        # Reply tokens are found in one of two ways. A template may mark them by {% generation %}. Otherwise the
        # messages before a reply are rendered separately with the generation prompt, and again with the reply: the full
        # text must start with both, and the full ids with the prompt's ids. A template that changes a turn when another
        # follows, such as one that drops earlier reasoning, is rejected: the model would train on text that it never
        # sees at inference.
        train_on = self._train_on
        template = self._template(conversation)
        guard = ControlTokenGuard(self._control_strings)
        reply_turns = _candidate_turns(conversation, train_on)
        prompt_modes: list[bool] = []
        counts_all = _all_tokens_count(conversation, train_on)
        if train_on != "all" and not template.has_reply_marks:
            prompt_modes = [True]
        elif not counts_all:
            # Some templates add an ending if no reply is requested. Then only the rendering with a prompt is a prefix
            # of the full text.
            prompt_modes = [False, True]
        prefix_requests: list[tuple[int, bool]] = []
        # Per reply: the text before it in each prompt mode, then the text including it.
        if prompt_modes:
            prefix_requests = [
                ask
                for turn in reply_turns
                for ask in (*((turn, has_prompt) for has_prompt in prompt_modes), (turn + 1, False))
            ]
        rendered = self._render(template, conversation, guard, prefixes=prefix_requests)
        restored, hidden_offsets = _restore(guard, rendered.text)
        encoded = encode_rendered(self.tokenizer, restored.text, restored.plain_spans)
        # Hidden control tokens grow from one character to their spelling, which shifts all later positions.
        growth = np.cumsum([0, *(stop - start - 1 for start, stop in restored.plain_spans)])

        def restored_offset(offset: int) -> int:
            """Map a character position from the rendered to the restored text."""
            return offset + int(growth[np.searchsorted(hidden_offsets, offset)])

        # With train_on="all", template text counts too, and no spans are needed.
        loss_mask = np.ones(len(encoded.ids), dtype=bool)
        if train_on != "all" or not counts_all:
            follows_prompt = partial(self._follows_prompt, template, conversation, guard)
            bounds = _reply_spans(reply_turns, rendered.prefix_lengths, len(prompt_modes), follows_prompt)
            spans = [(restored_offset(start), restored_offset(stop)) for start, stop in bounds]
            # A mark inside a macro has no reliable position.
            if rendered.spans is None and train_on != "all":
                raise ChatEncodingError(MISPLACED_MARKS)
            marked_spans = [(restored_offset(start), restored_offset(stop)) for start, stop in rendered.spans or []]
            # Marks cover every reply; keep those that start in a message with weight.
            if not counts_all:
                marked_spans = [one for one in marked_spans if any(start <= one[0] < stop for start, stop in spans)]
            loss_mask = self._loss_mask(template, encoded, restored, spans, marked_spans)
        return EncodedChat(restored.text, encoded.ids, loss_mask, encoded.ends)

    def encode_prompt(self, conversation: Conversation) -> np.ndarray:
        """Return a conversation's ids with the prompt for its next reply, int32 [N].

        Raise NotCountedError if the template rejects it.
        """
        guard = ControlTokenGuard(self._control_strings)
        rendered = self._render(self._template(conversation), conversation, guard, add_generation_prompt=True)
        restored, _ = _restore(guard, rendered.text)
        return encode_rendered(self.tokenizer, restored.text, restored.plain_spans).ids

    def _loss_mask(
        self,
        template: ChatTemplate,
        encoded: TokenSpans,
        restored: RestoredText,
        spans: list[Span],
        marked_spans: list[Span],
    ) -> np.ndarray:
        """Return the loss mask, bool [N]."""
        if self._train_on == "all":
            return encoded.within(spans)
        if template.has_reply_marks:
            return encoded.within(marked_spans)
        if template not in self._has_unconditional_prompt:
            self._has_unconditional_prompt[template] = _has_unconditional_prompt(
                self.tokenizer, partial(template.render, variables=self._variables)
            )
        if self._has_unconditional_prompt[template]:
            # Every reply would end with the prompt for the next one, and the loss mask would include it.
            raise ChatEncodingError(UNCONDITIONAL_PROMPT)
        loss_mask = np.zeros(len(encoded.ids), dtype=bool)
        for start, stop in spans:
            _check_prompt(self.tokenizer, encoded, restored, start)
            loss_mask |= encoded.within([(start, _turn_end(self.tokenizer, encoded, restored.text, start, stop))])
        return loss_mask

    def _follows_prompt(
        self, template: ChatTemplate, conversation: Conversation, guard: ControlTokenGuard, turn: int
    ) -> bool:
        """Return True if a reply follows its prompt when it is the last message."""
        part = conversation.part(range(turn + 1))
        try:
            (prefix_length,) = self._render(template, part, guard, prefixes=[(turn, True)]).prefix_lengths
        except ChatEncodingError:
            return True
        return isinstance(prefix_length, int)

    def _render(
        self, template: ChatTemplate, conversation: Conversation, guard: ControlTokenGuard, **options: Any
    ) -> RenderedChat:
        """Render a conversation, with the guard hiding text that looks like control tokens."""
        try:
            messages, tools = guard.hide(list(conversation.messages)), guard.hide(list(conversation.tools))
        except ValueError as error:
            raise ChatEncodingError(CONTROL_TOKENS_IN_TEXT, str(error)) from error
        render = partial(template.render, tools=tools or None, variables=self._variables)
        return _render_messages(render, messages, **options)

    def _template(self, conversation: Conversation) -> ChatTemplate:
        if conversation.tools and WITH_TOOLS in self._templates:
            return self._templates[WITH_TOOLS]
        if DEFAULT in self._templates:
            return self._templates[DEFAULT]
        raise DataError(
            f"tokenizer={self.tokenizer.path} has the chat templates {', '.join(self._templates)}, but no default. "
            "Select one: --chat-template FILE."
        )


def _render_messages(render: Callable[..., RenderedChat], messages: list[Any], **options: Any) -> RenderedChat:
    """Render messages; join content parts if the template does not support parts."""
    joined = list(map(_with_joined_parts, messages))
    if joined != messages:
        # Some templates support parts; others drop them, print them as a list, or fail on one.
        try:
            # A rendering without error may still have lost parts.
            rendered = render(messages, **options)
            if not _loses_parts(rendered.text, messages):
                return rendered
        except TemplateError as error:
            if not error.rejects_conversation:
                raise
    try:
        return render(joined, **options)
    except TemplateError as error:
        if not error.rejects_conversation:
            raise
        raise ChatEncodingError(
            TEMPLATE_REJECTS, f"message {_first_rejected_turn(render, joined)}: {error.reason}"
        ) from error


def _loses_parts(text: str, messages: Sequence[Any]) -> bool:
    """Return True if a template drops content parts, or prints them as a list."""
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            continue
        # Lists may be printed as Python or as JSON.
        list_strings = (str(content), json.dumps(content), json.dumps(content, ensure_ascii=False))
        # Stripped, because templates may trim parts.
        if any(part_text(part).strip() not in text for part in content) or any(one in text for one in list_strings):
            return True
    return False


def _with_joined_parts(message: Any) -> Any:
    """Return a message with its content parts joined into one text."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "".join(map(part_text, message["content"]))}


def _has_unconditional_prompt(tokenizer: Tokenizer, render: Callable[..., RenderedChat]) -> bool:
    """Return True if a template writes the prompt for a reply, or its beginning, after every last message.

    That text disappears when another question follows, and appears between a question and its reply.
    """
    contents = ["one question", "one answer", "another question"]
    turns = [{"role": role, "content": text} for role, text in zip(("user", ASSISTANT, "user"), contents, strict=True)]
    try:
        after_reply, after_next_question = render(turns[:2]).text, render(turns).text
    except TemplateError:
        return False
    # Compare tokens, not characters: two tokens may begin with the same characters.
    encoded, other = (encode_rendered(tokenizer, text) for text in (after_reply, after_next_question))
    length = min(len(encoded.ids), len(other.ids))
    is_mismatch = np.append(encoded.ids[:length] != other.ids[:length], True)
    extra = after_reply[encoded.ends[: is_mismatch.argmax()].max(initial=0) :].strip()
    between = after_reply.partition(contents[0])[2].partition(contents[1])[0].lstrip()
    if not extra:
        return False
    at = between.find(extra)
    if at == 0 and extra in tokenizer.control_finder.texts():
        # A turn end, if questions end with the same token, unless that token alone is the prompt.
        return between.rstrip() == extra != after_reply.partition(contents[1])[2].strip()
    return at >= 0


def _first_rejected_turn(render: Callable[[list[Any]], RenderedChat], messages: list[Any]) -> int:
    """Find the first message that a template rejects, by bisection."""
    # Invariant: the template accepts ``low`` messages and rejects ``high``.
    low, high = 0, len(messages)
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            render(messages[:middle])
            low = middle
        except TemplateError:
            high = middle
    return high - 1


def _restore(guard: ControlTokenGuard, text: str) -> tuple[RestoredText, list[int]]:
    try:
        return guard.restore(text)
    except ValueError as error:
        raise ChatEncodingError(CONTROL_TOKENS_IN_TEXT, str(error)) from error


def _candidate_turns(conversation: Conversation, train_on: TrainOn) -> list[int]:
    """Return the indices of messages with tokens that may count."""
    turns = [
        turn
        for turn, (message, weight) in enumerate(zip(conversation.messages, conversation.weights, strict=True))
        if weight and (train_on == "all" or message["role"] == ASSISTANT)
    ]
    if train_on == "last":
        reply_turns = [turn for turn, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
        turns = [turn for turn in turns if turn == max(reply_turns)]
    return turns


def _all_tokens_count(conversation: Conversation, train_on: TrainOn) -> bool:
    """Return True if all tokens that may count do, so that no token needs to be assigned to a message."""
    return all(conversation.weights) and train_on != "last"


def _reply_spans(
    reply_turns: Sequence[int],
    prefix_lengths: Sequence[int | str],
    num_modes: int,
    follows_prompt: Callable[[int], bool],
) -> list[Span]:
    """Return each reply's character span. Raise NotCountedError for the first turn that changes the text before it.

    Each reply has its text length before it per prompt mode, then the length including it; an error message replaces a
    length that cannot be determined.
    """
    if not num_modes:
        return []
    spans: list[Span] = []
    for number, turn in enumerate(reply_turns):
        *starts, end = prefix_lengths[number * (num_modes + 1) : (number + 1) * (num_modes + 1)]
        # The first prompt mode that gives a prefix counts.
        start = next((prefix_length for prefix_length in starts if isinstance(prefix_length, int)), starts[0])
        for prefix_length, description in ((start, "before it"), (end, "up to it")):
            if isinstance(prefix_length, str):
                reason = PROMPT_MISMATCH
                if prefix_length is end or follows_prompt(turn):
                    reason = REWRITES_PREVIOUS_TURNS
                raise ChatEncodingError(
                    reason,
                    prefix_length or f"message {turn}: the text {description} changes without the messages after it",
                )
        assert isinstance(start, int)
        assert isinstance(end, int)
        spans.append((start, end))
    return spans


def _check_prompt(tokenizer: Tokenizer, encoded: TokenSpans, restored: RestoredText, start: int) -> None:
    """Raise NotCountedError unless the ids before a reply equal the ids of its prompt alone."""
    text = restored.text
    before = int(np.searchsorted(encoded.ends, start, side="right"))
    # Start at the last control token: text before it is encoded separately in both.
    control = np.flatnonzero(tokenizer.is_control[encoded.ids[:before]])
    first, at = 0, 0
    if len(control):
        first, at = int(control[-1]) + 1, int(encoded.ends[control[-1]])
    plain = [(begin - at, end - at) for begin, end in restored.plain_spans if at <= begin < start]
    alone = encode_rendered(tokenizer, text[at:start], plain, is_start=at == 0).ids
    if not np.array_equal(alone, encoded.ids[first:before]):
        raise ChatEncodingError(
            MERGED_PROMPT_TOKEN,
            f"{text[max(0, start - 10) : start]!r} and {text[start : start + 10]!r}",
        )


def _turn_end(tokenizer: Tokenizer, encoded: TokenSpans, text: str, start: int, stop: int) -> int:
    """Return a reply's end: after its last control token if only white space follows that."""
    first, last = np.searchsorted(encoded.starts, [start, stop])
    control = np.flatnonzero(tokenizer.is_control[encoded.ids[first:last]])
    if len(control):
        end = int(encoded.ends[first + control[-1]])
        # White space after the end token belongs to the template: generation stops before it.
        if not text[end:stop].strip():
            return end
    return stop


def template_variables(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the template variables for special tokens."""
    found = special_token_variables(tokenizer.files, tokenizer.path)
    named = {"bos_token": tokenizer.special.bos, "eos_token": tokenizer.special.end}
    own = {key: tokenizer.piece(token) for key, token in named.items() if token is not None}
    # Variables from the files take precedence.
    return own | found


def _named(name: str) -> str:
    if name == DEFAULT:
        return "The chat template"
    return f"The chat template {name!r}"
