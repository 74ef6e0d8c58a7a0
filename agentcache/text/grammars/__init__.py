"""llguidance grammars for answers of a demanded form."""
