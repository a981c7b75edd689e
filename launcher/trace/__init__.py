"""One step on each kind of rank, traced without a GPU: memory, links, host waits.

Importing this package does not import torch: a stand-in for the driver must be loaded first.
"""
