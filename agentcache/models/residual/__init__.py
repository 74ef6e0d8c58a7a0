"""Residual KV: what an adapter adds to base's keys and values (ForkKV, arXiv 2604.06370)."""
