"""The cache folder: files that are there whole or not at all. No MLX."""
