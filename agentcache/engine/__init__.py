"""The engine: one thread that computes requests, one step at a time. Only messages and views reach other threads."""
