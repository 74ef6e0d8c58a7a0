"""Agents: their lineages, and saving and restoring them."""
