"""Conversations: messages rendered by a model's chat template, their token ids and loss mask."""
