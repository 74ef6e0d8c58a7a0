"""LoRA decoders trained on a frozen model's cache: `python -m agentcache.training decoder --help`."""
