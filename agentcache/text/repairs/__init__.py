"""Conversations as a chat template takes them."""
