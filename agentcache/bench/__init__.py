"""Benchmarks of a real server over HTTP, their tables and plots."""
