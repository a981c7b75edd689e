"""``launcher measure``: how fast this machine is, as a hardware profile that ``plan`` reads.

As many processes as a run would have ranks measure at the same time: they share cores, caches, memory and links.
"""
