"""``chat_documents``: a conversation as documents: one, one for each reply, or parts of one that is too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from longctx.chat.conversation import ASSISTANT, Conversation
from longctx.chat.encode import CUT_BEFORE, NOTHING_COUNTS, ChatEncoder, EncodedChat, NotCountedError


def chat_documents(conversation: Conversation, encoder: ChatEncoder) -> Iterator[EncodedChat | NotCountedError]:
    """Yield a conversation's documents by the encoder's rule, and for what is left out the reason.

    Each document has a token that counts, and at most ``max_tokens``.
    """
    for part in _parts(conversation, encoder):
        yield from _fitted(part, encoder)


def _parts(conversation: Conversation, encoder: ChatEncoder) -> Iterator[Conversation]:
    """Yield the conversation, or with ``each`` its beginning up to each reply, if there is one."""
    if encoder.rule.train_on != "each":
        yield conversation
        return
    roles = [message["role"] for message in conversation.messages]
    replies = [turn for turn, role in enumerate(roles) if role == ASSISTANT and conversation.weights[turn]]
    for turn in replies:
        yield conversation.part(range(turn + 1))
    if not replies:
        yield conversation


def _fitted(conversation: Conversation, encoder: ChatEncoder) -> Iterator[EncodedChat | NotCountedError]:
    """Yield a document of at most ``max_tokens``, or several."""
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
    """Yield parts of whole exchanges, each with the system turn, as many exchanges each as fit.

    If one reply counts, the part that ends with it alone.
    """
    is_one = encoder.rule.train_on in ("last", "each")
    if is_one:
        replies = [turn for turn, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
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
        # One reply counts: as much of what precedes it as fits.
        _, found = _most(lambda count: part(len(exchanges) - count, count), len(exchanges))
        yield _counting(found)
        return
    first, empty, counts = 0, NotCountedError(NOTHING_COUNTS), False
    while first < len(exchanges):
        count, found = _most(lambda count, first=first: part(first, count), len(exchanges) - first)
        found = _counting(found)
        # A question behind the last reply, or exchanges without weight, are no conversation that is lost.
        if isinstance(found, EncodedChat) or found.reason != empty.reason:
            counts = True
            yield found
        first += count
    if not counts:
        yield empty


def _most(
    part: Callable[[int], EncodedChat | NotCountedError], limit: int
) -> tuple[int, EncodedChat | NotCountedError]:
    """Return the most exchanges, up to ``limit``, that a part holds, and the part: one that fits, or why one does not.

    Doubled until they are too many, and then halved: a few parts are encoded for each that is kept.
    """
    fits, found = 1, part(1)
    too_many = limit + 1
    if isinstance(found, NotCountedError):
        return fits, found
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
    """Return the system turns that a conversation begins with, and its turns from each question to the next."""
    roles = [message["role"] for message in conversation.messages]
    begin = 0
    while begin < len(roles) and roles[begin] in ("system", "developer"):
        begin += 1
    exchanges: list[list[int]] = []
    for turn in range(begin, len(roles)):
        if not exchanges or (roles[turn] == "user" and roles[turn - 1] != "user"):
            exchanges.append([])
        exchanges[-1].append(turn)
    return list(range(begin)), exchanges


def _counting(found: EncodedChat | NotCountedError, reason: str = NOTHING_COUNTS) -> EncodedChat | NotCountedError:
    """Return the same, or the error of a document in which nothing counts."""
    # The first token is nobody's target.
    if isinstance(found, EncodedChat) and not found.counted[1:].any():
        return NotCountedError(reason)
    return found


def _too_long(encoded: EncodedChat, max_tokens: int) -> NotCountedError:
    return NotCountedError(f"more than {max_tokens:,} tokens", f"it has {len(encoded.ids):,}")
