"""Checks of the network between the machines of a run: interfaces and ports. One worker process per host, over ssh."""
