"""The engine: one thread that takes requests from their prompt to their last token, one step at a time."""
