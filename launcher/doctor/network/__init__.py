"""Network checks between a run's machines: interfaces and ports, by one worker process per host over ssh."""
