"""The ways to compute a request: a plan for each."""
