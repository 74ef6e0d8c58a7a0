"""Lineages of agents, saved and restored."""
