"""mlx-lm models, re-hosted on the paged Q4 cache."""
