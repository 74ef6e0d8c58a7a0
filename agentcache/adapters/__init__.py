"""Adapters: names, users, and weights on the device."""
