"""Diagnosis for corrupted messages: once a checksum differs, ranks compare their ledgers message by message."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from parallel.comm.messages.ledger import Ledger, LedgerEntry, Message
from parallel.comm.world import gather_objects

_MAX_SHOWN = 3
"""Number of messages described in detail; the rest are counted."""


@dataclass(frozen=True)
class _RankLedger:
    """One rank's ledger, with checksums as integers."""

    host: str
    sent: list[tuple[Message, int]]
    received: list[tuple[Message, int]]
    sent_before: list[tuple[Message, int]]


@dataclass(frozen=True)
class _MessageError:
    """Message that did not arrive as it was sent."""

    sent: Message | None
    """None if the sender has no such message."""
    received: Message | None
    """None if the receiver has no such message."""
    content: Message | None = None
    """The sender's message whose bytes arrived instead; None if no message matches."""
    is_old: bool = False
    """True if ``content`` was sent before the last comparison, i.e. in the previous step."""

    @property
    def message(self) -> Message:
        """The message as the receiver saw it, or otherwise as the sender did."""
        found = self.received or self.sent
        assert found is not None
        return found

    def describe(self) -> str:
        """Return a sentence with the message's route and the bytes that arrived instead."""
        message = self.message
        text = f"rank {message.receiver} got {message.kind.words} from rank {message.sender} ({message.where()})"
        if self.sent is None:
            return f"{text}, which that rank did not send."
        if self.received is None:
            return text.replace(" got ", " did not get ", 1) + ", which that rank sent."
        if self.content is None:
            return f"{text}: its bytes match no message sent by rank {message.sender}."
        origin = f"{self.content.kind.words} to rank {self.content.receiver}, {self.content.where()}"
        step_text = "in the same step"
        if self.is_old:
            step_text = "in the previous step"
        return f"{text}: its bytes are those from another message, sent {step_text} ({origin})."


def find_differences(ledger: Ledger) -> str:
    """Describe the messages that did not arrive as sent; the same text on every rank. Collective."""
    ranks = _gather(ledger)
    errors = [error for receiver in range(len(ranks)) for error in _errors_at(receiver, ranks)]
    errors.sort(key=_time)
    lines = [error.describe() for error in errors[:_MAX_SHOWN]]
    lines = [lines[0][0].upper() + lines[0][1:], *lines[1:]] if lines else ["The message checksums themselves differ."]
    # Many messages between one pair suggest a link or a host; one message in every pair, the rank that they share.
    pairs = Counter((error.message.sender, error.message.receiver) for error in errors)
    if len(errors) > 1:
        most = pairs.most_common(_MAX_SHOWN)
        pair_counts = ", ".join(f"{count} from rank {sender} to rank {receiver}" for (sender, receiver), count in most)
        lines.append(f"Mismatched messages: {len(errors)} of {sum(len(r.received) for r in ranks)} ({pair_counts}).")
    involved = sorted({rank for pair in pairs for rank in pair})[: 2 * _MAX_SHOWN]
    hosts = ", ".join(f"rank {rank} on {ranks[rank].host}" for rank in involved)
    if hosts:
        lines.append(f"Hosts: {hosts}.")
    return "\n".join(lines)


def _gather(ledger: Ledger) -> list[_RankLedger]:
    # All entries, not only mismatches: the run is ending anyway, and the received bytes may belong to any message.
    mine = _RankLedger(
        socket.gethostname(), _numbers(ledger.sent), _numbers(ledger.received), _numbers(ledger.sent_before)
    )
    return gather_objects(mine)


def _numbers(entries: Sequence[LedgerEntry]) -> list[tuple[Message, int]]:
    found = []
    for message, total in entries:
        # The run is ending, so a device synchronization is acceptable.
        if isinstance(total, Tensor):
            total = int(total)
        found.append((message, total))
    return found


def _errors_at(receiver: int, ranks: Sequence[_RankLedger]) -> list[_MessageError]:
    """Return the messages that did not arrive at one rank as they were sent."""
    # Match by identity, not by position: if a rank skipped a message, later ones still match.
    sent = {}
    for rank in ranks:
        sent.update({m.identity: (m, total) for m, total in rank.sent if m.receiver == receiver})
    found = []
    for message, total in ranks[receiver].received:
        at_sender = sent.pop(message.identity, None)
        if at_sender is None:
            found.append(_MessageError(None, message))
        elif at_sender[1] != total:
            content, is_old = _content(total, message, ranks[message.sender])
            found.append(_MessageError(at_sender[0], message, content, is_old))
    return found + [_MessageError(message, None) for message, _ in sent.values()]


def _content(total: int, message: Message, sender: _RankLedger) -> tuple[Message | None, bool]:
    """Return the sender's nearest message with this checksum, and True if it is from the previous step."""
    same = [m for m, other in sender.sent if other == total]
    # A duplicated or late message was sent earlier, an early one was sent later: take the nearest.
    same.sort(key=lambda m: (m.receiver != message.receiver, abs(m.ordinal - message.ordinal)))
    if same:
        return same[0], False
    old = [m for m, other in sender.sent_before if other == total]
    if old:
        return old[-1], True
    return None, False


def _time(error: _MessageError) -> tuple[int, bool, int]:
    """Return a key that orders errors roughly by time: later ones may follow from the first."""
    message = error.message
    return message.micro_batch, message.part == "backward", message.ordinal
