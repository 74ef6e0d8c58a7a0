"""Multi-phase workflows over agents: `parse` reads a script, `run` takes its turns, `transcript` keeps them."""
