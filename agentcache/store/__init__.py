"""The cache folder's files and their formats. No MLX."""
