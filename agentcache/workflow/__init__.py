"""Workflows over agents: `parse` reads scripts, `run` takes turns, `transcript` keeps them."""
