"""How the embedded model was made: synthetic conversations from a seed, a tokenizer, training in MLX, recall."""
