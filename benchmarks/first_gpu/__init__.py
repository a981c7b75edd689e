"""The programme of fifteen minutes on one GPU: steps as values (``steps``), a runner, and a process for each step."""
