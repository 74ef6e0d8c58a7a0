"""Tools that measure and torture a server, run from a clone: `python -m benchmarks --help`."""
