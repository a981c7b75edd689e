"""The network between the machines of a run: interfaces, ports, links. One process a host, asked over ssh."""
