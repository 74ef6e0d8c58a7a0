"""Values that cross wings: what is asked of the engine, and what it answers."""
