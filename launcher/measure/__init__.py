"""``launcher measure``: measure this machine's speed as a hardware profile for ``plan``.

As many processes measure concurrently as a run would have ranks, since they share cores, caches, memory and links.
"""
