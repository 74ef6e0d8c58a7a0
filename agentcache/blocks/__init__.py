"""Who owns which block: keys, reference counts, the radix tree, prompt matching. Plain Python, no tensors."""
