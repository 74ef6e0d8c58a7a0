"""Commands, one per file; heavy imports are inside command functions."""
