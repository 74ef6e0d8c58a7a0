"""The version of agentcache. A module of its own, so that lower layers can import it."""

__version__ = "0.1.0"
