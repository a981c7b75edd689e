"""One step of each kind of rank, traced without a GPU: memory, links, host waits.

Nothing here imports torch when the package is imported: a stand-in for the driver must come before it.
"""
