"""Sentences and names as readers from the field expect them: ``python -m tests.lint.prose``, part of ``make lint``.

Rates count words in docstrings of functions and classes and in comments, per 1,000 words. Limits lie above what
torchtitan, OLMo-core and Megatron-core have (of: 9 to 19, where: 0.7 to 1.0, what/who/whose: 0.2 to 0.7).
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
PACKAGES = ("launcher", "longctx", "parallel", "data_pipeline")
WORD = re.compile(r"[A-Za-z']+")
RATES = {
    "where": 2,
    "what|who|whose": 2,
    "of": 25,
    "none|nothing|nobody": 3,
    "alike|besides?|whole|lies?|else|anew": 1.5,
}
"""Words, and how often they may stand in 1,000 words of a package."""
NO_VERBS = re.compile(
    r"(The|An?|One|Two|Each|Every|All|Any|No|Both|Some|What|Whether|Where|Which|How|Who|Why|Those|This|That|These|Its|Of"
    r"|As|In|On|At|By|For|From|If|When|While|With|Without|Such|So|Also|Only|Else|Same|None|Nothing|[a-z].*|.*'s)"
)
"""First words by which a function's docstring says something other than what the function does."""
DUPLICATE_NAMES = 10
"""Public functions and classes that two files or more may define under one name."""
SHARED_STEMS = 10
"""Base names of files that two folders or more may share."""


def comments_in(source: str) -> Iterator[str]:
    """Yield a file's comments without their signs."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def docstrings_in(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield each function and class that has a docstring, and the docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node)
            if text:
                yield node, text


def exceeded_rates(texts: Iterable[str]) -> Iterator[str]:
    """Yield a message per word that occurs more often than ``RATES`` allows."""
    text = "\n".join(texts)
    words = len(WORD.findall(text))
    for pattern, limit in RATES.items():
        rate = 1000 * len(re.findall(rf"(?i)\b(?:{pattern})\b", text)) / max(1, words)
        if rate > limit:
            yield f"{rate:.1f} times '{pattern}' per 1,000 words, more than {limit}"


def without_verb(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and docstring of functions whose docstring does not begin with a verb; properties are fields."""
    for node, text in docstrings_in(tree):
        if isinstance(node, ast.ClassDef) or any("property" in ast.unparse(d) for d in node.decorator_list):
            continue
        first = re.split(r"[\s,:;]", text, maxsplit=1)[0]
        if NO_VERBS.fullmatch(first):
            yield node.lineno, text.split("\n", 1)[0]


def duplicates(found: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Return the names that several files have, with these files, for pairs (name, file)."""
    files: dict[str, set[str]] = defaultdict(set)
    for name, file in found:
        files[name].add(file)
    return {name: places for name, places in sorted(files.items()) if len(places) > 1}


def public_names(tree: ast.Module) -> Iterator[str]:
    """Yield the public functions and classes that a module defines."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def main() -> int:
    """Print each broken rule; return 1 if there is one."""
    broken: list[str] = []
    names: list[tuple[str, str]] = []
    stems: list[tuple[str, str]] = []
    for package in PACKAGES:
        texts: list[str] = []
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            file, source = path.relative_to(REPOSITORY).as_posix(), path.read_text()
            tree = ast.parse(source)
            texts += comments_in(source)
            texts += [text for _, text in docstrings_in(tree)]
            broken += [f"{file}:{line}: begin with a verb: {text}" for line, text in without_verb(tree)]
            names += [(name, file) for name in public_names(tree)]
            if path.name != "__init__.py":
                stems.append((path.stem, file))
        broken += [f"{package}: {message}." for message in exceeded_rates(texts)]
    for kind, limit, found in (
        ("public names", DUPLICATE_NAMES, duplicates(names)),
        ("base names of files", SHARED_STEMS, duplicates(stems)),
    ):
        sys.stdout.write(f"{kind} in several files: {len(found)}, at most {limit}\n")
        if len(found) > limit:
            broken += [f"{name}: {', '.join(sorted(files))}" for name, files in found.items()]
    sys.stdout.write("".join(f"{line}\n" for line in broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
