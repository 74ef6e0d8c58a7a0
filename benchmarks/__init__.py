"""Measures and tortures a server: `python -m benchmarks --help`."""
