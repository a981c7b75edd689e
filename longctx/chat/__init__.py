"""Conversations: messages rendered by a model's chat template, their token ids, and which of these ids count."""
