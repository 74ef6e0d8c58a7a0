"""The engine: one thread that computes requests. Only messages and views reach other threads."""
