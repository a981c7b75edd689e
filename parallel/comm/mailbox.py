"""Values that ranks leave for rank 0, which reads them when it has time: no rank waits for another."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store


class Mailbox:
    """JSON values under numbers, in the store through which the ranks met."""

    def __init__(self, name: str) -> None:
        """Open the mailbox of this name, which is the same on every rank."""
        self._store = dist.PrefixStore(name, _get_default_store())

    def leave(self, number: int, value: Any) -> None:
        """Leave a value for rank 0, once for each number."""
        self._store.set(f"{number}", json.dumps(value))

    def has(self, number: int) -> bool:
        """Return whether the number's value is there."""
        return self._store.check([f"{number}"])

    def take(self, number: int) -> Any:
        """Wait for the number's value, remove it and return it."""
        value = json.loads(self._store.get(f"{number}"))
        self._store.delete_key(f"{number}")
        return value
