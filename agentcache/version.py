"""The version, in a module that lower layers can import."""

__version__ = "0.1.0"
