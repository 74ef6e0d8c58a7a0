"""KV storage: arenas in RAM, byte layout of blocks."""
