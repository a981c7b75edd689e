"""Parts of ``benchmarks/scale.py``: what each piece of the host's work costs one rank of a large job."""
