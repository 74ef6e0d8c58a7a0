"""The command line: one file per command, heavy imports inside the command functions."""
