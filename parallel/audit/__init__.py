"""Step audit: another rank recomputes sampled matmuls, attention outputs and optimizer updates."""
