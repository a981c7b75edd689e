"""What a run will take, before it starts: one step of each kind of rank, traced without a GPU.

Nothing here imports torch when the package is imported: a stand-in for the driver must come before it.
"""
