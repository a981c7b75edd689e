"""``chat_documents``: a conversation's documents: one, one per reply, or parts if it is too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from longctx.chat.conversation import ASSISTANT, Conversation
from longctx.chat.encode import CUT_BEFORE, NOTHING_COUNTS, ChatEncoder, EncodedChat, NotCountedError


def chat_documents(conversation: Conversation, encoder: ChatEncoder) -> Iterator[EncodedChat | NotCountedError]:
    """Yield a conversation's documents by the encoder's rule, and the reason for each part that is left out.

    Each document has at least one token that counts, and at most ``max_tokens``.
    """
    for part in _parts(conversation, encoder):
        yield from _fitted(part, encoder)


def _parts(conversation: Conversation, encoder: ChatEncoder) -> Iterator[Conversation]:
    """Yield the conversation, or with ``each`` its beginning up to each reply, if it has replies."""
    if encoder.rule.train_on != "each":
        yield conversation
        return
    # Each document ends with the one reply that counts in it.
    roles = [message["role"] for message in conversation.messages]
    replies = [turn for turn, role in enumerate(roles) if role == ASSISTANT and conversation.weights[turn]]
    for turn in replies:
        yield conversation.part(range(turn + 1))
    if not replies:
        yield conversation


def _fitted(conversation: Conversation, encoder: ChatEncoder) -> Iterator[EncodedChat | NotCountedError]:
    """Yield one or more documents, each with at most ``max_tokens``."""
    rule = encoder.rule
    try:
        encoded = encoder.encode(conversation)
    except NotCountedError as error:
        yield error
        return
    if rule.max_tokens is None or len(encoded.ids) <= rule.max_tokens:
        yield _counting(encoded)
    elif rule.too_long == "keep-begin":
        yield _counting(encoded.begin(rule.max_tokens), CUT_BEFORE)
    elif rule.too_long == "drop":
        yield _too_long(encoded, rule.max_tokens)
    else:
        yield from _split(conversation, encoder, rule.max_tokens)


def _split(
    conversation: Conversation, encoder: ChatEncoder, max_tokens: int
) -> Iterator[EncodedChat | NotCountedError]:
    """Yield parts made from complete exchanges, each with the system turn and as many exchanges as fit.

    If only one reply counts, yield only the part that ends with it.
    """
    is_one = encoder.rule.train_on in ("last", "each")
    if is_one:
        replies = [turn for turn, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
        # Turns after the last reply never count.
        conversation = conversation.part(range(max(replies, default=-1) + 1))
    begin, exchanges = _exchanges(conversation)

    def part(first: int, count: int) -> EncodedChat | NotCountedError:
        turns = [turn for exchange in exchanges[first : first + count] for turn in exchange]
        try:
            encoded = encoder.encode(conversation.part(begin + turns))
        except NotCountedError as error:
            return error
        if len(encoded.ids) > max_tokens:
            return _too_long(encoded, max_tokens)
        return encoded

    if is_one and exchanges:
        # Only one reply counts: keep as much context before it as fits.
        _, found = _most(lambda count: part(len(exchanges) - count, count), len(exchanges))
        yield _counting(found)
        return
    first, empty, counts = 0, NotCountedError(NOTHING_COUNTS), False
    while first < len(exchanges):
        count, found = _most(lambda count, first=first: part(first, count), len(exchanges) - first)
        found = _counting(found)
        # A question after the last reply, or exchanges without weight, are not reported as a lost conversation.
        if isinstance(found, EncodedChat) or found.reason != empty.reason:
            counts = True
            yield found
        first += count
    if not counts:
        yield empty


def _most(
    part: Callable[[int], EncodedChat | NotCountedError], limit: int
) -> tuple[int, EncodedChat | NotCountedError]:
    """Return the largest exchange count, up to ``limit``, that fits into a part, and that part.

    If not even one exchange fits, return the reason.
    """
    fits, found = 1, part(1)
    too_many = limit + 1
    if isinstance(found, NotCountedError):
        return fits, found
    # Double the count until it is too large, then bisect: few parts are encoded for each one kept.
    while fits + 1 < too_many:
        count = 2 * fits
        if too_many <= limit:
            count = (fits + too_many) // 2
        more = part(min(count, limit))
        if isinstance(more, NotCountedError):
            too_many = min(count, limit)
        else:
            fits, found = min(count, limit), more
    return fits, found


def _exchanges(conversation: Conversation) -> tuple[list[int], list[list[int]]]:
    """Return a conversation's leading system turns, and its other turns grouped from each question to the next."""
    roles = [message["role"] for message in conversation.messages]
    begin = 0
    while begin < len(roles) and roles[begin] in ("system", "developer"):
        begin += 1
    exchanges: list[list[int]] = []
    for turn in range(begin, len(roles)):
        # Consecutive user turns form one question.
        if not exchanges or (roles[turn] == "user" and roles[turn - 1] != "user"):
            exchanges.append([])
        exchanges[-1].append(turn)
    return list(range(begin)), exchanges


def _counting(found: EncodedChat | NotCountedError, reason: str = NOTHING_COUNTS) -> EncodedChat | NotCountedError:
    """Return the result, or an error if no token in it counts."""
    # The first token is never a target.
    if isinstance(found, EncodedChat) and not found.counted[1:].any():
        return NotCountedError(reason)
    return found


def _too_long(encoded: EncodedChat, max_tokens: int) -> NotCountedError:
    return NotCountedError(f"more than {max_tokens:,} tokens", f"it has {len(encoded.ids):,}")
