"""agentcache beside bare mlx-lm and `mlx_lm.server` at the size of real models."""
