"""The commands; functions import slow modules."""
