"""Multi-phase workflows over agents.

`parse` reads a script from TOML, `run` takes its turns (`schedule`: in parallel), and `transcript` keeps them.
"""
