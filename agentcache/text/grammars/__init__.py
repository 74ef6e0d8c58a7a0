"""Grammars for answers of a demanded form, with llguidance."""
