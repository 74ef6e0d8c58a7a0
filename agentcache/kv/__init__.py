"""Where keys and values lie: Q4 arenas in RAM, block files on disk."""
