"""Values that ranks send to rank 0 asynchronously: rank 0 reads them when it is ready, and no rank waits."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store


class Mailbox:
    """Numbered JSON values in the store used for rendezvous."""

    def __init__(self, name: str) -> None:
        """Open the mailbox with this name, equal on every rank."""
        self._store = dist.PrefixStore(name, _get_default_store())

    def leave(self, number: int, value: Any) -> None:
        """Store a value for rank 0, once per number."""
        self._store.set(f"{number}", json.dumps(value))

    def has(self, number: int) -> bool:
        """Return True if the number's value has arrived."""
        return self._store.check([f"{number}"])

    def take(self, number: int) -> Any:
        """Wait for the number's value, remove it and return it."""
        value = json.loads(self._store.get(f"{number}"))
        self._store.delete_key(f"{number}")
        return value
