"""What agents still know phases later, and its cost."""
