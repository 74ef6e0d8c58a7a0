"""Settings, their sources, and the memory plan."""
