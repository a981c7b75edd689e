"""Programme for fifteen minutes on one GPU: steps as values (``steps``), a runner, and a process per step."""
