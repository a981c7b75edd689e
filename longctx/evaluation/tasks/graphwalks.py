"""GraphWalks-style questions about a directed graph, given as a list of edges in random order.

The templates are ours; OpenAI's dataset with that name is different, and scores are not comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from longctx.evaluation.independent_samples import Draft, PromptSpec

OUT_DEGREE = 2
WALK = 3
"""Steps in the breadth-first search."""
MOST_ANSWERS = 8
"""Maximum nodes in an answer; a walk of three steps reaches at most this many."""
MIN_TOKENS = 8
"""Nodes in the smallest graph."""

Graph = dict[str, list[str]]

_EXAMPLE_NODES = ("0a0a0a", "1b1b1b", "2c2c2c", "3d3d3d")
_HEADER = (
    "A directed graph is given by its edges, one a line. Answer with a list of nodes in brackets.\n\n"
    "Example:\n{edges}\nQuestion: {question}\nAnswer: {answer}\n\n"
)
_BFS = "Which nodes can be reached from {node} in exactly {steps} steps and in no fewer?"
_PREDECESSORS = "Which nodes have an edge that leads to {node}?"


def build_bfs(request: PromptSpec) -> Draft:
    """Build a question for the nodes with a shortest path of ``WALK`` edges from a node. ``units`` counts nodes."""
    graph, edges = _random_graph(request.random, request.units)
    # The first node in random order is a random node.
    start = next((node for node in graph if frontier(graph, node, WALK)), None)
    # A small graph may have no such path from any node; then two steps lead somewhere, or one does.
    steps = WALK
    while start is None:
        steps -= 1
        start = next((node for node in graph if frontier(graph, node, steps)), None)
    a, b, c, d = _EXAMPLE_NODES
    example = _header([(a, b), (b, c), (a, d)], _BFS.format(node=a, steps=2), [c])
    return _draft(example, edges, _BFS.format(node=start, steps=steps), frontier(graph, start, steps))


def build_predecessors(request: PromptSpec) -> Draft:
    """Build a question for the nodes with an edge to a node that has at least one, and at most ``MOST_ANSWERS``."""
    graph, edges = _random_graph(request.random, request.units)
    # Long answers would test the output limit instead of the search.
    wanted = next(node for node in graph if 0 < len(predecessors(graph, node)) <= MOST_ANSWERS)
    a, b, c, d = _EXAMPLE_NODES
    example = _header([(a, b), (b, c), (d, c)], _PREDECESSORS.format(node=c), [b, d])
    return _draft(example, edges, _PREDECESSORS.format(node=wanted), predecessors(graph, wanted))


def frontier(graph: Graph, start: str, steps: int) -> list[str]:
    """Return the nodes at a distance of exactly ``steps`` from ``start``, sorted."""
    seen = {start}
    current = {start}
    for _ in range(steps):
        current = {child for node in current for child in graph[node]} - seen
        seen |= current
    return sorted(current)


def predecessors(graph: Graph, node: str) -> list[str]:
    """Return the nodes with an edge to ``node``, sorted."""
    return sorted(parent for parent, children in graph.items() if node in children)


def _random_graph(random: Random, num_nodes: int) -> tuple[Graph, list[tuple[str, str]]]:
    """Return a graph with ``OUT_DEGREE`` edges per node to others, and its edges in random order."""
    # Six hex digits name sixteen million nodes, more than any prompt holds.
    nodes = [f"{number:06x}" for number in random.sample(range(1 << 24), num_nodes)]
    graph: Graph = {}
    for at, node in enumerate(nodes):
        # Offsets from the node itself, so that no node is its own child.
        others = [(at + 1 + step) % num_nodes for step in random.sample(range(num_nodes - 1), OUT_DEGREE)]
        graph[node] = [nodes[other] for other in others]
    edges = [(node, child) for node, children in graph.items() for child in children]
    # In node order, the parts of an answer would be on adjacent lines.
    random.shuffle(edges)
    return graph, edges


def _header(edges: Sequence[tuple[str, str]], question: str, answer: list[str]) -> str:
    return _HEADER.format(edges=_lines(edges), question=question, answer=_list(answer))


def _draft(header: str, edges: Sequence[tuple[str, str]], question: str, answer: list[str]) -> Draft:
    return Draft(
        prompt=f"{header}Graph:\n{_lines(edges)}\nQuestion: {question}\nAnswer:",
        answers=tuple(answer),
        target=f" {_list(answer)}",
    )


def _lines(edges: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{node} -> {child}" for node, child in edges)


def _list(nodes: list[str]) -> str:
    return f"[{', '.join(nodes)}]"
