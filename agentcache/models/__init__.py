"""mlx-lm models on the paged cache."""
