"""mlx-lm models on the paged Q4 cache."""
