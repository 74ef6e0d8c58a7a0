"""Multi-phase scripts over agents.

Read from TOML (`parse`, with facts drawn by a seed in `values` and lookup tables in `tools`) into a `script`; taken
turn by turn (`run`, `turn`), several turns at a time (`schedule`), by whatever can `chat`; kept as a `transcript` with
what each turn cost and what of the expected was said (`checks`, `score`).
"""
