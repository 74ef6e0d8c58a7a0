"""Grammars: which tokens an answer of a certain form can go on with. By llguidance."""
