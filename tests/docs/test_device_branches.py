"""docs/devices.md names every place where the code asks for its device, and what checks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from benchmarks.first_gpu.steps import PARTS
from tests.helpers import REPOSITORY

PACKAGES = ("longctx", "parallel", "data_pipeline", "launcher")
KINDS = {"cpu", "cuda", "mps"}


def asks_for_a_device(node: ast.AST) -> bool:
    """True for ``on_cpu(x)``, ``x.is_cuda``, ``torch.cuda.…`` and comparisons with a kind of device."""
    if isinstance(node, ast.FunctionDef):
        return node.name == "on_cpu"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "on_cpu"
    if isinstance(node, ast.Attribute):
        is_torch_cuda = node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch"
        return node.attr == "is_cuda" or is_torch_cuda
    if isinstance(node, ast.Compare):
        return any(isinstance(x, ast.Constant) and x.value in KINDS for x in [node.left, *node.comparators])
    return False


def functions_that_ask(node: ast.AST, owner: str = "") -> Iterator[str]:
    """The innermost functions, or classes, around each question; types are none."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        owner = f"{owner}.{node.name}".lstrip(".")
    if asks_for_a_device(node):
        yield owner
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.AnnAssign | ast.arguments):
            yield from functions_that_ask(child, owner)


def places() -> dict[str, set[str]]:
    """Files of the product, and their functions that ask for a device."""
    found = {}
    for package in PACKAGES:
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            if functions := set(functions_that_ask(ast.parse(file.read_text()))):
                found[str(file.relative_to(REPOSITORY))] = functions
    return found


def rows() -> dict[str, tuple[set[str], str]]:
    """The page's rows: file -> (functions, what checks them)."""
    found = {}
    for line in (REPOSITORY / "docs" / "devices.md").read_text().splitlines():
        match = re.fullmatch(r"\| `(\S+\.py)` \| (.+?) \| (.+?) \| (.+) \|", line)
        if match is not None:
            assert match[1] not in found, f"{match[1]} has two rows"
            found[match[1]] = set(re.findall(r"`(\S+?)`", match[2])), match[4]
    return found


def test_every_place_that_asks_for_a_device_is_named():
    assert {file: functions for file, (functions, _) in rows().items()} == places()


def test_every_check_is_there():
    steps = {step.name for part in PARTS.values() for step in part}
    for file, (_, checks) in rows().items():
        tests = re.findall(r"`(\S+?\.py)::(\w+)`", checks)
        named = re.search(r"GPU programme: ([\w, ]+)", checks)
        assert tests or named or "nothing" in checks, f"{file}: {checks}"
        for test_file, name in tests:
            text = (REPOSITORY / "tests" / test_file).read_text()
            assert f"def {name}(" in text, f"{file}: {test_file} has no {name}"
        if named is not None:
            assert set(named[1].split(", ")) <= steps, f"{file}: {named[0]}"
