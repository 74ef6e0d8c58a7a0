"""Python's share of a step and of matching a prompt."""
