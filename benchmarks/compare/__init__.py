"""Conversations with a restart in the middle, against mlx_lm.server."""
