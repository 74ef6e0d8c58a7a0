"""Keys, block tables, radix tree and prompt matching, in plain Python."""
