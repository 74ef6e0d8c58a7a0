"""Repairs of conversations for chat templates."""
