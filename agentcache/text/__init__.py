"""From chat messages to tokens and back."""
