"""This process's watch: started at rendezvous, queried when a rank ends."""

from __future__ import annotations

import json
import logging
import socket
from functools import partial
from typing import TYPE_CHECKING

from parallel.runtime.listening import rendezvous_host
from parallel.runtime.watch.key import KEY_VARIABLE, WatchKey, environment_key, new_key, read_key
from parallel.runtime.watch.rank_watch import RankWatch
from parallel.runtime.watch.stopped_rank_guard import start_guard
from parallel.runtime.watch.watch_coordinator import Coordinator
from parallel.runtime.watch.watch_options import WatchOptions

if TYPE_CHECKING:
    from torch.distributed import Store  # noqa: TID251  (its type alone)

log = logging.getLogger(__name__)
# Without a run folder there is no log file.
log.addHandler(logging.NullHandler())

_WHERE, _KEY_REQUEST, _KEY_RESPONSE = "longctx/watch", "longctx/watch/asked", "longctx/watch/told"
"""Store keys: the coordinator's address; a rank's request for the key; the key itself, once requested."""
_GUARD_SECONDS = 10.0
"""Beyond the timeout: when the guard resumes a stopped rank that is alone on its machine."""

# One per process, like torch's world group.
_member: RankWatch | None = None
_stop_text = "Interrupted."


def active_watch() -> RankWatch | None:
    """Return this process's member of the watch; None in a single process, and before rendezvous."""
    return _member


def set_stop_text(text: str) -> None:
    """Set the message to the user after Ctrl-C, in case the main thread cannot write it."""
    global _stop_text
    _stop_text = text


def start_watch(store: Store, options: WatchOptions) -> None:
    """Watch all ranks, which rendezvous in ``store``; return when all have joined. Collective.

    If a rank is missing or has other code, this process ends as after any failure. Raise OSError if rank 0's machine is
    unreachable, or if that run's ranks have all joined.
    """
    global _member
    if options.rank == 0:
        key = new_key()
        hub = Coordinator(options, host=rendezvous_host(), key=key)
        store.set(_WHERE, json.dumps({"port": hub.address[1], "file": str(key.file or "")}))
        _member = _join(hub.address, options, key=key.value, hub=hub)
        _member.wait_for_all(meanwhile=partial(_publish_key_on_request, store, key))
        # A rank that joins from now on belongs to another run, and receives that error.
        store.delete_key(_KEY_RESPONSE)
        store.set(_WHERE, "{}")
        port = hub.address[1]
    else:
        where = json.loads(store.get(_WHERE))
        if not where:
            raise OSError("the run there already has all its ranks; another run uses this port")
        # Rank 0 runs on the rendezvous machine: launchers start it there.
        port = int(where["port"])
        _member = _join((rendezvous_host(), port), options, key=_find_key(store, where["file"]))
        _member.wait_for_all()
    # No other rank on this machine can end this one if it is stopped. The guard acts later than the others end.
    if len(_member.line.neighbors) == 1:
        start_guard(options.timeout + _GUARD_SECONDS, port)


def _join(address: tuple[str, int], options: WatchOptions, *, key: str, hub: Coordinator | None = None) -> RankWatch:
    connection = socket.create_connection(address, timeout=options.rendezvous_seconds)
    connection.settimeout(None)
    return RankWatch(connection, options, key=key, hub=hub, stop_text=_stop_text)


def _find_key(store: Store, file: str) -> str:
    """Return the key by which the coordinator authenticates ranks."""
    key = environment_key() or read_key(file)
    if key is None:
        store.set(_KEY_REQUEST, socket.gethostname())
        key = store.get(_KEY_RESPONSE).decode()
    return key


def _publish_key_on_request(store: Store, key: WatchKey) -> None:
    """Put the key into the store if a rank cannot get it otherwise, and log that once."""
    if not store.check([_KEY_REQUEST]) or store.check([_KEY_RESPONSE]):
        return
    log.warning(
        "%s cannot read the watch's key from rank 0's file, so until all ranks have joined, the rendezvous store holds "
        "the key, readable through its port. To avoid this, set %s to 32 random letters and digits for every rank.",
        store.get(_KEY_REQUEST).decode(errors="replace"),
        KEY_VARIABLE,
    )
    store.set(_KEY_RESPONSE, key.value)


def stop_watch() -> None:
    """Stop the watch, if there is one: this rank is done."""
    global _member
    if _member is not None:
        _member.leave()
        _member = None
