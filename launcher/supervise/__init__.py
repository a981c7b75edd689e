"""``longctx run``: start a training command, and restart it from its newest good checkpoint when it fails."""
