"""Where ranks meet: another program that listens there, and says nothing, keeps no rank."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from parallel.comm.process import meeting_store


def test_whoever_listens_and_never_answers_is_no_rank_0(monkeypatch: pytest.MonkeyPatch):
    """torch's store would wait for ever: the system takes the connection for the program, which need not look."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(stranger.getsockname()[1]))
        with pytest.raises(OSError, match=r"gives no answer within 0 s, so it is no rank 0"):
            meeting_store(1, 2, timedelta(seconds=0.3))
