"""Conversations: messages as text by a model's chat template, as ids, and which of these a model is trained on."""
