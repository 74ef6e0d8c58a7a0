"""Grammars that restrict answers to a demanded form, with llguidance."""
