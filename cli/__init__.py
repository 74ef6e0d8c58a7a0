"""The commands; their functions import slow modules."""
