"""``longctx run``: start a training command, and start it again from its newest good checkpoint when it fails."""
