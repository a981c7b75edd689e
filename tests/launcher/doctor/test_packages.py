"""Versions: what is missing, what longctx does not take, and a flash-attn of another PyTorch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from launcher.doctor import packages
from launcher.doctor.check_result import CheckResult, worst
from launcher.doctor.packages import check_packages, installed_versions

GOOD = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "pyarrow": "26.0.1", "numpy": "2.4.6", "flash-attn": None}


def failures(installed: dict[str, str | None], requirements: list[str] | None = ()) -> list[CheckResult]:
    found = check_packages(installed, requirements)
    return [finding for finding in found if finding.verdict != "ok"]


def test_this_environment_is_one_that_longctx_takes():
    assert worst(check_packages(installed_versions())) == "ok"


@pytest.mark.parametrize("name", ["torch", "deepspeed", "pyarrow"])
def test_a_missing_package_fails(name):
    (finding,) = failures({**GOOD, name: None})
    assert finding.value == f"{name} is not installed"
    assert "make setup" in finding.advice


def test_a_version_that_longctx_does_not_take_fails():
    wanted = ["torch>=2.11", "deepspeed==0.19.8", 'transformers>=5; extra == "hf"', "einops", "not a requirement!"]
    installed = {**GOOD, "torch": "2.10.0", "transformers": "4.57.1"}
    assert [finding.value for finding in failures(installed, wanted)] == [
        "torch 2.10.0; longctx needs >=2.11",
        "transformers 4.57.1; longctx needs >=5",
    ]
    assert not failures({**GOOD, "torch": "2.12.0.dev20260101+cu130"}, wanted), "a nightly build is new enough"


def test_a_copy_that_nobody_installed_says_what_it_needs(monkeypatch):
    installed = sorted(packages.requirements_of_longctx())
    monkeypatch.setattr(packages, "DISTRIBUTION", "no-such-distribution")
    named = {Requirement(line).name for line in packages.requirements_of_longctx()}
    assert named == {Requirement(line).name for line in installed}
    assert [finding.value for finding in failures({**GOOD, "deepspeed": "0.14.0"}, None)] == [
        "deepspeed 0.14.0; longctx needs ==0.19.8"
    ]


@pytest.mark.parametrize(("flash", "torch"), [("2.8.3", "2.13.0"), ("2.8.4", "2.13.0"), ("2.8.3", "2.9.1")])
def test_a_flash_attn_of_another_pytorch_fails_unless_it_loads(monkeypatch, flash, torch):
    installed = {**GOOD, "torch": torch, "flash-attn": flash}
    monkeypatch.setattr(packages, "FLASH2", SimpleNamespace(load=lambda: "undefined symbol"))
    found = failures(installed)
    assert bool(found) == ((flash, torch) == ("2.8.3", "2.13.0"))
    assert all("--no-binary flash-attn" in finding.advice for finding in found)
    monkeypatch.setattr(packages, "FLASH2", SimpleNamespace(load=object))
    assert not failures(installed)
