"""The network between the machines of a run: interfaces and ports. One process a host, asked over ssh."""
