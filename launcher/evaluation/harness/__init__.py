"""lm-eval (EleutherAI's lm-evaluation-harness) for our models, in one process or over ranks."""
