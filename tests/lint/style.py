"""Figures of readable code, held to limits: ``python -m tests.lint.style``, a part of ``make lint``.

Ternaries (``a if c else b``), star-unpackings in calls and literals (``[*x]``, ``f(*x)``) and comments are counted for
each 1,000 code lines, which are lines that are neither blank nor comment nor docstring.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
TOOL_COMMENTS = ("# type:", "# noqa", "# pyright:")
MARKDOWN = ("*.md", "docs/**/*.md")
MARKDOWN_COLUMNS = 100


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits for each 1,000 code lines."""

    ternaries: float
    stars: float
    comments: float
    """At least so many."""


LIMITS = {
    "launcher": Limits(ternaries=15, stars=6, comments=40),
    "longctx": Limits(ternaries=15, stars=6, comments=45),
    "longctx/architecture": Limits(ternaries=15, stars=6, comments=40),
    "longctx/conversion": Limits(ternaries=15, stars=6, comments=40),
    # A family's table is that of its relatives and a few rules more, which `*llama_like()` says in its first line.
    "longctx/families": Limits(ternaries=15, stars=30, comments=40),
    "longctx/generation": Limits(ternaries=15, stars=6, comments=40),
    "longctx/objectives": Limits(ternaries=15, stars=6, comments=40),
    "longctx/kernels": Limits(ternaries=5, stars=6, comments=45),
    "longctx/model": Limits(ternaries=15, stars=6, comments=45),
    "parallel": Limits(ternaries=15, stars=6, comments=50),
    "data_pipeline": Limits(ternaries=15, stars=6, comments=40),
}
AIM = Limits(ternaries=15, stars=6, comments=60)
SIZES = {"class": 400, "function": 80, "file": 500}
"""Lines of one class, function and file, without comment lines: a comment must not cost a line of code.

A class may be as long as the decoder: what only a class calls is its method, not a function that takes it first."""
MARKDOWN_LIMIT = 0
"""Long lines of Markdown, all pages together."""


@dataclass(kw_only=True)
class Figures:
    """What was counted in some files."""

    code: int = 0
    ternaries: int = 0
    stars: int = 0
    comments: int = 0
    sizes: list[tuple[str, int, str]] = field(default_factory=list)
    """Kind, number of lines and ``path:name`` of every class, function and file."""

    def add(self, other: Figures) -> None:
        """Count the files of ``other`` too."""
        self.code += other.code
        self.ternaries += other.ternaries
        self.stars += other.stars
        self.comments += other.comments
        self.sizes += other.sizes

    def per_thousand(self, name: str) -> float:
        """``ternaries``, ``stars`` or ``comments`` for each 1,000 code lines."""
        return 1000 * getattr(self, name) / max(1, self.code)

    def largest(self, kind: str) -> tuple[int, str]:
        """Lines and name of the longest class, function or file."""
        return max(((lines, name) for found, lines, name in self.sizes if found == kind), default=(0, ""))


def count(source: str, path: str) -> Figures:
    """The figures of one file."""
    tree = ast.parse(source)
    comment_lines = {number for number, line in enumerate(source.splitlines(), 1) if line.lstrip().startswith("#")}
    figures = Figures(sizes=[("file", source.count("\n") - len(comment_lines), path)])
    docstring_lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            figures.ternaries += 1
        elif isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Load):
            figures.stars += 1
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstring_lines.update(_lines(node))
        elif isinstance(node, ast.ClassDef):
            figures.sizes.append(("class", len(set(_lines(node)) - comment_lines), f"{path}:{node.name}"))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            figures.sizes.append(("function", len(set(_lines(node)) - comment_lines), f"{path}:{node.name}"))
    code_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            figures.comments += not token.string.startswith(TOOL_COMMENTS)
        elif token.string.strip():
            code_lines.update(range(token.start[0], token.end[0] + 1))
    figures.code = len(code_lines - docstring_lines)
    return figures


def count_folder(root: Path, repository: Path) -> Figures:
    """The figures of all Python files of a folder together."""
    figures = Figures()
    for path in sorted(root.rglob("*.py")):
        figures.add(count(path.read_text(), path.relative_to(repository).as_posix()))
    return figures


def broken_limits(root: str, figures: Figures, limits: Limits) -> Iterator[str]:
    """A line for each limit that a folder breaks."""
    for name in ("ternaries", "stars"):
        if figures.per_thousand(name) > getattr(limits, name):
            yield f"{root}: {figures.per_thousand(name):.1f} {name}, more than {getattr(limits, name)}."
    if figures.per_thousand("comments") < limits.comments:
        yield f"{root}: {figures.per_thousand('comments'):.1f} comments, fewer than {limits.comments}."


def oversized(figures: Figures) -> dict[str, str]:
    """What is beyond ``SIZES``: its ``path:name``, and a line that says so."""
    return {
        name: f"{name}: a {kind} of {lines} lines, more than {SIZES[kind]}."
        for kind, lines, name in figures.sizes
        if lines > SIZES[kind]
    }


def long_lines(markdown: str) -> list[int]:
    """Numbers of the lines beyond ``MARKDOWN_COLUMNS`` that are neither in a table nor in a block of code."""
    found: list[int] = []
    in_code = False
    for number, line in enumerate(markdown.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        is_free = in_code or line.lstrip().startswith("|") or re.fullmatch(r"\S*\[[^]]*\]\(\S+\)\S*", line.strip())
        if len(line) > MARKDOWN_COLUMNS and not is_free:
            found.append(number)
    return found


def _lines(node: ast.stmt) -> range:
    """The lines from a statement's first to its last."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _row(root: str, figures: Figures, limits: Limits) -> str:
    """One line of the table: figure and limit."""
    ratios = "".join(
        f"{figures.per_thousand(name):>7.1f} {sign} {getattr(limits, name):<4g}"
        for name, sign in (("ternaries", "≤"), ("stars", "≤"), ("comments", "≥"))
    )
    largest = "".join(f"{figures.largest(kind)[0]:>9}" for kind in SIZES)
    return f"{root:<21}{figures.code:>7,}{ratios}{largest}"


def main() -> int:
    """Print the table and what breaks a limit; the exit code is 1 if anything does."""
    out = [
        f"for each 1,000 code lines: figure and limit (aim: {AIM.ternaries:g}, {AIM.stars:g}, {AIM.comments:g})",
        f"{'':<21}{'code':>7}{'ternaries':>14}{'stars':>14}{'comments':>14}   class function     file",
    ]
    broken: list[str] = []
    beyond: dict[str, str] = {}
    for root, limits in LIMITS.items():
        figures = count_folder(REPOSITORY / root, REPOSITORY)
        out.append(_row(root, figures, limits))
        broken += broken_limits(root, figures, limits)
        beyond |= oversized(figures)
    broken += beyond.values()

    pages = [page for pattern in MARKDOWN for page in sorted(REPOSITORY.glob(pattern))]
    wide = {page.relative_to(REPOSITORY).as_posix(): len(long_lines(page.read_text())) for page in pages}
    total = sum(wide.values())
    worst = ", ".join(f"{name} {number}" for name, number in sorted(wide.items(), key=lambda p: -p[1])[:4] if number)
    out.append(f"Markdown beyond {MARKDOWN_COLUMNS} columns: {total} lines {f'({worst})' if worst else ''}".rstrip())
    if total > MARKDOWN_LIMIT:
        broken.append(f"Markdown: {total} lines beyond {MARKDOWN_COLUMNS} columns, more than {MARKDOWN_LIMIT}.")
    sys.stdout.write("\n".join([*out, *broken]) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
