"""``launcher measure``: measure the speed of this machine as a hardware profile that ``plan`` reads.

As many processes as a run would have ranks measure at the same time, since they share cores, caches, memory and links.
"""
