"""Fused attention kernels for Metal and CUDA on plain arrays; `agentcache.models.fused` decides which are used."""
