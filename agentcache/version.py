"""The version of agentcache, for every layer: importing the package itself from a lower one would point upwards."""

__version__ = "0.1.0"
