"""Measurements beside a limit or a peer, in one run. Each module prints a table and writes ``benchmarks/results``."""
