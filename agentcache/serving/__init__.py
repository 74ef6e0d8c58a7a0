"""Requests, scheduling, agents and the engine that runs them."""
