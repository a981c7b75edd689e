"""``chat_documents``: a conversation's documents: one, one per reply, or parts if it is too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from longctx.chat.chat_encoder import (
    EMPTY_LOSS_MASK,
    EMPTY_LOSS_MASK_AFTER_CUT,
    ChatEncoder,
    ChatEncodingError,
    EncodedChat,
)
from longctx.chat.conversation import ASSISTANT, Conversation


def chat_documents(conversation: Conversation, encoder: ChatEncoder) -> Iterator[EncodedChat | ChatEncodingError]:
    """Yield a conversation's documents by the encoder's rule, and the reason for each part that is left out.

    Each document has at least one token that counts, and at most ``max_tokens``.
    """
    for part in _parts(conversation, encoder):
        yield from _fit_documents(part, encoder)


def _parts(conversation: Conversation, encoder: ChatEncoder) -> Iterator[Conversation]:
    """Yield the conversation, or with ``each`` its beginning up to each reply, if it has replies."""
    if encoder.rule.train_on != "each":
        yield conversation
        return
    # Each document ends with the one reply that counts in it.
    roles = [message["role"] for message in conversation.messages]
    reply_turns = [turn for turn, role in enumerate(roles) if role == ASSISTANT and conversation.weights[turn]]
    for turn in reply_turns:
        yield conversation.part(range(turn + 1))
    if not reply_turns:
        yield conversation


def _fit_documents(conversation: Conversation, encoder: ChatEncoder) -> Iterator[EncodedChat | ChatEncodingError]:
    """Yield one or more documents, each with at most ``max_tokens``."""
    rule = encoder.rule
    try:
        encoded = encoder.encode(conversation)
    except ChatEncodingError as error:
        yield error
        return
    if rule.max_tokens is None or len(encoded.ids) <= rule.max_tokens:
        yield _check_loss_mask(encoded)
    elif rule.too_long == "keep-begin":
        yield _check_loss_mask(encoded.truncate(rule.max_tokens), EMPTY_LOSS_MASK_AFTER_CUT)
    elif rule.too_long == "drop":
        yield _too_long(encoded, rule.max_tokens)
    else:
        yield from _split(conversation, encoder, rule.max_tokens)


def _split(
    conversation: Conversation, encoder: ChatEncoder, max_tokens: int
) -> Iterator[EncodedChat | ChatEncodingError]:
    """Yield parts made from complete exchanges, each with the system turn and as many exchanges as fit.

    If only one reply counts, yield only the part that ends with it.
    """
    is_one = encoder.rule.train_on in ("last", "each")
    if is_one:
        reply_turns = [turn for turn, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
        # Turns after the last reply never count.
        conversation = conversation.part(range(max(reply_turns, default=-1) + 1))
    begin, exchanges = _exchanges(conversation)

    def part(first: int, count: int) -> EncodedChat | ChatEncodingError:
        turns = [turn for exchange in exchanges[first : first + count] for turn in exchange]
        try:
            encoded = encoder.encode(conversation.part(begin + turns))
        except ChatEncodingError as error:
            return error
        if len(encoded.ids) > max_tokens:
            return _too_long(encoded, max_tokens)
        return encoded

    if is_one and exchanges:
        # Only one reply counts: keep as much context before it as fits.
        _, result = _largest_fit(lambda count: part(len(exchanges) - count, count), len(exchanges))
        yield _check_loss_mask(result)
        return
    first, empty, counts = 0, ChatEncodingError(EMPTY_LOSS_MASK), False
    while first < len(exchanges):
        count, result = _largest_fit(lambda count, first=first: part(first, count), len(exchanges) - first)
        result = _check_loss_mask(result)
        # A question after the last reply, or exchanges without weight, are not reported as a lost conversation.
        if isinstance(result, EncodedChat) or result.reason != empty.reason:
            counts = True
            yield result
        first += count
    if not counts:
        yield empty


def _largest_fit(
    part: Callable[[int], EncodedChat | ChatEncodingError], limit: int
) -> tuple[int, EncodedChat | ChatEncodingError]:
    """Return the largest exchange count, up to ``limit``, that fits into a part, and that part.

    If not even one exchange fits, return the reason.
    """
    fits, result = 1, part(1)
    too_many = limit + 1
    if isinstance(result, ChatEncodingError):
        return fits, result
    # Double the count until it is too large, then bisect: few parts are encoded for each one kept.
    while fits + 1 < too_many:
        count = 2 * fits
        if too_many <= limit:
            count = (fits + too_many) // 2
        candidate = part(min(count, limit))
        if isinstance(candidate, ChatEncodingError):
            too_many = min(count, limit)
        else:
            fits, result = min(count, limit), candidate
    return fits, result


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


def _check_loss_mask(
    result: EncodedChat | ChatEncodingError, reason: str = EMPTY_LOSS_MASK
) -> EncodedChat | ChatEncodingError:
    """Return the result, or an error if no token in it counts."""
    # The first token is never a target.
    if isinstance(result, EncodedChat) and not result.loss_mask[1:].any():
        return ChatEncodingError(reason)
    return result


def _too_long(encoded: EncodedChat, max_tokens: int) -> ChatEncodingError:
    return ChatEncodingError(f"more than {max_tokens:,} tokens", f"it has {len(encoded.ids):,}")
