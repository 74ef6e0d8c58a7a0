"""Multi-phase scripts over agents: read them (`script`), run them (`run`), keep what was said (`transcript`)."""
