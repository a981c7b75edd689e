"""``ChatEncoder``: a conversation's token ids and loss mask; an error if the mask cannot be derived."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from longctx.chat.conversation import ASSISTANT, Conversation, part_text
from longctx.chat.guard import Guard, Restored, Spellings
from longctx.chat.rule import ChatRule, TrainOn
from longctx.chat.template import ChatTemplate, Rendered, TemplateError
from longctx.chat.template_files import DEFAULT, WITH_TOOLS, find_templates, variables
from longctx.errors import DataError
from longctx.tokenizer.contract import Tokenizer
from longctx.tokenizer.control import Located, Span
from longctx.tokenizer.rendered import encode_rendered

REFUSED = "the chat template refuses it"
CHANGES_ITS_PAST = "the template changes a turn when others follow"
BEGINS_OTHERWISE = "the template begins a reply otherwise than its prompt for one ends"
JOINED = "a reply's first token is one with the prompt's last"
SPELLS_CONTROL = "control tokens in its text"
PROMPTS_UNASKED = "the template writes the prompt for a reply behind each"
MARKED_ELSEWHERE = "the template marks replies elsewhere than it writes them"
NOTHING_COUNTS = "no token counts"
CUT_BEFORE = "no token counts in the part that is kept"
UNTRAINED = {
    CHANGES_ITS_PAST: "Make a document of each reply (--train-on each), or train on the last one (--train-on last).",
    BEGINS_OTHERWISE: "Count all tokens (--train-on all), or give another template: --chat-template FILE.",
    REFUSED: "Look at the roles and their order, or give another template: --chat-template FILE.",
    NOTHING_COUNTS: "Count other tokens: --train-on all. Or look whether the replies' role is assistant.",
    CUT_BEFORE: "Keep more (--max-tokens N), or the conversations' ends: --too-long split-turns.",
    JOINED: "Give a template whose prompt ends with a line or a control token: --chat-template FILE.",
    SPELLS_CONTROL: "Take them out of the texts.",
    PROMPTS_UNASKED: "Let it do so if add_generation_prompt is true alone: --chat-template FILE.",
    MARKED_ELSEWHERE: "Let {% generation %} stand outside of macros and {% set %} blocks: --chat-template FILE.",
}
"""Reasons why a conversation cannot be trained on, each with a remedy."""


class NotCountedError(DataError):
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
    counted: np.ndarray
    """Loss mask, bool [N]: True if predicting this token counts in the loss."""
    stops: np.ndarray
    """End offset of each token in the text, int64 [N]."""

    def begin(self, num_tokens: int) -> EncodedChat:
        """Return the first ``num_tokens`` tokens, at least one, and their text."""
        kept = slice(num_tokens)
        text = self.text[: self.stops[kept][-1]]
        return EncodedChat(text, self.ids[kept], self.counted[kept], self.stops[kept])


_USUAL = ChatRule()


class ChatEncoder:
    """Encoder from conversations to token ids, using a tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer, rule: ChatRule = _USUAL) -> None:
        """Raise DataError if neither the tokenizer nor the rule has a template."""
        self.tokenizer, self.rule = tokenizer, rule
        texts = {DEFAULT: rule.template}
        if rule.template is None:
            texts = find_templates(tokenizer.files, tokenizer.path)
        if not texts:
            raise DataError(
                f"tokenizer={tokenizer.path} has no chat template: it is a base model's.\n`data build "
                "--chat-template FILE` gives the tuned model one, such as the chat_template.jinja of a sister model."
            )
        now = None
        if rule.now:
            now = datetime.datetime.fromisoformat(rule.now)
        self._templates = {name: ChatTemplate(text or "", name=_named(name), now=now) for name, text in texts.items()}
        self._variables = template_variables(tokenizer) | dict(rule.options)
        self._spellings = Spellings(tokenizer.controls.spellings())
        self._prompts_unasked: dict[ChatTemplate, bool] = {}

    @property
    def marks_replies(self) -> bool:
        """True if a template marks replies."""
        return any(template.marks_replies for template in self._templates.values())

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
        guard = Guard(self._spellings)
        replies = _replies(conversation, train_on)
        prompted: list[bool] = []
        counts_all = _counts_all(conversation, train_on)
        if train_on != "all" and not template.marks_replies:
            prompted = [True]
        elif not counts_all:
            # Some templates add an ending if no reply is requested. Then only the rendering with a prompt is a prefix
            # of the full text.
            prompted = [False, True]
        asks: list[tuple[int, bool]] = []
        # Per reply: the text before it in each prompt mode, then the text including it.
        if prompted:
            asks = [ask for turn in replies for ask in (*((turn, asked) for asked in prompted), (turn + 1, False))]
        rendered = self._rendered(template, conversation, guard, beginnings=asks)
        restored, places = _restored(guard, rendered.text)
        located = encode_rendered(self.tokenizer, restored.text, restored.plain)
        # Hidden control tokens grow from one character to their spelling, which shifts all later positions.
        growth = np.cumsum([0, *(stop - start - 1 for start, stop in restored.plain)])

        def moved(at: int) -> int:
            """Map a character position from the rendered to the restored text."""
            return at + int(growth[np.searchsorted(places, at)])

        # With train_on="all", template text counts too, and no spans are needed.
        counted = np.ones(len(located.ids), dtype=bool)
        if train_on != "all" or not counts_all:
            behind_prompt = partial(self._is_behind_prompt, template, conversation, guard)
            bounds = _bounds(replies, rendered.beginnings, len(prompted), behind_prompt)
            spans = [(moved(start), moved(stop)) for start, stop in bounds]
            # A mark inside a macro has no reliable position.
            if rendered.spans is None and train_on != "all":
                raise NotCountedError(MARKED_ELSEWHERE)
            marked = [(moved(start), moved(stop)) for start, stop in rendered.spans or []]
            # Marks cover every reply; keep those that start in a message with weight.
            if not counts_all:
                marked = [one for one in marked if any(start <= one[0] < stop for start, stop in spans)]
            counted = self._counted(template, located, restored, spans, marked)
        return EncodedChat(restored.text, located.ids, counted, located.stops)

    def encode_prompt(self, conversation: Conversation) -> np.ndarray:
        """Return a conversation's ids with the prompt for its next reply, int32 [N].

        Raise NotCountedError if the template rejects it.
        """
        guard = Guard(self._spellings)
        rendered = self._rendered(self._template(conversation), conversation, guard, add_generation_prompt=True)
        restored, _ = _restored(guard, rendered.text)
        return encode_rendered(self.tokenizer, restored.text, restored.plain).ids

    def _counted(
        self,
        template: ChatTemplate,
        located: Located,
        restored: Restored,
        spans: list[Span],
        marked: list[Span],
    ) -> np.ndarray:
        """Return the loss mask, bool [N]."""
        if self._train_on == "all":
            return located.within(spans)
        if template.marks_replies:
            return located.within(marked)
        if template not in self._prompts_unasked:
            self._prompts_unasked[template] = _prompts_unasked(
                self.tokenizer, partial(template.render, variables=self._variables)
            )
        if self._prompts_unasked[template]:
            # Every reply would end with the prompt for the next one, and the loss mask would include it.
            raise NotCountedError(PROMPTS_UNASKED)
        counted = np.zeros(len(located.ids), dtype=bool)
        for start, stop in spans:
            _check_prompt(self.tokenizer, located, restored, start)
            counted |= located.within([(start, _turn_end(self.tokenizer, located, restored.text, start, stop))])
        return counted

    def _is_behind_prompt(self, template: ChatTemplate, conversation: Conversation, guard: Guard, turn: int) -> bool:
        """Return True if a reply follows its prompt when it is the last message."""
        part = conversation.part(range(turn + 1))
        try:
            (found,) = self._rendered(template, part, guard, beginnings=[(turn, True)]).beginnings
        except NotCountedError:
            return True
        return isinstance(found, int)

    def _rendered(self, template: ChatTemplate, conversation: Conversation, guard: Guard, **options: Any) -> Rendered:
        """Render a conversation, with the guard hiding text that looks like control tokens."""
        try:
            messages, tools = guard.hide(list(conversation.messages)), guard.hide(list(conversation.tools))
        except ValueError as error:
            raise NotCountedError(SPELLS_CONTROL, str(error)) from error
        render = partial(template.render, tools=tools or None, variables=self._variables)
        return _rendered_messages(render, messages, **options)

    def _template(self, conversation: Conversation) -> ChatTemplate:
        if conversation.tools and WITH_TOOLS in self._templates:
            return self._templates[WITH_TOOLS]
        if DEFAULT in self._templates:
            return self._templates[DEFAULT]
        raise DataError(
            f"tokenizer={self.tokenizer.path} has the chat templates {', '.join(self._templates)} and none of them is "
            "its default. Name one: --chat-template FILE."
        )


def _rendered_messages(render: Callable[..., Rendered], messages: list[Any], **options: Any) -> Rendered:
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
            if not error.is_refusal:
                raise
    try:
        return render(joined, **options)
    except TemplateError as error:
        if not error.is_refusal:
            raise
        raise NotCountedError(REFUSED, f"message {_refused_turn(render, joined)}: {error.reason}") from error


def _loses_parts(text: str, messages: Sequence[Any]) -> bool:
    """Return True if a template drops content parts, or prints them as a list."""
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            continue
        # Lists may be printed as Python or as JSON.
        spelt = (str(content), json.dumps(content), json.dumps(content, ensure_ascii=False))
        # Stripped, because templates may trim parts.
        if any(part_text(part).strip() not in text for part in content) or any(one in text for one in spelt):
            return True
    return False


def _with_joined_parts(message: Any) -> Any:
    """Return a message with its content parts joined into one text."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "".join(map(part_text, message["content"]))}


def _prompts_unasked(tokenizer: Tokenizer, render: Callable[..., Rendered]) -> bool:
    """Return True if a template writes the prompt for a reply, or its beginning, after every last message.

    That text disappears when another question follows, and appears between a question and its reply.
    """
    said = ["one question", "one answer", "another question"]
    turns = [{"role": role, "content": text} for role, text in zip(("user", ASSISTANT, "user"), said, strict=True)]
    try:
        answered, asked_again = render(turns[:2]).text, render(turns).text
    except TemplateError:
        return False
    # Compare tokens, not characters: two tokens may begin with the same characters.
    located, other = (encode_rendered(tokenizer, text) for text in (answered, asked_again))
    length = min(len(located.ids), len(other.ids))
    differs = np.append(located.ids[:length] != other.ids[:length], True)
    unasked = answered[located.stops[: differs.argmax()].max(initial=0) :].strip()
    between = answered.partition(said[0])[2].partition(said[1])[0].lstrip()
    if not unasked:
        return False
    at = between.find(unasked)
    if at == 0 and unasked in tokenizer.controls.spellings():
        # A turn end, if questions end with the same token, unless that token alone is the prompt.
        return between.rstrip() == unasked != answered.partition(said[1])[2].strip()
    return at >= 0


def _refused_turn(render: Callable[[list[Any]], Rendered], messages: list[Any]) -> int:
    """Find the first message that a template rejects, by bisection."""
    # Invariant: the template accepts ``accepted`` messages and rejects ``refused``.
    accepted, refused = 0, len(messages)
    while accepted + 1 < refused:
        middle = (accepted + refused) // 2
        try:
            render(messages[:middle])
            accepted = middle
        except TemplateError:
            refused = middle
    return refused - 1


def _restored(guard: Guard, text: str) -> tuple[Restored, list[int]]:
    try:
        return guard.restore(text)
    except ValueError as error:
        raise NotCountedError(SPELLS_CONTROL, str(error)) from error


def _replies(conversation: Conversation, train_on: TrainOn) -> list[int]:
    """Return the indices of messages with tokens that may count."""
    turns = [
        turn
        for turn, (message, weight) in enumerate(zip(conversation.messages, conversation.weights, strict=True))
        if weight and (train_on == "all" or message["role"] == ASSISTANT)
    ]
    if train_on == "last":
        replies = [turn for turn, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
        turns = [turn for turn in turns if turn == max(replies)]
    return turns


def _counts_all(conversation: Conversation, train_on: TrainOn) -> bool:
    """Return True if all tokens that may count do, so that no token needs to be assigned to a message."""
    return all(conversation.weights) and train_on != "last"


def _bounds(
    replies: Sequence[int], beginnings: Sequence[int | str], ways: int, behind_prompt: Callable[[int], bool]
) -> list[Span]:
    """Return each reply's character span. Raise NotCountedError for the first turn that changes the text before it.

    Each reply has its text length before it per prompt mode, then the length including it; an error message replaces a
    length that cannot be determined.
    """
    if not ways:
        return []
    spans: list[Span] = []
    for number, turn in enumerate(replies):
        *starts, behind = beginnings[number * (ways + 1) : (number + 1) * (ways + 1)]
        # The first prompt mode that gives a prefix counts.
        before = next((found for found in starts if isinstance(found, int)), starts[0])
        for found, what in ((before, "before it"), (behind, "up to it")):
            if isinstance(found, str):
                reason = BEGINS_OTHERWISE
                if found is behind or behind_prompt(turn):
                    reason = CHANGES_ITS_PAST
                raise NotCountedError(
                    reason, found or f"message {turn}: the text {what} is another one without what follows"
                )
        assert isinstance(before, int)
        assert isinstance(behind, int)
        spans.append((before, behind))
    return spans


def _check_prompt(tokenizer: Tokenizer, located: Located, restored: Restored, start: int) -> None:
    """Raise NotCountedError unless the ids before a reply equal the ids of its prompt alone."""
    text = restored.text
    before = int(np.searchsorted(located.stops, start, side="right"))
    # Start at the last control token: text before it is encoded separately in both.
    control = np.flatnonzero(tokenizer.is_control[located.ids[:before]])
    first, at = 0, 0
    if len(control):
        first, at = int(control[-1]) + 1, int(located.stops[control[-1]])
    plain = [(begin - at, end - at) for begin, end in restored.plain if at <= begin < start]
    alone = encode_rendered(tokenizer, text[at:start], plain, is_beginning=at == 0).ids
    if not np.array_equal(alone, located.ids[first:before]):
        raise NotCountedError(
            JOINED,
            f"{text[max(0, start - 10) : start]!r} and {text[start : start + 10]!r}",
        )


def _turn_end(tokenizer: Tokenizer, located: Located, text: str, start: int, stop: int) -> int:
    """Return a reply's end: after its last control token if only white space follows that."""
    first, last = np.searchsorted(located.starts, [start, stop])
    control = np.flatnonzero(tokenizer.is_control[located.ids[first:last]])
    if len(control):
        end = int(located.stops[first + control[-1]])
        # White space after the end token belongs to the template: generation stops before it.
        if not text[end:stop].strip():
            return end
    return stop


def template_variables(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the template variables for special tokens."""
    found = variables(tokenizer.files, tokenizer.path)
    named = {"bos_token": tokenizer.special.bos, "eos_token": tokenizer.special.end}
    own = {key: tokenizer.piece(token) for key, token in named.items() if token is not None}
    # Variables from the files take precedence.
    return own | found


def _named(name: str) -> str:
    if name == DEFAULT:
        return "The chat template"
    return f"The chat template {name!r}"
