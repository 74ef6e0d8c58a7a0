"""Keys, reference counts, radix tree and prompt matching. Plain Python."""
