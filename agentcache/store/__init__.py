"""Files of the cache folder and their formats. Writes are atomic. No MLX."""
