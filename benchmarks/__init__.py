"""Benchmarks and a soak: `python -m benchmarks --help`."""
