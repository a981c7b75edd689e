"""The network interface that gloo listens at."""

from __future__ import annotations

import os

import pytest

from parallel.runtime.interface import INTERFACE_VARIABLE, choose_gloo_interface, interface_towards


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_this_machine_is_reached_by_its_loopback(address):
    assert interface_towards(address) == "lo"


def test_no_way_leads_to_what_is_no_address():
    assert interface_towards("no such host.") is None


@pytest.mark.parametrize(("named", "chosen"), [("", "lo"), ("eth7", "eth7")])
def test_the_user_s_choice_stays(monkeypatch, named, chosen):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv(INTERFACE_VARIABLE, named)
    choose_gloo_interface()
    assert os.environ[INTERFACE_VARIABLE] == chosen
