"""Properties: the same examples every time in `make test`, new ones in `make faults`."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)  # a loaded machine is no reason to fail
settings.register_profile("search", deadline=None, print_blob=True)


def pytest_configure(config) -> None:
    """Before any test's own settings are read."""
    settings.load_profile("search" if config.option.markexpr == "slow" else "repeatable")
