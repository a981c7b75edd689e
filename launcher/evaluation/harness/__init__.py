"""lm-eval (EleutherAI's lm-evaluation-harness) with a model of ours, on one process or over ranks."""
