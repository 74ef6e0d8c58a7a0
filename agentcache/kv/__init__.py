"""KV storage: arenas in RAM, and the byte layout of blocks."""
