"""Benchmarks of a real server over HTTP."""
