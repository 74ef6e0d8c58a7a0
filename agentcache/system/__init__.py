"""The operating system: memory, files, threads and confined child processes."""
