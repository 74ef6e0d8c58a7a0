"""Multi-phase workflows over agents.

`parse` reads a script from TOML, with facts from `values` and lookup tables from `tools`. `run` and `turn` take its
turns, `schedule` several at a time. `transcript` keeps each turn with its cost and its `checks`; `score` counts them.
"""
