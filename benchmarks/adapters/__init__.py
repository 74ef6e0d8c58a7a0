"""Adapters on one server: a change of adapter, chains of adapters, batches that mix them."""
