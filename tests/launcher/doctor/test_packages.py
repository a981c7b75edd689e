"""Versions: what is missing, what longctx does not take, and pairs that are known to fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.doctor.finding import Finding, worst
from launcher.doctor.packages import BAD_PAIRS, check_packages, installed_versions

GOOD = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "pyarrow": "26.0.1", "numpy": "2.4.6", "flash-attn": None}


def failures(installed: dict[str, str | None], requirements: list[str] | None = None) -> list[Finding]:
    found = check_packages(installed, requirements or [])
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


@pytest.mark.parametrize(
    ("installed", "symptom"),
    [
        ({"deepspeed": "0.14.0"}, "cannot import name 'log'"),
        ({"transformers": "5.0.0", "torch": "2.3.1"}, "without PyTorch"),
    ],
)
def test_a_pair_that_is_known_to_fail(installed, symptom):
    (finding,) = failures({**GOOD, **installed})
    assert finding.verdict == "fail"
    assert symptom in finding.value
    assert "pip install" in finding.advice


def test_a_flash_attn_that_works_is_no_bad_pair():
    pair = next(pair for pair in BAD_PAIRS if pair.package == "flash-attn")
    installed = {"flash-attn": "2.8.3", "torch": "2.13.0"}
    assert not replace(pair, unless=lambda: True).holds(installed)
    assert replace(pair, unless=lambda: False).holds(installed)
    assert not replace(pair, unless=lambda: False).holds({**installed, "torch": "2.9.1"})
