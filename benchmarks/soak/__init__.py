"""Rude clients on one server, for as long as you like."""
